"""LSTM, GRU and RNN: directions, optional inputs and outputs, order of gates, gradients through fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.errors import ExportError
from model_export.plain_operators import plain_operators
from tests.model_export.autodiff.drawing import examples
from tests.model_export.autodiff.harness import Input, check_operator, of, operator
from tests.model_export.autodiff.module_harness import check_module

States = tuple[Tensor, ...]


def lstm_cell(x: Tensor, states: States, w: Tensor, r: Tensor, b: Tensor) -> States:
    """The equations of ONNX; gates in the order input, output, forget, cell."""
    h, c = states
    wb, rb = b.chunk(2)
    i, o, f, g = (x @ w.T + h @ r.T + wb + rb).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(x: Tensor, states: States, w: Tensor, r: Tensor, b: Tensor, linear: bool) -> States:
    """The equations of ONNX; gates in the order update, reset, hidden."""
    h = states[0]
    (wz, wr, wh), (rz, rr, rh) = w.chunk(3), r.chunk(3)
    bz, br, bh, cz, cr, ch = b.chunk(6)
    z = torch.sigmoid(x @ wz.T + h @ rz.T + bz + cz)
    r = torch.sigmoid(x @ wr.T + h @ rr.T + br + cr)
    inner = r * (h @ rh.T + ch) if linear else (r * h) @ rh.T + ch
    return ((1 - z) * torch.tanh(x @ wh.T + bh + inner) + z * h,)


def rnn_cell(x: Tensor, states: States, w: Tensor, r: Tensor, b: Tensor, activation: str) -> States:
    wb, rb = b.chunk(2)
    return (getattr(torch, activation.lower())(x @ w.T + states[0] @ r.T + wb + rb),)


def recursion(
    cell: Callable[..., States],
    x: Tensor,
    first: list[Tensor],
    direction: int,
    reverse: bool,
    last: int | None,
    *weights: Tensor,
) -> tuple[Tensor, States]:
    """All hidden states of one direction and the final ones; gradients flow through the `last` steps only."""
    steps = list(range(len(x)))[::-1] if reverse else list(range(len(x)))
    states = tuple(state[direction] for state in first)
    outputs: dict[int, Tensor] = {}
    for number, step in enumerate(steps):
        is_trained = last is None or number >= len(steps) - last
        with nullcontext() if is_trained else torch.no_grad():
            states = cell(x[step], states, *(weight[direction] for weight in weights))
        outputs[step] = states[0]
    return torch.stack([outputs[step] for step in sorted(outputs)]), states


def check_recurrent(op_type: str, data: st.DataObject, *, shortened: bool) -> None:
    gates, states = {"LSTM": (4, 2), "GRU": (3, 1), "RNN": (1, 1)}[op_type]
    steps, width, hidden = (data.draw(st.integers(1, 4)) for _ in range(3))
    direction = data.draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    count = 2 if direction == "bidirectional" else 1
    has_bias = data.draw(st.booleans())
    has_states = [data.draw(st.booleans()) for _ in range(states)]
    names = ["y", "h", "c"][: states + 1]
    present = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    used = data.draw(st.lists(st.sampled_from(present), unique=True, min_size=1))
    last = data.draw(st.integers(1, steps + 1)) if shortened else None
    linear = op_type == "GRU" and data.draw(st.booleans())
    activation = data.draw(st.sampled_from(["Tanh", "Relu"])) if op_type == "RNN" else ""
    cells = {
        "LSTM": lstm_cell,
        "GRU": partial(gru_cell, linear=linear),
        "RNN": partial(rnn_cell, activation=activation),
    }
    cell = cells[op_type]

    def reference(x: Tensor, w: Tensor, r: Tensor, *rest: Tensor) -> list[Tensor]:
        given = list(rest)
        b = given.pop(0) if has_bias else torch.zeros(count, 2 * gates * hidden)
        zeros = torch.zeros(count, x.shape[1], hidden).double()
        first = [given.pop(0) if has else zeros for has in has_states]
        results = [
            recursion(cell, x, first, index, direction == "reverse" or index == 1, last, w, r, b)
            for index in range(count)
        ]
        found = {"y": torch.stack([sequence for sequence, _ in results], 1)}
        for place, name in enumerate(names[1:]):
            found[name] = torch.stack([final[place] for _, final in results])
        return [found[name] for name in names if name in present]

    inputs: list[Input] = [
        (steps, None, width),
        (count, gates * hidden, width),
        (count, gates * hidden, hidden),
        (count, 2 * gates * hidden) if has_bias else None,
        None,
        *((count, None, hidden) if has else None for has in has_states),
    ]
    while inputs[-1] is None:
        inputs.pop()
    attrs: dict[str, Any] = {"linear_before_reset": int(linear)} if op_type == "GRU" else {}
    attrs |= {"activations": [activation] * count} if activation else {}
    check_operator(
        op_type,
        reference,
        inputs,
        outputs=[name if name in present else "" for name in names],
        unused=[name for name in present if name not in used],
        last_steps=last,
        hidden_size=hidden,
        direction=direction,
        **attrs,
    )


@pytest.mark.parametrize("op_type", [of("LSTM"), of("GRU"), of("RNN")])
@given(data=st.data())
@examples(25)
def test_gradients_through_time_in_each_direction(op_type: str, data: st.DataObject) -> None:
    check_recurrent(op_type, data, shortened=False)


@pytest.mark.parametrize("op_type", [of("LSTM"), of("GRU"), of("RNN")])
@given(data=st.data())
@examples(15)
def test_gradients_through_the_last_steps_of_each_direction_only(op_type: str, data: st.DataObject) -> None:
    check_recurrent(op_type, data, shortened=True)


class Reader(nn.Module):
    """A recurrent network and a dense layer, on every step or on the last state."""

    def __init__(self, kind: type[nn.RNNBase], *, sequence: bool, **options: bool | int) -> None:
        super().__init__()
        self.recurrence = kind(3, 4, batch_first=True, **options)
        self.dense = nn.Linear(8 if options.get("bidirectional") else 4, 2)
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        steps, states = self.recurrence(x)
        if self.sequence:
            return self.dense(steps)
        last = states[0] if isinstance(states, tuple) else states
        return self.dense(torch.cat((last[-2], last[-1]), -1) if self.recurrence.bidirectional else last[-1])


@pytest.mark.parametrize(("op_type", "kind"), [of("LSTM", nn.LSTM), of("GRU", nn.GRU), of("RNN", nn.RNN)])
@given(
    sequence=st.booleans(),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    num_layers=st.integers(1, 2),
    steps=st.integers(1, 4),
)
@examples(8)
def test_recurrent_networks_as_pytorch_exports_them(
    op_type: str,
    kind: type[nn.RNNBase],
    sequence: bool,
    bidirectional: bool,
    bias: bool,
    num_layers: int,
    steps: int,
) -> None:
    torch.manual_seed(0)
    module = Reader(kind, sequence=sequence, bidirectional=bidirectional, bias=bias, num_layers=num_layers)
    check_module(module, torch.randn(2, steps, 3))


@operator("LSTM", "Gather")
def test_an_embedding_in_front_of_a_recurrent_network() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.reader = nn.Embedding(7, 3), Reader(nn.LSTM, sequence=False, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.reader(self.words(x))

    check_module(Model(), torch.randint(0, 7, (2, 5)))


@pytest.mark.parametrize(
    "attrs",
    [
        {"clip": 3.0},
        {"activations": ["Sigmoid", "Relu", "Tanh"]},
        {"input_forget": 1},
    ],
    ids=lambda attrs: next(iter(attrs)),
)
def test_a_variant_without_a_gradient_is_refused_by_name(attrs: dict) -> None:
    zeros = lambda x, w, r: torch.zeros(3, 1, x.shape[1], 2) * x.sum()  # noqa: E731
    with pytest.raises(ExportError, match=r"/LSTM.*has no gradient here"):
        check_operator("LSTM", zeros, [(3, None, 2), (1, 8, 2), (1, 8, 2)], hidden_size=2, **attrs)


@operator("RNN", "Gather")
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_language_model_with_dropout_between_its_recurrent_layers(activation: str) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 5)
            self.reader = nn.RNN(5, 6, 2, nonlinearity=activation, dropout=0.4, batch_first=True)
            self.scores = nn.Linear(6, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(self.reader(self.words(x))[0]).transpose(1, 2)

    with plain_operators():  # so that PyTorch takes the masks of the seed, too
        check_module(Model(), torch.full((2, 5), 6), Loss("cross_entropy"))
