"""Capacity and predicted memory, by hand on two layers."""

from __future__ import annotations

from federation.capacity import Memory, capacity, forward_macs, predicted_memory, training_macs
from federation.manifest import Boundary, FileRef, Layer, Loss, Manifest, Source, TensorSpec
from federation.space import Parameter

SPEC = TensorSpec("float32", (1,))
FILE = FileRef("f", "0" * 64, 1)
LAYERS = (
    Layer("a", SPEC, SPEC, (Parameter("a", "weight", (30,)), Parameter("m", "statistic", (4,))), 50, 700, 0, FILE),
    Layer("b", SPEC, SPEC, (Parameter("b", "weight", (10,)),), 20, 100, 0, FILE),
)
BOUNDARIES = (Boundary("a", 0, None, 70, FILE, ()), Boundary("b", 1, None, 20, FILE, ()))
LOSS = Loss("mse")
MODEL = Manifest(
    1, "x", Source("zoo", "x"), 18, LOSS, SPEC, SPEC, SPEC, None, 2, False, LAYERS, BOUNDARIES, {}, FILE
)  # fmt: skip


def test_capacity_is_relative_to_training_everything() -> None:
    assert capacity(MODEL, BOUNDARIES[0]) == 1
    assert capacity(MODEL, BOUNDARIES[1]) == (10 + 2 * 20) / (40 + 2 * 70)
    assert capacity(MODEL, BOUNDARIES[1], batch=10) == (10 + 10 * 20) / (40 + 10 * 70)


def test_memory() -> None:
    assert predicted_memory(MODEL, BOUNDARIES[0]) == Memory(4 * 44, 4 * 44, 4 * 40, 2 * 4 * 2 * 70)
    assert predicted_memory(MODEL, BOUNDARIES[1], 10) == Memory(40, 40, 40, 2 * 4 * 10 * 20)
    assert predicted_memory(MODEL, BOUNDARIES[1], 10).total == 120 + 1600


def test_macs() -> None:
    assert [forward_macs(MODEL, b) for b in BOUNDARIES] == [0, 700]
    assert [training_macs(MODEL, b) for b in BOUNDARIES] == [3 * 800 - 700, 3 * 100 - 100]
