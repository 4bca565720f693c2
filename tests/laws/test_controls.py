"""Control variates: SCAFFOLD and VRL-SGD against the transcriptions of the listings."""

from __future__ import annotations

import pytest

from federation.layout import MODEL
from tests.laws.world import PROBLEM, START, Fleet, assert_close
from tests.oracles import scaffold, vrl_sgd
from tests.oracles.model import copy, mean, minus, plus, zeros

STEPS, RATE, ROUNDS = 4, 0.1, 7
LOCAL = {"steps": STEPS, "rate": str(RATE)}
CLOSE = 2e-5  # a control variate is a difference of models divided by Kη


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("participate", [{}, {"count": 2}], ids=str)
def test_scaffold(tmp_path, participate, told):
    job = {
        "algorithm": "scaffold",
        "num_rounds": ROUNDS,
        "local": LOCAL,
        "participate": participate,
        "serve": {"rate": 0.8, **({"devices": 4} if told else {})},
    }
    fleet = Fleet(job, tmp_path)
    rounds, seen, known = [], set(), []
    for _ in range(ROUNDS):
        rounds.append(fleet.round())
        seen |= set(rounds[-1].drawn)
        known.append(len(seen))
        drawn = [each.drawn for each in rounds]
        theirs = scaffold.run(START, PROBLEM.gradient, drawn, 4, STEPS, RATE, 0.8, None if told else known)[-1]
        assert_close(fleet.model(), theirs.model)
        assert_close(fleet.model(rounds[-1].vectors["control"]), theirs.control, CLOSE)
        for device in drawn[-1]:
            assert_close(fleet.kept(rounds[-1], device, "control"), theirs.controls[device], CLOSE)
    assert (len(set(known)) > 1) == bool(participate)


def test_vrl_sgd(tmp_path):
    fleet = Fleet({"algorithm": "vrl_sgd", "num_rounds": ROUNDS, "local": LOCAL}, tmp_path)
    rounds = fleet.rounds()
    expected = vrl_sgd.run(START, PROBLEM.gradient, [each.drawn for each in rounds], 4, STEPS, RATE)
    for mine, theirs in zip(rounds, expected):
        assert_close(fleet.model(mine.vectors[MODEL]), theirs.model)
    for device in range(4):  # a device learns the mean with its next task, so it is one round behind
        used = fleet.kept(rounds[-1], device, "control")
        assert_close(used, [{n: -v for n, v in layer.items()} for layer in expected[-2].corrections[device]], CLOSE)


def test_a_device_that_was_drawn_twice_has_one_control_variate(tmp_path):
    """c stays the mean of all c_i; the update of the model counts twice."""
    job = {
        "algorithm": "scaffold",
        "num_rounds": ROUNDS,
        "local": LOCAL,
        "serve": {"devices": 4},
        "participate": {"count": 4, "replacement": True},
    }
    fleet = Fleet(job, tmp_path)
    own = {device: zeros(START) for device in range(4)}
    twice = 0
    for _ in range(ROUNDS):
        each = fleet.round()
        own |= {device: fleet.kept(each, device, "control") for device in each.drawn}
        twice += len(set(each.drawn)) < 4
        assert_close(fleet.model(each.vectors["control"]), mean(list(own.values())), CLOSE)
    assert twice


def test_vrl_sgd_with_partial_averaging_divides_by_the_steps_since_a_part_was_averaged(tmp_path):
    """Δ_i of a part grows, when it is averaged, by (x̂ − x_i)/(Kη) with K the steps since the last time."""
    parts, rounds = 3, 11
    rules = [{"rule": "control_variate", "origin": "own"}]
    job = {
        "num_rounds": rounds + 1,
        "local": {"steps": 1, "rate": str(RATE), "rules": rules},
        "sync": {"rule": "rotating", "parts": parts, "by": "layer"},
    }
    fleet = Fleet(job, tmp_path)
    local = {i: copy(START) for i in range(4)}
    corrections = {i: zeros(START) for i in range(4)}
    walked = [0] * parts
    for number in range(rounds):
        for i in local:
            local[i] = plus(local[i], -RATE, minus(PROBLEM.gradient(i, local[i], number), corrections[i]))
        walked = [steps + 1 for steps in walked]
        part = (number + 1) % parts  # one layer each
        average = mean(list(local.values()))[part]
        for i in local:
            for name, value in average.items():
                corrections[i][part][name] += (value - local[i][part][name]) / (walked[part] * RATE)
            local[i][part] = dict(average)
        walked[part] = 0
        assert_close([fleet.model(fleet.round().vectors[MODEL])[part]], [average])
