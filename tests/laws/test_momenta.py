"""DOMO's family against the transcription of the listing: the models, both momenta, and m_r as devices infer it."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.trainer import Received
from federation.schedule import parse_schedule
from federation.wire import MODEL
from tests.laws.world import PROBLEM, START, Fleet, assert_close, model_of
from tests.oracles import domo
from tests.oracles.model import times

STEPS, ROUNDS, RATE = 3, 6, "0.1/4@2,4"


class Watching(Fleet):
    """Remembers what devices received."""

    def train(self, devices, tasks, received):
        for device, task, what in zip(devices, tasks, received, strict=True):
            self.received[task.round, int(device)] = what
        return super().train(devices, tasks, received)

    received: dict[tuple[int, int], Received]


@pytest.mark.parametrize("rate", ["0.1", RATE])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("method", list(domo.METHODS))
def test_the_family_of_domo(tmp_path, method, alpha, rate):
    job = {
        "algorithm": method, "num_rounds": ROUNDS, "local": {"steps": STEPS, "rate": rate}, "serve": {"rate": alpha},
        "participate": {"count": 3},
    }  # fmt: skip
    fleet = Watching(job, tmp_path)
    fleet.received = {}
    rounds = fleet.rounds()
    rates = [parse_schedule(rate).at(number) for number in range(ROUNDS)]
    expected = domo.run(method, START, PROBLEM.gradient, [r.drawn for r in rounds], STEPS, rates, alpha)
    for number, (mine, theirs) in enumerate(zip(rounds, expected)):
        assert_close(fleet.model(mine.vectors[MODEL]), theirs.model)
        if "server_momentum" in mine.vectors:  # M = −ηP·m
            moved = times(-rates[number] * STEPS, theirs.server_momentum)
            assert_close(fleet.model(mine.vectors["server_momentum"]), moved)
        for device in mine.drawn:
            what = fleet.received[number, device].server_momentum
            assert (what is not None) == (method.startswith("domo") and number > 0)
            if what is not None:
                assert_close(model_of(fleet.space, what), theirs.inferred, 2e-5)
    fused = method.startswith("domo")
    assert fused == any(r.server_momentum is not None and np.any(r.server_momentum) for r in fleet.received.values())
