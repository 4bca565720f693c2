"""Dropout: the mask is a function of the seed, the same in every runtime, and as good as random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from torch import nn

from federation.manifest import Loss
from model_export.autodiff.engine import Context, write_backward, write_forward
from model_export.autodiff.rules.dropout import SEED_INPUT, reference_mask
from model_export.graph import Emitter, Shape, make_model, tensor_info
from tests.model_export.autodiff.drawing import examples, shapes
from tests.model_export.autodiff.harness import OPSET, Arrays, journal, normal, operator, run
from tests.model_export.autodiff.module_harness import check_module, export, seed_input

seeds = st.sampled_from([0, 1, 7, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, -1, -(2**40)]) | st.integers(0, 2**31)
rates = st.sampled_from([0.1, 0.25, 0.5, 0.9]).map(lambda rate: float(np.float32(rate)))  # as a file holds them


def dropout(shape: Shape, x: np.ndarray, dy: np.ndarray, seed: int, number: int, rate: float | None) -> Arrays:
    """Output and gradient of a Dropout node, number `number` of its model."""
    inputs = ["x"] if rate is None else ["x", "rate"]
    nodes = [helper.make_node("Dropout", inputs, ["y"], name="/Dropout")]
    constants = {} if rate is None else {"rate": np.array(rate, np.float32)}
    emitter = Emitter()
    context = Context(emitter, {"x": shape, "y": shape}, constants, {"x", "y"}, dropout_numbers={"y": number})
    write_forward(context, nodes)
    with journal():
        gradients = write_backward(context, nodes, {"y": "dy"}, ["x"])
    emitter.ops("Identity", ["dx"], gradients["x"])
    values = [tensor_info(name, np.float32, shape) for name in ("x", "dy")]
    results = [tensor_info(name, np.float32, shape) for name in ("y", "dx")]
    seed_info = tensor_info(SEED_INPUT, np.int64, ())
    model = make_model("dropout", emitter.nodes, [*values, seed_info], results, emitter.constants, OPSET)
    return run(model, {"x": x, "dy": dy, SEED_INPUT: np.array(seed, np.int64)})


@operator("Dropout")
@given(shape=shapes(0), seed=seeds, number=st.integers(0, 5), rate=rates)
@examples(60)
def test_the_mask_is_the_reference_bit_for_bit_and_the_gradient_has_the_same(
    shape: Shape, seed: int, number: int, rate: float
) -> None:
    sizes = tuple(5 if dim is None else dim for dim in shape)
    rng = np.random.default_rng(0)
    x, dy = np.asarray(normal(rng, sizes)), np.asarray(normal(rng, sizes))
    found = dropout(shape, x, dy, seed, number, rate)
    mask = reference_mask(seed, number, sizes, rate)
    assert np.array_equal(found["y"], x * mask)
    assert np.array_equal(found["dx"], dy * mask)


@operator("Dropout")
def test_half_of_the_elements_are_dropped_if_nothing_else_is_said() -> None:
    ones = np.ones((4, 6), np.float32)
    assert np.array_equal(dropout((None, 6), ones, ones, 3, 0, None)["y"], reference_mask(3, 0, (4, 6), 0.5))


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_as_many_elements_are_kept_as_the_rate_says(rate: float) -> None:
    """Over all, per row and per column: within five standard deviations of a fair coin."""
    size = 512
    kept = reference_mask(11, 2, (size, size), rate) > 0
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * spread / size
    for axis in (0, 1):
        assert np.abs(kept.mean(axis) - (1 - rate)).max() < 5 * spread / size**0.5


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    mask = reference_mask(0, 0, (64, 64), 0.2)
    assert set(np.unique(mask)) == {np.float32(0.0), np.float32(1.25)}


def signs(seed: int, number: int, rows: int = 256, columns: int = 256) -> np.ndarray:
    """A mask of rate one half as numbers of mean zero and deviation one."""
    return np.where(reference_mask(seed, number, (rows, columns), 0.5) > 0, 1.0, -1.0)


def largest_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The largest correlation of a row of `a` with a row of `b`, in standard deviations of chance."""
    product = a @ b.T / a.shape[1] ** 0.5
    if np.array_equal(a, b):
        np.fill_diagonal(product, 0.0)
    return float(np.abs(product).max())


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_rows_and_columns_are_not_correlated(seed: int) -> None:
    """Of 32640 fair pairs the largest is about 4.2 standard deviations off; 6 has a chance of 1e-4."""
    mask = signs(seed, 0)
    assert largest_correlation(mask, mask) < 6.0
    assert largest_correlation(mask.T, mask.T) < 6.0


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_corners_of_a_rectangle_are_not_correlated(seed: int) -> None:
    """A mask made of one hash per row and one per column must not show it: products of corners cancel."""
    mask = signs(seed, 0)
    pairs = mask[0::2] * mask[1::2]
    corners = pairs[:, 0::2] * pairs[:, 1::2]
    assert abs(corners.sum()) < 5 * corners.size**0.5


OTHERS = [(8, 3), (6, 3), (7 + 256, 3), (7, 4), (7, 2), (-8, 3), (7 + 2**31, 3)]


@pytest.mark.parametrize(("seed", "number"), OTHERS)
def test_another_seed_or_another_dropout_has_an_unrelated_mask(seed: int, number: int) -> None:
    first, second = signs(7, 3), signs(seed, number)
    assert abs((first * second).sum()) < 5 * first.size**0.5


@pytest.mark.parametrize(("seed", "number"), OTHERS)
def test_another_mask_is_not_the_same_one_moved_by_some_rows_and_columns(seed: int, number: int) -> None:
    """A device counts its seeds up: steps must not see each other's masks."""
    first, second = signs(7, 3, 128, 128), signs(seed, number, 128, 128)
    assert largest_correlation(first, second) < 6.0
    spectrum = np.fft.fft2(first) * np.conj(np.fft.fft2(second))
    shifted = np.fft.ifft2(spectrum).real / 128  # correlation at every shift, in standard deviations
    assert np.abs(shifted).max() < 6.0


def network(rate: float = 0.4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 6),
        nn.Dropout(rate),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.Dropout(rate),
        nn.Linear(5, 4),
        nn.Dropout(rate),
    )


@operator("Dropout")
@pytest.mark.parametrize("boundary", [0, 1, 2])
@pytest.mark.parametrize("seed", [3, 4])
def test_the_mask_of_a_dropout_is_the_same_whatever_the_boundary(boundary: int, seed: int) -> None:
    """Dropouts are numbered through the whole model, those of frozen layers included, which do nothing."""
    exported = check_module(network(), torch.randn(2, 3), boundary=boundary, seed=seed)
    assert len(exported.layers) == 3
    assert seed_input(exported.train)


@operator("Dropout")
def test_dropout_of_images_and_of_sequences() -> None:
    torch.manual_seed(0)
    check_module(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.3), nn.Conv2d(3, 2, 1)), torch.randn(2, 2, 5, 5))
    check_module(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2)), torch.randn(2, 6, 3))


def test_without_dropout_there_is_no_seed() -> None:
    assert not seed_input(export(network(rate=0.0), torch.randn(2, 3), Loss("mse")).train)
    assert not seed_input(export(nn.Linear(3, 2), torch.randn(2, 3), Loss("mse")).train)
