"""Sequences of different lengths: the meaning of pack_padded_sequence, against PyTorch's own packing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from model_export.packed_sequences import padded_sequences
from tests.model_export.autodiff.module_harness import check_module

LENGTHS = torch.tensor([5, 2, 4, 1])


class Reader(nn.Module):
    """Uses all that a recurrent layer gives: outputs, last states, and the last cell of an LSTM."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(9, 3, padding_idx=0)
        self.reader = kind(3, 4, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        out, last = self.reader(packed)
        whole, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        states = last if isinstance(last, tuple) else (last,)
        told = whole.sum(1)
        for state in states:
            told = told + torch.cat([state[-2], state[-1]], 1)
        scores: Tensor = self.head(told)
        return scores


def sentences() -> Tensor:
    x = torch.randint(1, 9, (len(LENGTHS), 5), generator=torch.Generator().manual_seed(0))
    return x.masked_fill(torch.arange(5) >= LENGTHS.unsqueeze(1), 0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_padded_is_what_packed_is(kind: type[nn.RNNBase]) -> None:
    packed = Reader(kind).double()
    padded = copy.deepcopy(packed)
    x = sentences()
    expected = packed(x)
    expected.square().sum().backward()
    with padded_sequences():
        found = padded(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for (name, one), other in zip(packed.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_are_exported(kind: type[nn.RNNBase]) -> None:
    check_module(Reader(kind, 1), sentences())
