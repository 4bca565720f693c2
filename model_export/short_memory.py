"""Recurrent layers of PyTorch of which only the last steps are trained, as from a boundary `layer@steps` on.

The recursion of each direction is cut: its first steps give states, and the last ones are trained from there. A
boundary with a head runs the first steps once per round (`find_heads`) and brings what they gave to every step, in one
tensor with the layer's input (`HeadLayout`); without a head every step runs them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation.errors import EmbraceError
from federation.manifest import Boundary
from model_export.plain_operators import plain_operators

# Of one direction of a recurrent layer: the outputs of its first steps [steps, N, units], then states [1, N, units].
Head = Sequence[Tensor]
Take = Callable[[Callable[[], Head]], Head]


@contextlib.contextmanager
def short_memory(last_steps: int | None, heads: Iterable[Head] | None = None) -> Iterator[None]:
    """Train the last steps of each direction's recursion only; `heads`: what the first ones gave, in order of use."""
    if last_steps is None:
        yield
        return
    known = None if heads is None else iter(heads)
    with _replaced(last_steps, lambda compute: compute() if known is None else next(known)):
        yield


class _Enough(Exception):
    """Everything that was wanted is known."""


def find_heads(module: Callable[[Tensor], object], x: Tensor, last_steps: int, count: int | None = None) -> list[Head]:
    """Run the first steps of each direction's recursion; nothing beyond head number `count`, if that is known."""
    found: list[Head] = []

    def take(compute: Callable[[], Head]) -> Head:
        found.append(compute())
        if len(found) == count:
            raise _Enough
        return found[-1]

    with torch.no_grad(), _replaced(last_steps, take), plain_operators(), contextlib.suppress(_Enough):
        module(x)
    return found


class HeadLayout:
    """How a head packs what crosses: the layer's input, all states, and all outputs if a later operator reads any."""

    def __init__(self, module: nn.Module, boundary: Boundary) -> None:
        """`module` takes what enters the boundary's layer. It is run once, to see which heads it has."""
        assert boundary.head is not None and boundary.last_steps is not None
        self._shape = boundary.head.input.shape
        was_training, x = module.training, torch.zeros(1, *self._shape)
        self._like = find_heads(module.eval(), x, boundary.last_steps)
        module.train(was_training)
        self._last_steps = boundary.last_steps
        for self._outputs in (False, True):
            if self._pack(x, self._like).shape[1:] == boundary.head.output.shape:
                return
        raise EmbraceError(f"PyTorch has other steps in front of {boundary.name!r} than the bundle; use portable")

    def pack(self, module: nn.Module, x: Tensor) -> Tensor:
        """Run the first steps on what enters the layer."""
        return self._pack(x, find_heads(module, x, self._last_steps, len(self._like)))

    def _pack(self, x: Tensor, heads: Sequence[Head]) -> Tensor:
        parts = [x, *(state for head in heads for state in head[1:])]
        parts += [head[0] for head in heads] if self._outputs else []
        return torch.cat([parts[0].flatten(1), *(part.transpose(0, 1).flatten(1) for part in parts[1:])], 1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, list[Head]]:
        """Take apart what was packed: what enters the layer, and the heads."""
        count, place = len(packed), 0

        def take(size: int) -> Tensor:
            nonlocal place
            place += size
            return packed[:, place - size : place]

        x = take(torch.Size(self._shape).numel()).reshape(count, *self._shape)
        states = [[take(state.shape[2])[None] for state in head[1:]] for head in self._like]
        heads: list[Head] = []
        for (output, *_), own in zip(self._like, states, strict=True):
            steps, _, units = output.shape
            if self._outputs:
                outputs = take(steps * units).reshape(count, steps, units).transpose(0, 1)
            else:
                outputs = output.new_zeros(1).expand(steps, count, units)  # nothing reads them
            heads.append([outputs, *own])
        return x, heads


class HeadModule(nn.Module):
    """A boundary's head: takes what enters its layer, gives what enters its training step."""

    def __init__(self, module: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        self.module = module
        self._layout = HeadLayout(module, boundary)

    def forward(self, x: Tensor) -> Tensor:
        return self._layout.pack(self.module, x)


@contextlib.contextmanager
def _replaced(last_steps: int, take: Take) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            function = _shortened(getattr(torch._VF, name), last_steps, take)
            stack.enter_context(mock.patch.object(torch._VF, name, function))
        yield


def _shortened(func: Callable[..., Any], last_steps: int, take: Take) -> Callable[..., Any]:
    """A recurrent function whose first steps keep nothing for the gradient; `take` runs them or knows better."""

    def run(
        x: Any, states: Any, weights: Any, bias: bool, layers: int, rate: float, training: bool, both: bool, first: bool
    ) -> Any:
        states = states if isinstance(states, (tuple, list)) else (states,)
        directions, each = 2 if both else 1, len(weights) // layers
        output, finals = x.transpose(0, 1) if first else x, []
        for layer in range(layers):
            if layer:
                output = F.dropout(output, rate, training)
            own, start = slice(layer * each, (layer + 1) * each), slice(layer * directions, (layer + 1) * directions)
            output, final = one(output, [state[start] for state in states], weights[own], bias, training, directions)
            finals += final
        output = output.transpose(0, 1) if first else output
        return (output, *(torch.cat(parts) for parts in zip(*finals, strict=True)))

    def one(x: Any, states: Any, weights: Any, bias: bool, training: bool, directions: int) -> tuple[Any, list[Any]]:
        """A single layer: its output, and the final states of each direction."""
        each = len(weights) // directions
        sequences = [x, x.flip(0)][:directions]
        own = [weights[d * each : (d + 1) * each] for d in range(directions)]
        starts = [[state[d : d + 1] for state in states] for d in range(directions)]

        def head(d: int) -> Head:
            with torch.no_grad():
                found: Head = _call(func, sequences[d][:-last_steps], starts[d], own[d], bias, training)
            return found

        heads = [take(partial(head, d)) for d in range(directions)] if len(x) > last_steps else []
        outputs, finals = [], []
        for d, start in enumerate([list(known[1:]) for known in heads] or starts):
            piece, *final = _call(func, sequences[d][-last_steps:], start, own[d], bias, training)
            joined = torch.cat([heads[d][0], piece]) if heads else piece
            outputs.append(joined.flip(0) if d else joined)
            finals.append(final)
        return torch.cat(outputs, -1), finals

    return run


def _call(func: Callable[..., Any], x: Any, states: list[Any], weights: Any, bias: bool, training: bool) -> Any:
    start = tuple(states) if len(states) > 1 else states[0]
    return func(x, start, weights, bias, 1, 0.0, training, False, False)
