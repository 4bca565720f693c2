"""A task that makes no sense is refused, with the name of the field."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from federation.axes.local import Momentum, ServerMomentum, WeightDecay
from federation.errors import InputError
from federation.messages import MOST_SAMPLES_PER_STEP, MOST_STEPS, Task

GOOD = {"boundary": "weak", "steps": 10, "batch": 32, "rate": 0.1}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"steps": 1, "batch": 1, "round": 0, "refresh_every": 1},
        {"steps": MOST_STEPS, "batch": MOST_SAMPLES_PER_STEP, "round": MOST_STEPS, "refresh_every": MOST_STEPS},
        {"rate": 0.0, "seed": -5, "activations": "float16", "crop": 4, "flip": True},
        {"rules": (WeightDecay(1e-4), Momentum(0.9), ServerMomentum(0.9, "before"))},
    ],
)
def test_a_task_that_makes_sense(change):
    task = Task(**{**GOOD, **change})
    assert all(getattr(task, name) == value for name, value in {**GOOD, **change}.items())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "expected a number from 1 to 10000000, got 0"),
        ("steps", MOST_STEPS + 1, "expected a number from 1 to 10000000, got 10000001"),
        ("batch", 0, "expected a number from 1 to 65536, got 0"),
        ("batch", MOST_SAMPLES_PER_STEP + 1, "expected a number from 1 to 65536, got 65537"),
        ("round", -1, "expected a number from 0 to 10000000, got -1"),
        ("refresh_every", 0, "expected a number from 1 to 10000000, got 0"),
        ("crop", -1, "expected a number from 0 to 65536, got -1"),
        ("activations", "int8", "expected 'float32' or 'float16', got 'int8'"),
        ("rate", -0.1, "expected a number in [0, 3.4e+38), got -0.1"),
        ("rate", float("nan"), "expected a number in [0, 3.4e+38), got nan"),
        ("rate", float("inf"), "expected a number in [0, 3.4e+38), got inf"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field, value, message):
    with pytest.raises(InputError) as caught:
        Task(**{**GOOD, field: value})
    text = str(caught.value)
    assert text.startswith(f"{field}: ") and text.endswith(message)


def test_rules_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="rules: expected every rule at most once, got Momentum 2 times"):
        Task(**GOOD, rules=(Momentum(0.9), Momentum(0.8)))
    with pytest.raises(InputError, match="rules: expected ServerMomentum to stand last"):
        Task(**GOOD, rules=(ServerMomentum(0.9, "before"), Momentum(0.9)))


def test_a_task_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Task(**GOOD).steps = 5
