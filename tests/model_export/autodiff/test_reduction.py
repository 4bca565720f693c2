"""Reductions: which axes, kept or not, over the batch too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.model_export.autodiff.drawing import axes_of, distinct, examples, few, ints, nonzero, shapes
from tests.model_export.autodiff.harness import Fill, check_operator, normal, of, operator

REDUCTIONS = [
    of("ReduceSum", torch.sum, normal),
    of("ReduceMean", torch.mean, normal),
    of("ReduceMax", torch.amax, distinct),
    of("ReduceMin", torch.amin, distinct),
    of("ReduceSumSquare", lambda x, axes, keepdim: (x * x).sum(axes, keepdim), normal),
    of("ReduceL2", torch.linalg.vector_norm, nonzero),
    of("ReduceL1", lambda x, axes, keepdim: x.abs().sum(axes, keepdim), nonzero),
    of("ReduceLogSumExp", torch.logsumexp, normal),
    of("ReduceProd", lambda x, axes, keepdim: product(x, axes, keepdim), few(3)),
]


def product(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    """One axis after the other; zeros among the factors are part of the test."""
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim)
    return x


def norm(function: Callable[..., Tensor], axes: list[int], keep: bool) -> Callable[[Tensor], Tensor]:
    if function is torch.linalg.vector_norm:
        return lambda x: function(x, 2, axes, keep)
    return lambda x: function(x, axes, keep)


@pytest.mark.parametrize(("op_type", "function", "fill"), REDUCTIONS)
@given(data=st.data())
@examples(40)
def test_the_gradient_spreads_over_the_reduced_axes(
    op_type: str, function: Callable[..., Tensor], fill: Fill, data: st.DataObject
) -> None:
    shape = data.draw(shapes(1))
    axes, keep = data.draw(axes_of(len(shape))), data.draw(st.booleans())
    check_operator(op_type, norm(function, axes, keep), [shape, ints(axes)], fill=fill, keepdims=int(keep))


@pytest.mark.parametrize(("op_type", "function", "fill"), REDUCTIONS)
@pytest.mark.parametrize("given_axes", [None, []], ids=["absent", "empty"])
@pytest.mark.parametrize("keep", [False, True])
def test_no_axes_means_all_axes(
    op_type: str, function: Callable[..., Tensor], fill: Fill, given_axes: list[int] | None, keep: bool
) -> None:
    inputs = [(None, 2, 3)] if given_axes is None else [(None, 2, 3), ints([])]
    check_operator(op_type, norm(function, [0, 1, 2], keep), inputs, fill=fill, keepdims=int(keep))


@pytest.mark.parametrize("op_type", [of("ReduceSum"), of("ReduceMean"), of("ReduceMax"), of("ReduceMin")])
def test_no_axes_may_also_mean_no_reduction(op_type: str) -> None:
    check_operator(op_type, torch.clone, [(None, 2, 3), ints([])], fill=distinct, noop_with_empty_axes=1)


@pytest.mark.parametrize(("op_type", "function"), [of("ReduceMax", torch.amax), of("ReduceMin", torch.amin)])
@pytest.mark.parametrize("keep", [False, True])
def test_equal_extrema_share_the_gradient_as_in_pytorch(
    op_type: str, function: Callable[..., Tensor], keep: bool
) -> None:
    axes = np.array([1, 2], np.int64)
    check_operator(op_type, norm(function, [1, 2], keep), [(None, 3, 4), axes], fill=few(2), keepdims=int(keep))


@operator("ReduceL2")
def test_the_slope_of_a_norm_that_is_zero_is_zero_and_not_nan() -> None:
    def with_empty_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = normal(rng, shape)
        values[::2] = 0.0
        return values

    reference = norm(torch.linalg.vector_norm, [1], True)
    check_operator("ReduceL2", reference, [(None, 3), ints([1])], fill=with_empty_rows)
