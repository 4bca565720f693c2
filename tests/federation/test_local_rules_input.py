"""Local rules: where weights and statistics lie, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from federation.axes.local import (
    LocalStep,
    Momentum,
    Proximal,
    ServerMomentum,
    Start,
    WeightDecay,
    runs,
)
from federation.errors import InputError
from federation.messages import Task, decode_task, encode_task
from federation.space import Parameter, ParameterSpace, Vector
from tests.federation.local_steps import GRADIENTS, N, draw, work

# -- where weights and statistics lie ----------------------------------------------------------------------------------

SPACE = ParameterSpace(
    [
        [Parameter("a", "weight", (2, 3)), Parameter("b", "weight", (3,)), Parameter("a.mean", "statistic", (2,))],
        [],
        [Parameter("c", "weight", (4,)), Parameter("empty", "weight", (0, 5))],
        [Parameter("d", "weight", ()), Parameter("d.mean", "statistic", (2,)), Parameter("d.var", "statistic", (2,))],
    ]
)


@pytest.mark.parametrize(
    ("first", "weights", "statistics"),
    [
        (0, [slice(0, 9), slice(11, 16)], [slice(9, 11), slice(16, 20)]),
        (1, [slice(0, 5)], [slice(5, 9)]),
        (2, [slice(0, 5)], [slice(5, 9)]),
        (3, [slice(0, 1)], [slice(1, 5)]),
    ],
)
def test_runs(first: int, weights: list[slice], statistics: list[slice]) -> None:
    assert runs(SPACE, first) == (weights, statistics)


@pytest.mark.parametrize("first", [-1, 4])
def test_runs_of_a_layer_that_does_not_exist(first: int) -> None:
    with pytest.raises(InputError, match=f"first_layer: expected 0 to 3, got {first}"):
        runs(SPACE, first)


def test_runs_agree_with_the_names() -> None:
    weights, _ = runs(SPACE, 0)
    vector = np.zeros(SPACE.size, np.float32)
    for run in weights:
        vector[run] = 1
    for parameter in SPACE:
        assert (vector[SPACE.slice_of(parameter.name)] == (parameter.kind == "weight")).all()


# -- bad input ---------------------------------------------------------------------------------------------------------


def read_only() -> Vector:
    return np.frombuffer(bytes(4 * N), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": draw(2, 2)}, r"x: expected a flat, writable float32 vector, got float32 \(2, 2\)"),
        ({"x": np.zeros(3)}, r"x: expected a flat, writable float32 vector, got float64 \(3,\)"),
        ({"x": read_only()}, r"x: expected a flat, writable float32 vector, got read-only float32 \(37,\)"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"rate": -0.1}, r"rate: expected a number in \[0, 3.4e\+38\), got -0.1"),
        ({"rate": float("nan")}, r"rate: expected .* got nan"),
        ({"brought": {"momentum": draw(3)}}, r"momentum: expected float32 \(37,\) like x, got float32 \(3,\)"),
        ({"brought": {"control": np.zeros(N)}}, r"control: expected float32 \(37,\) like x, got float64 \(37,\)"),
        ({"received": draw(1, N)}, r"received: expected float32 \(37,\) like x, got float32 \(1, 37\)"),
    ],
)
def test_a_start_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Start(**{"x": draw(N), "steps": 1, "rate": 0.1, **change})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: WeightDecay(-1), r"^factor: expected a number in \[0, 3.4e\+38\), got -1"),
        (lambda: Proximal(float("inf")), "^mu: expected .* got inf"),
        (lambda: Momentum(1.0), r"^factor: expected a number in \[0, 1\), got 1.0"),
        (lambda: Momentum(float("nan")), "^factor: .* got nan"),
        (lambda: ServerMomentum(-0.5, "before"), "^beta: .* got -0.5"),
        (
            lambda: ServerMomentum(0.5, "later"),
            "^when: expected 'before' or 'every_step', got 'later'",
        ),
    ],
)
def test_constants_that_make_no_sense(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


@pytest.mark.parametrize(
    ("weights", "statistics"),
    [
        ([slice(0, 10), slice(9, 20)], []),
        ([slice(0, 10)], [slice(5, 6)]),
        ([slice(0, N + 1)], []),
        ([slice(-3, 5)], []),
        ([slice(5, 3)], []),
        ([slice(0, 10, 2)], []),
    ],
)
def test_runs_must_be_disjoint_and_inside(weights: list[slice], statistics: list[slice]) -> None:
    with pytest.raises(InputError, match="runs: expected disjoint runs of a vector of 37 elements, got slice"):
        LocalStep([], Start(draw(N), 1, 0.1), weights, statistics)


@pytest.mark.parametrize("gradients", [draw(N - 1), np.zeros(N), draw(1, N)])
def test_gradients_must_fit(gradients: Vector) -> None:
    with pytest.raises(InputError, match=r"gradients: expected float32 \(37,\), got"):
        work([], GRADIENTS[:1]).step(gradients, 0.1)


def test_rates_and_blocks_must_make_sense() -> None:
    with pytest.raises(InputError, match="rate: expected"):
        work([], GRADIENTS[:1]).step(draw(N), float("inf"))
    with pytest.raises(InputError, match="block: expected at least 1 element, got 0"):
        work([], block=0)


def test_the_servers_momentum_stands_last() -> None:
    wrong = [ServerMomentum(0.9, "every_step"), Momentum(0.9)]
    message = "rules: expected ServerMomentum to stand last, got ServerMomentum, Momentum"
    with pytest.raises(InputError, match=message):
        work(wrong)
    told = encode_task(Task("stem", 1, 8, 0.1, tuple(reversed(wrong))))
    with pytest.raises(InputError, match=f"task.{message}"):
        decode_task({**told, "rules": told["rules"][::-1]})


def test_no_rule_twice() -> None:
    with pytest.raises(InputError, match="rules: expected every rule at most once, got Momentum 2 times"):
        work([Momentum(0.9), WeightDecay(0.1), Momentum(0.5)])
