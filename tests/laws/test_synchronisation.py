"""FedLAMA and partial averaging against the transcriptions of the listings, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from federation.axes.sync import Rotating
from federation.coverage import coverage
from federation.exchange import graph_region
from federation.layout import MODEL
from tests.laws.world import PROBLEM, START, TIERS, Fleet, assert_close
from tests.oracles import fedlama, partial_averaging
from tests.oracles.problem import LAYERS

RATE = 0.1
CLOSE = 3e-6


@pytest.mark.parametrize("joined", [False, True], ids=["a layer a piece", "two layers in a piece"])
@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("base", [1, 3])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_fedlama(tmp_path, factor, base, accelerate, joined):
    """Intervals and distances are those of the paper's layers, however a bundle is cut into pieces."""
    windows = 4
    job = {
        "algorithm": "fedlama",
        "num_rounds": windows * factor,
        "participate": {"count": 3},
        "local": {"steps": base, "rate": str(RATE)},
        "sync": {"factor": factor, "accelerate": accelerate},
    }
    fleet = Fleet(job, tmp_path, joined=joined, statistics=joined)
    rounds, facts = [], [fleet.server.state.facts.sync]
    for _ in range(fleet.plan.num_rounds):
        rounds.append(fleet.round())
        facts.append(fleet.server.state.facts.sync)
        each, number = rounds[-1], len(rounds) - 1
        assert each.drawn == rounds[number - number % factor].drawn, "the cohort stays for a window"
        cohorts = [r.drawn for r in rounds[::factor]]
        theirs = fedlama.run(START, PROBLEM.gradient, cohorts, base, factor, RATE, accelerate)[(number + 1) * base - 1]
        names = {piece.parameter.name for pieces in each.sums.due.layers for piece in pieces}
        due = [index for index, name in enumerate(LAYERS) if f"{name}.weight" in names]
        assert due == theirs.synchronised
        assert [base * rounds_between for rounds_between in facts[-2].intervals] == theirs.intervals
        assert_close(fleet.model(), theirs.model)
        for layer in due:
            assert facts[-1].discrepancies[layer] == pytest.approx(theirs.discrepancy[layer], rel=1e-4)
        for device in each.drawn if factor > 1 else ():  # what is not due, a device has for itself
            own = fleet.kept(each, device, "model")
            for layer in set(range(3)) - set(due):
                assert_close([own[layer]], [theirs.local[device][layer]])
        if theirs.adjustment:
            assert [base * rounds_between for rounds_between in facts[-1].intervals] == theirs.adjustment.intervals
    if factor > 1:
        assert len({fact.intervals for fact in facts}) > 1, "some layers are synchronised less often"


@pytest.mark.parametrize("redistribute", ["local", "averaged"])
@pytest.mark.parametrize("by", ["layer", "channel"])
@pytest.mark.parametrize("parts", [2, 3])
def test_partial_averaging(tmp_path, parts, by, redistribute):
    window = 10 * parts
    sync = {"parts": parts, "by": by, "redistribute": redistribute}
    job = {
        "algorithm": "partial_averaging",
        "num_rounds": 2 * window + 3,
        "participate": {"count": 3},
        "sync": sync,
        "local": {"steps": 1, "rate": str(RATE), "rules": []},
    }
    fleet = Fleet(job, tmp_path)
    rounds = fleet.rounds()
    cohorts = [rounds[start].drawn for start in range(0, len(rounds), window)]
    assert len({tuple(sorted(cohort)) for cohort in cohorts}) > 1, "the cohort changes"
    if by == "layer":
        units = Rotating(parts).units(fleet.space)
        groups = [[index for index, pieces in enumerate(unit.layers) if pieces] for unit in units]
        split = partial_averaging.layer_parts(START, groups)
    else:
        split = partial_averaging.channel_parts(START, parts)
    expected = partial_averaging.run(START, PROBLEM.gradient, cohorts, window, split, RATE, redistribute)
    for number, (mine, theirs) in enumerate(zip(rounds, expected)):
        found = fleet.model(mine.vectors[MODEL])
        handed_out = redistribute == "averaged" and (number + 1) % window == 0
        if handed_out or mine is rounds[-1]:  # the full average
            assert_close(found, theirs.average)
            for device in mine.drawn if mine is rounds[-1] else ():
                assert_close(fleet.kept(mine, device, "model"), theirs.before[device], 1e-5)
            continue
        for layer, name, first, end in split[theirs.part]:
            one = theirs.local[theirs.cohort[0]][layer][name][first:end]
            np.testing.assert_allclose(found[layer][name][first:end], one, rtol=CLOSE, atol=CLOSE)


class Remembering(Fleet):
    """Remembers the local models of the last round, in the shapes of the whole one, with ones where a device has it."""

    def train(self, devices, tasks, received, *more):
        outcomes = super().train(devices, tasks, received, *more)
        for device, task, start, outcome in zip(devices, tasks, received, outcomes):
            region = graph_region(self.manifest, coverage(self.manifest, task.boundary))
            moved, has = np.zeros(self.space.size, np.float32), np.zeros(self.space.size, np.float32)
            region.scatter(outcome.parameters - start.origin, moved)
            region.scatter(np.ones(region.size, np.float32), has)
            self.moved[int(device)] = moved.astype(np.float64), has, outcome.report.steps
        return outcomes

    moved: dict


@pytest.mark.parametrize(
    ("job", "tiers"),
    [
        ({"cover": {"rule": "width", "tiers": TIERS}}, {1: "moderate", 2: "weak"}),
        ({"serve": {"clip_norm": 0.3}}, {}),
        ({"local": {"epochs": 1, "batch": 4}, "weigh": {"by": "samples", "normalise": True}}, {}),
    ],
    ids=["widths", "shortened", "fednova"],
)
def test_a_discrepancy_is_of_what_was_averaged(tmp_path, job, tiers):
    """mean ‖u − x_i‖² over what each device has, as it went into u: shortened, or taken to the mean number of steps."""
    local = {"rate": str(RATE), "rules": [], "steps": 2, **job.get("local", {})}
    job = {"num_rounds": 4, "sync": {"rule": "fedlama", "factor": 1}, **job, "local": local}
    fleet = Remembering(job, tmp_path, tiers)
    fleet.moved = {}
    before = np.array(fleet.server.state.vectors[MODEL], np.float64)
    fleet.round()
    u = fleet.server.state.vectors[MODEL] - before
    weights = {i: float(fleet.plan.weigh.weight(PROBLEM.samples[i])) for i in fleet.moved}
    total = sum(weights.values())
    steps = sum(weights[i] * fleet.moved[i][2] for i in weights) / total
    clip, nova = fleet.plan.serve.clip_norm, fleet.plan.weigh.normalise
    for layer in range(3):
        where, apart = fleet.space.layer(layer), 0.0
        for i, (moved, has, own_steps) in fleet.moved.items():
            short = min(1.0, clip / np.linalg.norm(moved)) if clip else 1.0
            scaled = moved * short * (steps / own_steps if nova else 1.0)
            apart += weights[i] * np.sum(((u - scaled) * has)[where] ** 2)
        expected = apart / total / (fleet.plan.local.steps * (where.stop - where.start))
        assert fleet.server.state.facts.sync.discrepancies[layer] == pytest.approx(expected, rel=1e-4)
        assert expected > 0
