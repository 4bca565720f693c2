"""Activation functions: slopes on both sides of every kink, and at kinks PyTorch's choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_export.graph import Shape
from tests.model_export.autodiff.drawing import examples, few, nonzero, off, shapes
from tests.model_export.autodiff.harness import Fill, check_operator, normal, of, operator


def wide(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Both saturated ends and what lies between."""
    return (normal(rng, shape) * 4.0).astype(np.float32)


@pytest.mark.parametrize(
    ("op_type", "reference", "fill"),
    [
        of("Relu", F.relu, nonzero),
        of("Sigmoid", torch.sigmoid, wide),
        of("Tanh", torch.tanh, wide),
        of("Softplus", F.softplus, wide),
        of("HardSwish", F.hardswish, off(-3.0, 3.0, fill=wide)),
    ],
)
@given(shape=shapes(0))
@examples(20)
def test_slope_of_an_activation(op_type: str, reference: Callable[..., Tensor], fill: Fill, shape: Shape) -> None:
    check_operator(op_type, reference, [shape], fill=fill)


@pytest.mark.parametrize("op_type", [of("LeakyRelu"), of("Elu")])
@given(shape=shapes(0), alpha=st.sampled_from([None, 0.0, 0.2, 1.0, 1.5]))
@examples(20)
def test_slope_below_zero_follows_alpha(op_type: str, shape: Shape, alpha: float | None) -> None:
    function, default = (F.leaky_relu, 0.01) if op_type == "LeakyRelu" else (F.elu, 1.0)
    attrs = {} if alpha is None else {"alpha": alpha}
    used = default if alpha is None else alpha
    check_operator(op_type, lambda x: function(x, used), [shape], fill=nonzero, **attrs)


@operator("PRelu")
@given(
    channels=st.integers(1, 4),
    image=st.lists(st.integers(1, 3), max_size=2),
    shared=st.booleans(),
)
@examples(20)
def test_prelu_sums_the_slope_of_every_channel(channels: int, image: list[int], shared: bool) -> None:
    slope = (1 if shared else channels, *[1] * len(image))
    reference = lambda x, a: torch.where(x > 0, x, x * a)  # noqa: E731
    check_operator("PRelu", reference, [(None, channels, *image), slope], fill=[nonzero, normal])


@operator("HardSigmoid")
@given(shape=shapes(0), alpha=st.sampled_from([None, 1 / 6, 0.5]), beta=st.sampled_from([None, 0.5, 0.3]))
@examples(20)
def test_hard_sigmoid_is_flat_outside_its_line(shape: Shape, alpha: float | None, beta: float | None) -> None:
    a, b = 0.2 if alpha is None else alpha, 0.5 if beta is None else beta
    attrs = {key: value for key, value in (("alpha", alpha), ("beta", beta)) if value is not None}
    fill = off(-b / a, (1 - b) / a, fill=wide)
    check_operator("HardSigmoid", lambda x: torch.clamp(a * x + b, 0, 1), [shape], fill=fill, **attrs)


@operator("HardSigmoid")
def test_hard_sigmoid_is_that_of_pytorch() -> None:
    check_operator("HardSigmoid", F.hardsigmoid, [(None, 50)], fill=off(-3.0, 3.0, fill=wide), alpha=1 / 6, beta=0.5)


@operator("Clip")
@given(
    shape=shapes(0),
    low=st.sampled_from([None, -1.0, 0.0]),
    high=st.sampled_from([None, 0.5, 6.0]),
)
@examples(20)
def test_clip_is_flat_outside_its_bounds(shape: Shape, low: float | None, high: float | None) -> None:
    bounds = [None if value is None else np.array(value, np.float32) for value in (low, high)]
    kinks = [value for value in (low, high) if value is not None]
    reference = torch.clone if low is None and high is None else lambda x: torch.clamp(x, low, high)
    while bounds and bounds[-1] is None:
        bounds.pop()
    check_operator("Clip", reference, [shape, *bounds], fill=off(*kinks, fill=wide))


@operator("Clip")
@pytest.mark.parametrize("low", [0.0, 1.0, -1.0])
def test_clip_between_two_constants_is_flat_at_both_as_relu6_of_pytorch(low: float) -> None:
    bounds = [np.array(value, np.float32) for value in (low, 2.0)]
    check_operator("Clip", lambda x: F.hardtanh(x, low, 2.0), [(None, 8), *bounds], fill=few(4))


@operator("Clip")
def test_clip_with_one_bound_lets_the_gradient_pass_at_it_as_clamp_of_pytorch() -> None:
    bound = np.array(1.0, np.float32)
    check_operator("Clip", lambda x: torch.clamp(x, min=1.0), [(None, 8), bound], fill=few(3))


@operator("Relu")
def test_the_slope_of_relu_at_zero_is_zero() -> None:
    check_operator("Relu", F.relu, [(None, 8)], fill=lambda rng, shape: few(3)(rng, shape) - np.float32(1.0))


@pytest.mark.parametrize(("op_type", "reference"), [of("Softmax", torch.softmax), of("LogSoftmax", torch.log_softmax)])
@given(data=st.data())
@examples(30)
def test_softmax_is_normalised_along_its_axis_only(
    op_type: str, reference: Callable[..., Tensor], data: st.DataObject
) -> None:
    shape = data.draw(shapes(1))
    axis = data.draw(st.sampled_from([None, *range(-len(shape), len(shape))]))
    attrs = {} if axis is None else {"axis": axis}
    check_operator(op_type, lambda x: reference(x, -1 if axis is None else axis), [shape], fill=wide, **attrs)
