"""DOMO's family against the transcription of the listing: the models, both momenta, and m_r as devices infer it."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.trainer import Received
from federation.layout import MODEL
from federation.schedule import parse_schedule
from tests.laws.world import PROBLEM, START, Fleet, assert_close, model_of
from tests.oracles import domo, layerwise
from tests.oracles.model import copy, times, zeros

STEPS, ROUNDS, RATE = 3, 6, "0.1/4@2,4"


def test_a_momentum_that_rests_while_the_rate_changes_means_the_same_afterwards(tmp_path):
    """m is made of gradients, layer by layer over those who trained it; where nobody did, it stays."""
    trained = {0: [0, 1, 2], 1: [2], 2: [2], 3: [2]}
    job = {
        "num_rounds": 12,
        "local": {"steps": STEPS, "rate": "0.1/10@6", "rules": []},
        "cover": {"rule": "output_side"},
        "serve": {"rule": "momentum", "factor": 0.8},
        "participate": {"count": 2, "balance": False},
        "seed": 4,
    }
    fleet = Fleet(job, tmp_path, dict.fromkeys((1, 2, 3), "weak"))
    x, m, rested = START, zeros(START), 0
    for number, each in enumerate(fleet.rounds()):
        rate = parse_schedule("0.1/10@6").at(number)

        def gradient(device, model, step, first=number * STEPS):
            return PROBLEM.gradient(device, model, first + step)

        one = layerwise.run(x, gradient, [each.drawn], trained, STEPS, rate)[0]
        x, m = copy(x), copy(m)
        for layer, who in enumerate(one.trained_by):
            for name in x[layer] if who else ():
                moved = sum(x[layer][name] - one.local[i][layer][name] for i in who) / len(who)
                m[layer][name] = 0.8 * m[layer][name] + moved / (rate * STEPS)
                x[layer][name] = x[layer][name] - rate * STEPS * m[layer][name]
        rested += number == 6 and not one.trained_by[0]
        assert_close(fleet.model(each.vectors[MODEL]), x)
    assert rested, "the first layer rests in the round in which the rate changes"


class Watching(Fleet):
    """Remembers what devices received."""

    def train(self, devices, tasks, received, *more):
        for device, task, what in zip(devices, tasks, received, strict=True):
            self.received[task.round, int(device)] = what
        return super().train(devices, tasks, received, *more)

    received: dict[tuple[int, int], Received]


@pytest.mark.parametrize("rate", ["0.1", RATE])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("method", list(domo.METHODS))
def test_the_family_of_domo(tmp_path, method, alpha, rate):
    job = {
        "algorithm": method,
        "num_rounds": ROUNDS,
        "local": {"steps": STEPS, "rate": rate},
        "serve": {"rate": alpha},
        "participate": {"count": 3},
    }
    fleet = Watching(job, tmp_path)
    fleet.received = {}
    rounds = fleet.rounds()
    rates = [parse_schedule(rate).at(number) for number in range(ROUNDS)]
    expected = domo.run(method, START, PROBLEM.gradient, [r.drawn for r in rounds], STEPS, rates, alpha)
    for number, (mine, theirs) in enumerate(zip(rounds, expected)):
        assert_close(fleet.model(mine.vectors[MODEL]), theirs.model)
        if "server_momentum" in mine.vectors:  # M = −P·m
            kept = times(rates[number], fleet.model(mine.vectors["server_momentum"]))
            assert_close(kept, times(-rates[number] * STEPS, theirs.server_momentum))
        for device in mine.drawn:
            what = fleet.received[number, device].brought.get("server_momentum")
            assert (what is not None) == (method.startswith("domo") and number > 0)
            if what is not None:
                assert_close(model_of(fleet.space, what), theirs.inferred, 2e-5)
    fused = method.startswith("domo")
    assert fused == any(np.any(received.brought.get("server_momentum", 0)) for received in fleet.received.values())
