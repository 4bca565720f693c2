"""Which version is best, and when a job ends early: tables, and a loop that is written down again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.best_version import Best, StopRule, best_version, deciding_metric, find_best, reason_to_stop
from federation.errors import FieldError


@pytest.mark.parametrize(
    ("metric", "scores", "expected"),
    [
        ("accuracy", [(1, 0.1), (2, 0.9), (3, 0.9), (4, 0.2)], 2),
        ("mean_loss", [(1, 0.1), (2, 0.9), (3, 0.05), (4, 0.05)], 3),
        ("mean_loss", [(7, 3.0)], 7),
        ("accuracy", [(4, 0.5), (2, 0.5)], 2),
    ],
)
def test_the_best_is_the_first_of_the_best(metric: str, scores: list[tuple[int, float]], expected: int) -> None:
    assert best_version(metric, scores) == Best(expected, metric, dict(scores)[expected])


def test_accuracy_decides_where_there_is_one_unless_a_job_says_otherwise() -> None:
    both = {"mean_loss": [(1, 0.2), (2, 0.3)], "accuracy": [(1, 0.5), (2, 0.6)]}
    assert find_best(None, both) == Best(2, "accuracy", 0.6)
    assert find_best("mean_loss", both) == Best(1, "mean_loss", 0.2)
    assert find_best(None, {"mean_loss": [(1, 0.2)]}) == Best(1, "mean_loss", 0.2)
    assert find_best("accuracy", {"mean_loss": [(1, 0.2)]}) is None is find_best(None, {})
    assert deciding_metric(None, ["something else"]) is None and best_version("accuracy", []) is None


@pytest.mark.parametrize(
    ("rule", "metric", "values", "said"),
    [
        (StopRule(), "accuracy", [0.5] * 99, None),
        (StopRule(target=0.9), "accuracy", [0.5, 0.89], None),
        (StopRule(target=0.9), "accuracy", [0.5, 0.9], "accuracy 0.9 of version 2 reached the target 0.9"),
        (StopRule(target=0.9), "accuracy", [0.95, 0.5], "accuracy 0.95 of version 1 reached the target 0.9"),
        (StopRule(target=0.3), "mean_loss", [0.31], None),
        (StopRule(target=0.3), "mean_loss", [0.29], "mean_loss 0.29 of version 1 reached the target 0.3"),
        (StopRule(stop_after=2), "accuracy", [0.5, 0.4], None),
        (
            StopRule(stop_after=2),
            "accuracy",
            [0.5, 0.4, 0.5],
            "not been better than 0.5 of version 1 for 2 evaluations",
        ),
        (StopRule(stop_after=2), "accuracy", [0.5, 0.4, 0.6, 0.1], None),
        (StopRule(stop_after=1), "mean_loss", [0.5, 0.4, 0.5], "than 0.4 of version 2 for 1 evaluation"),
        (StopRule(stop_after=2, min_delta=0.1), "accuracy", [0.5, 0.55, 0.59], "by more than 0.1 for 2 evaluations"),
        (StopRule(stop_after=2, min_delta=0.1), "accuracy", [0.5, 0.55, 0.61], None),
    ],
)
def test_when_a_job_ends(rule: StopRule, metric: str, values: list[float], said: str | None) -> None:
    found = reason_to_stop(rule, metric, list(enumerate(values, 1)))
    assert found is None if said is None else found is not None and found.endswith(said), found
    assert reason_to_stop(rule, metric, []) is None


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5), st.integers(0, 3))
def test_patience_as_it_is_usually_written(values: list[int], patience: int, delta: int) -> None:
    """The loop of a training script: it stops at the first place where the wait is over, and never before."""
    best, wait, stops = None, 0, None
    for place, value in enumerate(values):
        if best is None or value > best + delta:
            best, wait = value, 0
        else:
            wait += 1
        if wait >= patience and stops is None:
            stops = place
    rule = StopRule(stop_after=patience, min_delta=float(delta))
    scores = [(version, float(value)) for version, value in enumerate(values)]
    found = [reason_to_stop(rule, "accuracy", scores[: place + 1]) for place in range(len(values))]
    assert next((place for place, why in enumerate(found) if why), None) == stops


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"stop_after": 0}, "stop_after"),
        ({"min_delta": -1.0}, "min_delta"),
        ({"min_delta": float("nan")}, "min_delta"),
        ({"target": float("inf")}, "target"),
    ],
)
def test_rules_that_cannot_be(values: dict[str, float], path: str) -> None:
    with pytest.raises(FieldError, match=path):
        StopRule(**values)  # type: ignore[arg-type]
