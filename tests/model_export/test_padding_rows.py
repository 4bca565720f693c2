"""Rows of padding: looking them up trains nothing, any other use of the same weight does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.capture import capture_torch
from model_export.errors import ExportError
from tests.model_export.autodiff.module_harness import check_module

TOKENS = torch.full((2, 5), 6)


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, padding: int | None, functional: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=padding)
        self.dense = nn.Linear(4, 4)
        self.padding = padding
        self.functional = functional

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x, self.words.weight, self.padding) if self.functional else self.words(x)
        return F.linear(torch.tanh(self.dense(found)), self.words.weight).transpose(1, 2)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("padding", [0, 3, -1, None])
def test_the_output_side_of_a_tied_embedding_trains_the_padding_row(padding: int | None, functional: bool) -> None:
    torch.manual_seed(0)
    check_module(Tied(padding, functional), TOKENS, Loss("cross_entropy"))


def test_two_embeddings_of_one_weight_agree_about_its_padding() -> None:
    class Twice(Tied):
        def forward(self, x: Tensor) -> Tensor:
            return self.dense(self.words(x) * F.embedding(x.flip(1), self.words.weight, 1)).transpose(1, 2)

    torch.manual_seed(0)
    check_module(Twice(1), TOKENS, Loss("cross_entropy"))
    with pytest.raises(ExportError, match=r"words.weight has the padding row 1; expected"):
        capture_torch(Twice(0), TOKENS)
