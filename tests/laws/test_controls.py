"""Control variates: SCAFFOLD and VRL-SGD against the transcriptions of the listings."""

from __future__ import annotations

import pytest

from federation.wire import MODEL
from tests.laws.world import PROBLEM, START, Fleet, assert_close
from tests.oracles import scaffold, vrl_sgd

STEPS, RATE, ROUNDS = 4, 0.1, 7
LOCAL = {"steps": STEPS, "rate": str(RATE)}
CLOSE = 2e-5  # a control variate is a difference of models divided by Kη


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("participate", [{}, {"count": 2}], ids=str)
def test_scaffold(tmp_path, participate, told):
    job = {
        "algorithm": "scaffold", "num_rounds": ROUNDS, "local": LOCAL, "participate": participate,
        "serve": {"rate": 0.8, **({"devices": 4} if told else {})},
    }  # fmt: skip
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
