"""Capacity and predicted memory, by hand on two layers."""

from __future__ import annotations

from dataclasses import replace

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
MODEL = Manifest(1, "x", Source("zoo", "x"), 18, LOSS, SPEC, SPEC, SPEC, None, 2, False, LAYERS, BOUNDARIES, {}, FILE)


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


def test_a_narrow_boundary_counts_its_own_elements() -> None:
    wide = (
        Layer("a", SPEC, SPEC, (Parameter("a", "weight", (6, 5)), Parameter("m", "statistic", (6,))), 50, 900, 0, FILE),
        Layer("b", SPEC, SPEC, (Parameter("b", "weight", (2, 6)), Parameter("c", "weight", (2,))), 20, 120, 0, FILE),
    )
    narrow = Boundary("a@0.5", 0, None, 33, FILE, (), 0.5, (((3, 5), (3,)), ((2, 3), (2,))))
    model = replace(MODEL, layers=wide, boundaries=(*BOUNDARIES, narrow))
    assert (model.weights_of(narrow), model.statistics_of(narrow)) == (15 + 6 + 2, 3)
    assert capacity(model, narrow, 10) == (23 + 10 * 33) / (30 + 12 + 2 + 10 * 70)
    assert predicted_memory(model, narrow, 10) == Memory(4 * 26, 4 * 26, 4 * 23, 2 * 4 * 10 * 33)
    assert (forward_macs(model, narrow), training_macs(model, narrow)) == (0, 3 * (450 + 60) - 450)
