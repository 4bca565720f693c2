"""Predicted memory against the oracle: the peak that the kernel counted while a fresh process trained."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest

from edge_runtime.memory import current_memory
from federation.capacity import predicted_memory, predicted_peak
from model_export.lifetimes import BATCHES, _Arena, sizes_of, step_memory
from model_export.zoo import ZOO
from tests.memory_models import OWN, export_named
from tests.memory_predictions import BATCH, SMALL, compare

pytest.importorskip("torch")
needs_proc = pytest.mark.skipif(current_memory() is None, reason="the system does not say what a process takes")
WITHIN = 0.25


def check(name: str, folder: Path) -> None:
    for found in compare(name, folder, Path(sys.executable)):
        off = abs(found.predicted - found.measured)
        assert off <= max(WITHIN * found.measured, SMALL), found


@needs_proc
@pytest.mark.parametrize("name", ["grouped", "digits"])
def test_the_prediction_is_near_what_a_step_takes(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in OWN if name != "grouped"), *(n for n in ZOO if n != "digits")])
def test_the_prediction_is_near_for_every_model(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_the_formula_of_the_papers_is_far_off_where_lifetimes_are_not(tmp_path: Path) -> None:
    """Why there are two: a grouped convolution's gradient spreads its images nine times."""
    manifest = export_named("grouped", tmp_path)
    boundary = manifest.boundary("4.conv2")
    assert predicted_peak(manifest, boundary, BATCH) > 4 * predicted_memory(manifest, boundary, BATCH).total


def chain(count: int, size: int) -> onnx.ModelProto:
    """x -> MatMul -> MatMul ... -> loss: each value is read by the next node only."""
    nodes = [onnx.helper.make_node("MatMul", [f"v{i}", "w"], [f"v{i + 1}"]) for i in range(count)]
    nodes += [onnx.helper.make_node("ReduceSum", [f"v{count}"], ["loss"], keepdims=0)]
    info = onnx.helper.make_tensor_value_info
    inputs = [info("v0", onnx.TensorProto.FLOAT, ["N", size]), info("w", onnx.TensorProto.FLOAT, [size, size])]
    graph = onnx.helper.make_graph(nodes, "train", inputs, [info("loss", onnx.TensorProto.FLOAT, [])])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])


def test_a_value_lives_until_it_was_read_last() -> None:
    """In a chain two values are alive at once, however long it is; in numbers of the batch."""
    short, long = (dict(step_memory(model, sizes_of(model))) for model in (chain(3, 1024), chain(40, 1024)))
    assert set(short) == set(BATCHES)
    slope = (long[256] - long[128]) / 128
    assert 2 * 4 * 1024 <= slope < 2.2 * 4 * 1024
    assert long[256] - short[256] < 37 * 5_000  # only structures of 37 more nodes


def test_the_arena_takes_the_smallest_block_that_is_large_enough_and_joins_what_is_free() -> None:
    arena = _Arena()
    first, second, third = (arena.take(size) for size in (1 << 20, 1 << 18, 1 << 20))
    assert arena.touched == (2 << 20) + (1 << 18)
    arena.give_back(first)
    arena.give_back(second)
    assert arena.take(5 << 18) == first, "the two are one block now"
    arena.give_back(third)
    assert arena.touched == (2 << 20) + (1 << 18), "what was touched stays"
    arena.take(64 << 20)
    assert arena.touched == (66 << 20) + (1 << 18), "and a block that fits nowhere gets a region of its own"
