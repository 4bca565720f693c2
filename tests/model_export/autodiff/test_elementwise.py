"""Arithmetic on elements: values, slopes, and sums over what was broadcast."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch import Tensor

from model_export.graph import Shape
from tests.model_export.autodiff.drawing import (
    booleans,
    broadcast,
    distinct,
    examples,
    few,
    nonzero,
    off,
    positive,
    shapes,
)
from tests.model_export.autodiff.harness import Fill, Fixed, check_nodes, check_operator, normal, of, operator


@pytest.mark.parametrize(
    ("op_type", "reference", "fills"),
    [
        of("Add", torch.add, [normal, normal]),
        of("Sub", torch.sub, [normal, normal]),
        of("Mul", torch.mul, [normal, normal]),
        of("Div", torch.div, [normal, nonzero]),
        of("Pow", torch.pow, [positive, normal]),
        of("Max", torch.maximum, [normal, normal]),
        of("Min", torch.minimum, [normal, normal]),
    ],
)
@given(operands=broadcast(2))
@examples(40)
def test_two_operands_broadcast_and_their_gradients_sum_back(
    op_type: str, reference: Callable[..., Tensor], fills: list[Fill], operands: list[Shape]
) -> None:
    check_operator(op_type, reference, operands, fill=fills)


@pytest.mark.parametrize(
    ("op_type", "reference"),
    [
        of("Sum", lambda first, *rest: sum(rest, first)),
        of("Max", lambda *parts: torch.stack(torch.broadcast_tensors(*parts)).amax(0)),
        of("Min", lambda *parts: torch.stack(torch.broadcast_tensors(*parts)).amin(0)),
    ],
)
@given(operands=st.integers(1, 4).flatmap(broadcast))
@examples(30)
def test_any_number_of_operands(op_type: str, reference: Callable[..., Tensor], operands: list[Shape]) -> None:
    check_operator(op_type, reference, operands)


@pytest.mark.parametrize(("op_type", "reference"), [of("Max", torch.maximum), of("Min", torch.minimum)])
def test_equal_operands_share_the_gradient_as_in_pytorch(op_type: str, reference: Callable[..., Tensor]) -> None:
    check_operator(op_type, reference, [(None, 6), (None, 6)], fill=few(3))


@pytest.mark.parametrize(
    ("op_type", "reference", "fill"),
    [
        of("Neg", torch.neg, normal),
        of("Sqrt", torch.sqrt, positive),
        of("Reciprocal", torch.reciprocal, nonzero),
        of("Exp", torch.exp, normal),
        of("Log", torch.log, positive),
        of("Abs", torch.abs, nonzero),
        of("Erf", torch.erf, normal),
        of("Sin", torch.sin, normal),
        of("Cos", torch.cos, normal),
        of("Identity", torch.clone, normal),
    ],
)
@given(shape=shapes(0))
@examples(15)
def test_slope_of_a_function(op_type: str, reference: Callable[..., Tensor], fill: Fill, shape: Shape) -> None:
    check_operator(op_type, reference, [shape], fill=fill)


@operator("Abs")
def test_the_slope_of_abs_at_zero_is_zero() -> None:
    check_operator("Abs", torch.abs, [(None, 3)], fill=lambda rng, shape: np.zeros(shape, np.float32))


@operator("Pow")
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4])
def test_a_whole_constant_exponent_takes_negative_numbers_and_zero(exponent: int, dtype: type) -> None:
    def around_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(-2, 3, shape).astype(np.float32)

    check_operator("Pow", lambda x: x**exponent, [(None, 7), np.array(exponent, dtype)], fill=around_zero)


@operator("Pow")
@pytest.mark.parametrize("exponent", [0.5, -0.5, -1.0, 1.7])
def test_a_broken_constant_exponent(exponent: float) -> None:
    check_operator("Pow", lambda x: x**exponent, [(None, 3), np.array([exponent], np.float32)], fill=positive)


@operator("Pow")
def test_one_constant_exponent_per_column() -> None:
    exponents = np.array([2.0, -1.0, 0.5], np.float32)
    check_operator("Pow", lambda x: x ** torch.from_numpy(exponents), [(None, 3), exponents], fill=positive)


@operator("Pow")
def test_zero_to_a_trained_positive_power_has_no_slope_and_no_nan() -> None:
    check_operator("Pow", torch.pow, [(None, 3), (3,)], fill=[few(2), lambda r, s: np.full(s, 2.5, np.float32)])


@operator("Where")
@given(operands=broadcast(3))
@examples(40)
def test_where_splits_the_gradient_by_its_condition(operands: list[Shape]) -> None:
    condition, yes, no = operands
    check_operator("Where", torch.where, [Fixed(condition, booleans), yes, no])


@operator("Cast")
@pytest.mark.parametrize(
    ("middle", "dtype"),
    [(TensorProto.DOUBLE, torch.double), (TensorProto.FLOAT16, torch.half)],
    ids=["double", "half"],
)
def test_the_gradient_passes_a_change_of_type_and_back(middle: int, dtype: torch.dtype) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["other"], name="/there", to=middle),
        helper.make_node("Cast", ["other"], ["y"], name="/back", to=TensorProto.FLOAT),
    ]

    def whole(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return distinct(rng, shape).round(1).astype(np.float16).astype(np.float32)

    check_nodes(nodes, lambda x: x.to(dtype).double(), {"x": (None, 3)}, fill=whole)


@operator("Cast", "Mul")
def test_arithmetic_in_another_type_has_its_gradient_in_that_type() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], name="/there", to=TensorProto.DOUBLE),
        helper.make_node("Mul", ["wide", "wide"], ["square"], name="/Mul"),
        helper.make_node("Cast", ["square"], ["y"], name="/back", to=TensorProto.FLOAT),
    ]
    check_nodes(nodes, torch.square, {"x": (None, 3)})


@operator("Mod")
def test_the_rest_of_a_division() -> None:
    check_operator("Mod", torch.fmod, [(None, 3), (3,)], fill=[normal, nonzero], fmod=1)


@pytest.mark.parametrize(
    ("op_type", "function"),
    [of("Floor", torch.floor), of("Ceil", torch.ceil), of("Round", torch.round), of("Sign", torch.sign)],
)
def test_steps_have_no_slope(op_type: str, function: Callable[[Tensor], Tensor]) -> None:
    check_operator(op_type, function, [(None, 3)], fill=off(0.0))
