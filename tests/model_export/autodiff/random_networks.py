"""Networks drawn at random: shared weights, branches, several readers of one tensor, broadcasting, odd layouts.

A network is a list of steps. Each step reads tensors that are there and adds one; it is tried on a sample while it is
drawn, so that what comes next knows its shape. Values stay near one, away from overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Values = Sequence[Tensor]
Step = Callable[[Values, Values], Tensor]  # of the tensors and of the weights
MOST_ELEMENTS = 96  # of one tensor, per sample

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "relu6": lambda x: F.relu6(3 * x),
    "leaky": F.leaky_relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "abs": torch.abs,
    "neg": torch.neg,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "log": lambda x: torch.log(1.5 + x * x),
    "sqrt": lambda x: torch.sqrt(0.5 + x * x),
    "reciprocal": lambda x: torch.reciprocal(1.0 + x * x),
    "power": lambda x: torch.tanh(x) ** 3,
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "max with itself": lambda x: torch.maximum(x, 0.3 - x),
    "where": lambda x: torch.where(x > 0.1, x, -0.5 * x),
    "kept where positive": lambda x: x * (x > 0).to(x.dtype),
    "batch to the end and back": lambda x: (x.movedim(0, -1) * 0.5).movedim(-1, 0),
    "copy": lambda x: x.clone(),
}
OF_AN_AXIS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, axis: x.sum(axis, keepdim=True) / 2,
    "mean": lambda x, axis: x.mean(axis, keepdim=True),
    "mean, axis gone": lambda x, axis: x.mean(axis) if x.ndim > 2 else x.mean(axis, keepdim=True),
    "amax": lambda x, axis: x.amax(axis, keepdim=True),
    "amin": lambda x, axis: x.amin(axis, keepdim=True),
    "norm": lambda x, axis: torch.linalg.vector_norm(x + 0.1, dim=axis, keepdim=True),
    "softmax": lambda x, axis: torch.softmax(x, axis),
    "flip": lambda x, axis: x.flip(axis),
    "every other": lambda x, axis: x.index_select(axis, torch.arange(0, x.size(axis), 2)),
    "narrow": lambda x, axis: x.narrow(axis, x.size(axis) // 2, 1),
    "to the front": lambda x, axis: x.movedim(axis, 1),
    "two halves swapped": lambda x, axis: torch.cat(x.chunk(2, axis)[::-1], axis),
    "doubled": lambda x, axis: torch.cat([x, x], axis),
    "picked twice": lambda x, axis: x.index_select(axis, torch.tensor([0, x.size(axis) - 1, 0])),
    "new axis": lambda x, axis: x.unsqueeze(axis),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda a, b: torch.tanh(a) * b,
    "div": lambda a, b: a / (1.0 + b * b),
    # Moved apart: values that are equal but for rounding, as the mean of equal rows is, would jump either way.
    "maximum": lambda a, b: torch.maximum(a, b - 0.07),
    "where": lambda a, b: torch.where(a > b + 0.07, a, b * 0.5),
}


class Network(nn.Module):
    """The drawn steps, and a dense layer over what they made."""

    def __init__(self, steps: Sequence[Step], weights: Values, kept: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])
        self.steps = list(steps)
        self.kept = kept
        self.head = nn.Linear(kept, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(step(values, list(self.weights)))
        return self.head(torch.cat([value.flatten(1).mean(1, keepdim=True) for value in values[-self.kept :]], 1))


@st.composite
def networks(draw: st.DrawFn, most_steps: int = 8) -> tuple[nn.Module, Tensor]:
    """A network and a sample of two inputs."""
    shape = draw(st.sampled_from([(4,), (3, 4), (2, 4, 4)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    sample = torch.randn(2, *shape)
    values, weights, steps = [sample], [torch.randn(4, shape[-1]) / 2], []
    for _ in range(draw(st.integers(1, most_steps))):
        step = draw(st.sampled_from(KINDS))(draw, values, weights)
        made = None if step is None else step(values, weights)
        if made is not None and made[0].numel() <= MOST_ELEMENTS and step is not None:
            steps.append(step)
            values.append(made)
    return Network(steps, weights, min(len(values), 3)), sample


def _pick(draw: st.DrawFn, values: Values, rank: int = 0) -> int | None:
    fitting = [i for i, value in enumerate(values) if value.ndim == rank or not rank]
    return draw(st.sampled_from(fitting)) if fitting else None


def _weight(draw: st.DrawFn, weights: list[Tensor], shape: tuple[int, ...]) -> int:
    """A weight of this shape: one that is there, or a new one."""
    fitting = [i for i, weight in enumerate(weights) if tuple(weight.shape) == shape]
    if fitting and draw(st.booleans()):
        return draw(st.sampled_from(fitting))
    weights.append(torch.randn(shape) / math.sqrt(math.prod(shape[1:]) or 1))
    return len(weights) - 1


def _unary(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step:
    i, function = _pick(draw, values), UNARY[draw(st.sampled_from(sorted(UNARY)))]
    return lambda v, w: function(v[i])


def _of_an_axis(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step:
    i, function = _pick(draw, values), OF_AN_AXIS[draw(st.sampled_from(sorted(OF_AN_AXIS)))]
    axis = draw(st.integers(1, values[i].ndim - 1))
    return lambda v, w: function(v[i], axis)


def _binary(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step | None:
    """Two tensors, or a tensor and a weight, that broadcast; a bias where nothing else does."""
    i, function = _pick(draw, values), BINARY[draw(st.sampled_from(sorted(BINARY)))]
    others = [j for j, value in enumerate(values) if _broadcasts(values[i], value)]
    j = draw(st.sampled_from(others))
    if draw(st.booleans()):
        return lambda v, w: function(v[i], v[j])
    k = _weight(draw, weights, tuple(values[i].shape[draw(st.integers(1, values[i].ndim - 1)) :]))
    return lambda v, w: function(w[k], v[i])


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    """Batches must meet: the shorter of two shapes is not aligned with the other's batch."""
    return a.ndim == b.ndim and all(m == n or 1 in (m, n) for m, n in zip(a.shape, b.shape, strict=True))


def _dense(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step:
    """By a weight or, of one that fits, by its transpose."""
    i = _pick(draw, values)
    width = values[i].shape[-1]
    turned = [k for k, weight in enumerate(weights) if weight.ndim == 2 and len(weight) == width]
    if turned and draw(st.booleans()):
        k = draw(st.sampled_from(turned))
        return lambda v, w: v[i] @ w[k]
    k = _weight(draw, weights, (draw(st.sampled_from([4, 3])), width))
    b = _weight(draw, weights, (len(weights[k]),)) if draw(st.booleans()) else None
    return lambda v, w: F.linear(v[i], w[k], None if b is None else w[b])


def _lookup(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step:
    """An embedding, perhaps of a weight that is used elsewhere, by a number that comes from the data."""
    i = _pick(draw, values)
    k = draw(st.sampled_from([k for k, weight in enumerate(weights) if weight.ndim == 2]))
    padding = draw(st.sampled_from([None, None, 0]))
    if any(getattr(weight, "padded", padding) != padding for weight in weights[k : k + 1]):
        padding = weights[k].padded
    weights[k].padded = padding
    highest = min(1, len(weights[k]) - 1)  # a weight of one row has the number 0 only
    return lambda v, w: F.embedding((v[i].flatten(1)[:, :3] > 0).long() * highest, w[k], padding)


def _normalise(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step:
    i = _pick(draw, values)
    width = values[i].shape[-1]
    k, b = _weight(draw, weights, (width,)), _weight(draw, weights, (width,))
    return lambda v, w: F.layer_norm(v[i], (width,), w[k], w[b], eps=0.1)


def _convolve(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step | None:
    rank = draw(st.sampled_from([3, 4]))
    i = _pick(draw, values, rank)
    if i is None:
        return None
    function = F.conv1d if rank == 3 else F.conv2d
    k = _weight(draw, weights, (2, values[i].shape[1], *[3] * (rank - 2)))
    stride = draw(st.integers(1, 2))
    return lambda v, w: function(v[i], w[k], stride=stride, padding=1)


def _product(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step | None:
    """Each sample's matrix by its own transpose, as attention has it."""
    i = _pick(draw, values, 3)
    return None if i is None else lambda v, w: torch.softmax(v[i] @ v[i].transpose(1, 2) / 2, -1) @ v[i]


def _reshape(draw: st.DrawFn, values: Values, weights: list[Tensor]) -> Step:
    i = _pick(draw, values)
    if values[i].ndim > 2 or values[i].shape[1] % 2:
        return lambda v, w: v[i].flatten(1)
    return lambda v, w: v[i].reshape(v[i].size(0), 2, -1)


KINDS = [_unary, _of_an_axis, _binary, _dense, _lookup, _normalise, _convolve, _product, _reshape]
