"""`pack_padded_sequence` without packing: sequences of different lengths in tensors of one length.

A packed sequence has a number of steps that depends on the data, which no graph of fixed shapes can have. Padded
tensors give the same. Forwards, steps behind the end of a sequence change nothing before it: its last state is the
output at its last step. Backwards, every sequence is turned round within its own length, run forwards, and turned
back. What `pad_packed_sequence` gives is as long as what was packed, with zeros behind the end of each sequence.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn


@dataclass(frozen=True)
class Padded:
    """Sequences [N, steps, width] with their lengths, in the place of a PackedSequence."""

    data: Tensor
    lengths: Tensor


@contextlib.contextmanager
def padded_sequences() -> Iterator[None]:
    """Inside, packing keeps what it is given, and recurrent layers take it."""
    with contextlib.ExitStack() as replaced:
        for owner in (rnn, *_importers("pack_padded_sequence")):
            replaced.enter_context(mock.patch.object(owner, "pack_padded_sequence", _pack))
        for owner in (rnn, *_importers("pad_packed_sequence")):
            replaced.enter_context(mock.patch.object(owner, "pad_packed_sequence", _pad))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            replaced.enter_context(mock.patch.object(kind, "forward", _forward(kind.forward)))
        yield


def _importers(name: str) -> list[Any]:
    """Modules that imported a function of PyTorch by its name."""
    function = getattr(rnn, name)
    return [m for m in list(sys.modules.values()) if m is not rnn and getattr(m, "__dict__", {}).get(name) is function]


def _pack(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Padded:
    data = input if batch_first else input.transpose(0, 1)
    return Padded(data, torch.as_tensor(lengths).long())


def _pad(
    sequence: Padded, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    data = _outside(sequence.data, sequence.lengths, padding_value)
    return (data if batch_first else data.transpose(0, 1)), sequence.lengths


def _steps(data: Tensor) -> Tensor:
    return torch.arange(data.shape[1]).unsqueeze(0)


def _outside(data: Tensor, lengths: Tensor, value: float) -> Tensor:
    """Sequences with a value behind their ends."""
    return data.masked_fill((_steps(data) >= lengths.unsqueeze(1)).unsqueeze(-1), value)


def _reversed(data: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence turned round within its length; what is behind it stays."""
    steps, ends = _steps(data), lengths.unsqueeze(1)
    places = torch.where(steps < ends, ends - 1 - steps, steps)
    return data.gather(1, places.unsqueeze(-1).expand(-1, -1, data.shape[2]))


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        return _run(self, input, hx) if isinstance(input, Padded) else original(self, input, hx)

    return forward


def _run(layer: nn.RNNBase, packed: Padded, hx: Any) -> tuple[Padded, Any]:
    """All layers and directions of a recurrent module, each as one plain recurrent layer."""
    if layer.proj_size:
        raise NotImplementedError("packed sequences with proj_size")
    x, lengths = packed.data, packed.lengths
    directions = 2 if layer.bidirectional else 1
    several = isinstance(layer, nn.LSTM)
    zeros = x.new_zeros(1, 1, 1).expand(layer.num_layers * directions, x.shape[0], layer.hidden_size)
    given = (zeros, zeros) if hx is None and several else (zeros,) if hx is None else hx if several else (hx,)
    finals: list[list[Tensor]] = []
    for number in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            place = number * directions + direction
            weights = layer.all_weights[place]
            start = tuple(state[place : place + 1] for state in given)
            sequence = _reversed(x, lengths) if direction else x
            out, last = _one(layer, sequence, lengths, start, weights)
            outputs.append(_reversed(out, lengths) if direction else out)
            finals.append(last)
        x = torch.cat(outputs, -1)
        if layer.dropout and number + 1 < layer.num_layers:
            x = nn.functional.dropout(x, layer.dropout, layer.training)
    states = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return Padded(_outside(x, lengths, 0.0), lengths), states if several else states[0]


def _one(
    layer: nn.RNNBase, x: Tensor, lengths: Tensor, start: tuple[Tensor, ...], weights: Any
) -> tuple[Tensor, list[Tensor]]:
    """One direction of one layer, forwards: all outputs, and the states after the last true step."""
    several = isinstance(layer, nn.LSTM)
    name = layer.mode.lower()
    function: Any = getattr(torch._VF, name)
    first = start if several else start[0]
    out: Tensor = function(x, first, list(weights), layer.bias, 1, 0.0, layer.training, False, True)[0]
    ends = (lengths - 1).clamp(min=0)  # a probe of the exporter may have a length of 0, which PyTorch refuses
    places = ends.reshape(-1, 1, 1).expand(-1, 1, out.shape[2])
    last = [out.gather(1, places)[:, 0]]
    if several:
        last.append(_last_cell(x, out, lengths, start, weights))
    return out, last


def _last_cell(x: Tensor, out: Tensor, lengths: Tensor, start: tuple[Tensor, ...], weights: Any) -> Tensor:
    """The cell after the last true step. The layer itself gives only the one after all steps: compute it step by step.

    Exporters drop all of it if the model does not use the cell.
    """
    before = torch.cat([start[0].transpose(0, 1), out[:, :-1]], 1)
    gates = x @ weights[0].T + before @ weights[1].T
    if len(weights) > 2:
        gates = gates + weights[2] + weights[3]
    enter, forget, candidate, _ = gates.chunk(4, -1)
    added, kept = torch.sigmoid(enter) * torch.tanh(candidate), torch.sigmoid(forget)
    cell = start[1][0]
    for step in range(x.shape[1]):
        new = kept[:, step] * cell + added[:, step]
        cell = torch.where((step < lengths).unsqueeze(1), new, cell)
    return cell
