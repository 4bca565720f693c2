"""Measuring in a fresh process: what it reports, and what it says when it cannot."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from edge_runtime.measure import Case, Measurement, measure, random_inputs, random_labels_of
from edge_runtime.memory import current_memory
from federation.errors import EmbraceError
from federation.manifest import Loss, TensorSpec
from tests.edge_runtime.conftest import ENGINES


def check_memory(found: Measurement) -> None:
    if current_memory() is not None:
        assert set(found.idle) == {"resident", "anonymous", "file_backed"} and min(found.idle.values()) > 0
        assert set(found.memory) == {"anonymous", "file_backed", "total"}
        assert 0 < found.memory["anonymous"] < 200_000_000


@pytest.mark.parametrize("engine", ENGINES)
def test_a_boundary_is_measured(digits, engine):
    found = measure(Case(str(digits.directory), "weak", engine, batch=16, warm_up=1, iterations=4))
    assert len(found.training) == len(found.optimiser) == 4
    assert min(*found.training, *found.optimiser, found.load) > 0
    assert found.forward_compute == [] and found.activation_io == []
    assert 0 < found.forward_share < 1
    check_memory(found)


def test_a_whole_round_has_its_frozen_layers_and_activations_too(digits, monkeypatch):
    monkeypatch.chdir(digits.directory.parent)
    case = Case("digits", "moderate", batch=8, warm_up=2, iterations=3, whole_round=True, divide=False)
    found = measure(replace(case, stored_as="float16", profile="low_memory"))
    for seconds in (found.forward_compute, found.activation_io, found.training, found.optimiser):
        assert len(seconds) == 3 and min(seconds) > 0
    assert found.forward_share is None
    check_memory(found)
    assert os.listdir(digits.directory.parent) == ["digits"], "nothing is left beside the bundle"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundary": "conv9"}, "no boundary or tier named 'conv9'; this bundle has: strong, moderate, weak"),
        ({"bundle": "absent"}, "absent is not a bundle"),
        ({"threads": 0}, "threads: expected a number from 1 to 256, got 0"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(digits, change, message):
    with pytest.raises(EmbraceError, match=r"a trial step from '.*' failed: ") as caught:
        measure(replace(Case(str(digits.directory), "weak"), **change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_random_data_fits_the_model(digits):
    words = random_inputs(TensorSpec("int64", (9,)), 50, 7)
    assert words.dtype == "int64" and words.shape == (50, 9) and set(words.flat) == set(range(7))
    assert random_inputs(TensorSpec("float32", (2, 3)), 4, None).shape == (4, 2, 3)
    labels = random_labels_of(digits.manifest, 500)
    assert labels.dtype == "int64" and set(labels) == set(range(10))
    yes = replace(digits.manifest, loss=Loss("bce_with_logits"), labels=TensorSpec("float32", (1,)))
    assert set(random_labels_of(yes, 50).flat) == {0.0, 1.0}
