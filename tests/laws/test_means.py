"""Algorithms that are a mean over devices: the real server and devices against the oracles, round by round."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.engine.ordered_dropout import draw_width
from edge_runtime.trainer import step_seed
from federation.axes.local import Momentum, Proximal
from federation.axes.weigh import effective_steps
from federation.coverage import coverage, width_of
from federation.layout import MODEL
from tests.laws.world import PROBLEM, START, TIERS, WIDTHS, Fleet, Round, assert_close
from tests.oracles import embracing, fedavg, fednova, fedopt, fedprox, fjord, heterofl, inclusivefl
from tests.oracles.fednova import coefficients
from tests.oracles.problem import narrow_shapes

STEPS, RATE, ROUNDS = 4, 0.2, 5
LOCAL = {"steps": STEPS, "rate": str(RATE), "batch": 4}
SAMPLES = {i: float(count) for i, count in enumerate(PROBLEM.samples)}
MIXED = {0: "strong", 1: "moderate", 2: "weak", 3: "weak"}
MOMENTUM = {**LOCAL, "rules": [{"rule": "momentum", "factor": 0.5}]}
WIDE = {"tiers": TIERS}
SHAPES = {width: narrow_shapes(width) for width in (1.0, *WIDTHS)}


def drawn(rounds: list[Round]) -> list[list[int]]:
    return [each.drawn for each in rounds]


def assert_models(fleet: Fleet, rounds: list[Round], expected: list, tolerance: float = 3e-6) -> None:
    assert len(rounds) == len(expected)
    for mine, theirs in zip(rounds, expected):
        assert_close(fleet.model(mine.vectors[MODEL]), theirs.model, tolerance)


@pytest.mark.parametrize("by", ["uniform", "samples"])
@pytest.mark.parametrize(
    "participate",
    [{}, {"count": 2}, {"count": 4, "replacement": True}, {"count": 5, "replacement": True, "window": 3}],
    ids=str,
)
def test_fedavg_with_two_rates(tmp_path, by, participate):
    job = {
        "algorithm": "fedavg",
        "num_rounds": ROUNDS,
        "local": LOCAL,
        "weigh": {"by": by},
        "serve": {"rate": 1.5},
        "participate": participate,
    }
    fleet = Fleet(job, tmp_path)
    rounds = fleet.rounds()
    weights = SAMPLES if by == "samples" else None
    assert_models(fleet, rounds, fedavg.run(START, PROBLEM.gradient, drawn(rounds), STEPS, RATE, 1.5, weights))
    if "replacement" in participate:
        assert any(seat.count > 1 for each in rounds for seat in each.seats)
    window = participate.get("window", 1)
    for number, each in enumerate(rounds):
        assert each.drawn == rounds[number - number % window].drawn, "as often in every round of a window"


@pytest.mark.parametrize("participate", [{}, {"count": 2, "balance": False}], ids=str)
def test_embracing(tmp_path, participate):
    fleet = Fleet(
        {"algorithm": "embracing", "num_rounds": 8, "local": MOMENTUM, "participate": participate}, tmp_path, MIXED
    )
    rounds = fleet.rounds()
    expected = embracing.run(START, PROBLEM.gradient, drawn(rounds), {0: 0, 1: 1, 2: 2, 3: 2}, STEPS, RATE, 0.5)
    assert_models(fleet, rounds, expected)
    assert any([] in each.trained_by for each in expected) == bool(participate), "a layer that nobody trained"


def test_inclusivefl(tmp_path):
    room = {1: 1700, 2: 1000, 3: 1000}  # bytes: for two layers, and for the first
    fleet = Fleet({"algorithm": "inclusivefl", "num_rounds": ROUNDS, "local": MOMENTUM}, tmp_path, room)
    rounds = fleet.rounds()
    covers = {int(seat.device): coverage(fleet.manifest, seat.task.boundary) for seat in rounds[0].seats}
    ends = {device: covered.layers.stop for device, covered in covers.items()}
    assert ends == {0: 3, 1: 2, 2: 1, 3: 1}
    assert_models(fleet, rounds, inclusivefl.run(START, PROBLEM.gradient, drawn(rounds), ends, STEPS, RATE, 0.5))


@pytest.mark.parametrize("participate", [{}, {"count": 2, "balance": False}], ids=str)
@pytest.mark.parametrize("by", ["uniform", "samples"])
def test_heterofl(tmp_path, by, participate):
    job = {
        "algorithm": "heterofl",
        "num_rounds": ROUNDS,
        "cover": WIDE,
        "local": {**LOCAL, "rules": []},
        "weigh": {"by": by},
        "participate": participate,
    }
    fleet = Fleet(job, tmp_path, MIXED)
    rounds = fleet.rounds()
    shapes = {i: SHAPES[TIERS.get(tier, 1.0)] for i, tier in MIXED.items()}
    weights = SAMPLES if by == "samples" else None
    assert_models(fleet, rounds, heterofl.run(START, PROBLEM.gradient, drawn(rounds), shapes, STEPS, RATE, weights))


def test_fjord(tmp_path):
    job = {"algorithm": "fjord", "num_rounds": ROUNDS, "cover": WIDE, "local": {**LOCAL, "rules": []}}
    fleet = Fleet(job, tmp_path, MIXED)
    rounds = fleet.rounds()
    draws = {}
    for number, each in enumerate(rounds):
        for seat in each.seats:
            widths = [width_of(b) for b in coverage(fleet.manifest, seat.task.boundary).graphs]
            for step in range(STEPS):
                chosen = draw_width(step_seed(seat.task, step), len(widths)) if len(widths) > 1 else 0
                draws[int(seat.device), number * STEPS + step] = widths[chosen]
    assert set(draws.values()) == {1.0, *WIDTHS}
    largest = {i: TIERS.get(tier, 1.0) for i, tier in MIXED.items()}
    expected = fjord.run(START, PROBLEM.gradient, drawn(rounds), SHAPES, largest, draws, STEPS, RATE)
    assert_models(fleet, rounds, expected)


EPOCHS = {"epochs": 2, "batch": 4, "rate": "0.1"}
OWN_STEPS = {i: 2 * (count // 4) for i, count in enumerate(PROBLEM.samples)}


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("tiers", [{}, MIXED], ids=["strong", "mixed"])
def test_fednova_with_unequal_steps(tmp_path, momentum, tiers):
    rules = [{"rule": "momentum", "factor": momentum}] if momentum else []
    job = {"algorithm": "fednova", "num_rounds": ROUNDS, "local": {**EPOCHS, "rules": rules}}
    fleet = Fleet({**job, "participate": {"count": 3}}, tmp_path, tiers, most=max(OWN_STEPS.values()))
    rounds = fleet.rounds()
    assert len(set(OWN_STEPS.values())) == 3
    first = {"strong": 0, "moderate": 1, "weak": 2}
    trained = {i: list(range(first[tiers.get(i, "strong")], 3)) for i in SAMPLES}
    expected = fednova.run(START, PROBLEM.gradient, drawn(rounds), OWN_STEPS, 0.1, SAMPLES, momentum, trained)
    assert_models(fleet, rounds, expected)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_fednovas_divisor(steps):
    for factor in (0.0, 0.3, 0.9):
        assert effective_steps([Momentum(factor)], steps, 0.1) == pytest.approx(sum(coefficients(steps, factor)))
    for mu in (0.1, 2.0):
        shrunk = max(1.0, sum(coefficients(steps, shrink=0.1 * mu)))
        assert effective_steps([Proximal(mu)], steps, 0.1) == pytest.approx(shrunk)


def test_fedprox_with_unequal_steps(tmp_path):
    local = {**EPOCHS, "rules": [{"rule": "proximal", "mu": 0.7}]}
    job = {"algorithm": "fedprox", "num_rounds": ROUNDS, "local": local, "weigh": {"by": "samples"}}
    fleet = Fleet({**job, "participate": {"count": 3}}, tmp_path, most=max(OWN_STEPS.values()))
    rounds = fleet.rounds()
    assert_models(fleet, rounds, fedprox.run(START, PROBLEM.gradient, drawn(rounds), OWN_STEPS, 0.1, 0.7, SAMPLES))


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("initial", [None, 0.01])
def test_adaptive_servers(tmp_path, kind, initial):
    constants = {"rate": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}
    told = {} if initial is None else {"initial": initial}
    job = {
        "algorithm": f"fed{kind}",
        "num_rounds": ROUNDS,
        "local": LOCAL,
        "serve": {**constants, **told},
        "participate": {"count": 3},
    }
    fleet = Fleet(job, tmp_path)
    rounds = fleet.rounds()
    expected = fedopt.run(kind, START, PROBLEM.gradient, drawn(rounds), STEPS, RATE, 0.05, 0.8, 0.9, 0.01, initial)
    assert_models(fleet, rounds, expected, 1e-5)
    for mine, theirs in zip(rounds, expected):
        assert_close(fleet.model(mine.vectors["first_moment"]), theirs.first)
        assert_close(fleet.model(mine.vectors["second_moment"]), theirs.second)
    assert np.any(rounds[0].vectors["first_moment"])
