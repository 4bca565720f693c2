"""Capacity and predicted memory, by hand on two layers."""

from __future__ import annotations

from dataclasses import replace

from federation.capacity import PredictedMemory, capacity, forward_macs, predicted_memory, training_macs
from tests.tiny_bundle import boundary, layer, manifest, statistic, weight

LAYERS = (
    layer("a", weight("a", 30), statistic("m", 4), activations=50, macs=700),
    layer("b", weight("b", 10), activations=20, macs=100),
)
BOUNDARIES = (boundary("a", 0, 70), boundary("b", 1, 20))
MODEL = manifest(LAYERS, BOUNDARIES)


def test_capacity_is_relative_to_training_everything() -> None:
    assert capacity(MODEL, BOUNDARIES[0]) == 1
    assert capacity(MODEL, BOUNDARIES[1]) == (10 + 2 * 20) / (40 + 2 * 70)
    assert capacity(MODEL, BOUNDARIES[1], batch=10) == (10 + 10 * 20) / (40 + 10 * 70)


def test_memory() -> None:
    assert predicted_memory(MODEL, BOUNDARIES[0]) == PredictedMemory(4 * 44, 4 * 44, 4 * 40, 2 * 4 * 2 * 70)
    assert predicted_memory(MODEL, BOUNDARIES[1], 10) == PredictedMemory(40, 40, 40, 2 * 4 * 10 * 20)
    assert predicted_memory(MODEL, BOUNDARIES[1], 10).total == 120 + 1600


def test_macs() -> None:
    assert [forward_macs(MODEL, b) for b in BOUNDARIES] == [0, 700]
    assert [training_macs(MODEL, b) for b in BOUNDARIES] == [3 * 800 - 700, 3 * 100 - 100]


def test_a_narrow_boundary_counts_its_own_elements() -> None:
    wide = (
        layer("a", weight("a", 6, 5), statistic("m", 6), activations=50, macs=900),
        layer("b", weight("b", 2, 6), weight("c", 2), activations=20, macs=120),
    )
    narrow = boundary("a@0.5", 0, 33, width=0.5, narrow=(((3, 5), (3,)), ((2, 3), (2,))))
    model = replace(MODEL, layers=wide, boundaries=(*BOUNDARIES, narrow))
    assert (model.weights_of(narrow), model.statistics_of(narrow)) == (15 + 6 + 2, 3)
    assert capacity(model, narrow, 10) == (23 + 10 * 33) / (30 + 12 + 2 + 10 * 70)
    assert predicted_memory(model, narrow, 10) == PredictedMemory(4 * 26, 4 * 26, 4 * 23, 2 * 4 * 10 * 33)
    assert (forward_macs(model, narrow), training_macs(model, narrow)) == (0, 3 * (450 + 60) - 450)
