"""Laws over random combinations of all axes, and over every published algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from federation.algorithms import PUBLISHED
from federation.axes.local import ControlVariate
from federation.coverage import coverage
from federation.errors import InputError
from federation.exchange import trained_region
from tests.laws.combinations import FLEETS, ROUNDS, combinations, fleet_of, jobs
from tests.laws.world import TIERS, Fleet, Round

REFUSED = (
    "local.rules: expected ServerMomentum to stand last",  # what came later would act on the server's part as well
    "local.epochs: DOMO divides by the number of local steps",
    "serve.combine: 'median' looks at whole parameters of the model alone",
    "serve.combine: a simulation sums updates as they come",
    "participate.window: expected a multiple of",
    "sync.parts: expected at most",
    "round 0 cannot begin",  # no device can train what the rule asks for
)
MIXED = {0: "strong", 1: "moderate", 2: "weak", 3: "strong"}


def published_job(name: str) -> dict[str, Any]:
    sync = {"sync": {"parts": 3}} if name == "partial_averaging" else {}
    steps = {} if name == "partial_averaging" else {"steps": 2}
    return {
        "algorithm": name,
        "num_rounds": ROUNDS,
        "local": {"rate": "0.1/2@2", **steps},
        "cover": {"tiers": TIERS},
        "participate": {"count": 3, "balance": False},
        **sync,
    }


def assert_same(one: list[Round], other: list[Round]) -> None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for name, vector in mine.vectors.items():
            assert vector.tobytes() == theirs.vectors[name].tobytes(), f"{name} after round {number}"


def untouched(fleet: Fleet, each: Round) -> np.ndarray:
    """The elements that nobody trained in a round, or that were not synchronised."""
    moved = np.zeros(fleet.space.size, np.float32)
    for seat in each.seats:
        region = trained_region(fleet.manifest, coverage(fleet.manifest, seat.task.boundary)) & each.sums.due
        region.scatter(np.ones(region.size, np.float32), moved)
    return moved == 0


def check(job: dict[str, Any], tiers: dict[int, str]) -> None:
    with fleet_of(job, tiers) as fleet, fleet_of(job, tiers) as other:
        before = {name: np.array(vector) for name, vector in fleet.server.state.vectors.items()}
        rounds = fleet.rounds()
        # Other groups, two processes, their devices and their sums in the opposite order.
        assert_same(rounds, other.rounds(processes=2, group=1, backwards=True))
        assert fleet.server.state.facts == other.server.state.facts
    for each in rounds:
        rest = untouched(fleet, each)
        for name in set(before) - {"before"}:
            assert each.vectors[name][rest].tobytes() == before[name][rest].tobytes(), f"{name} moved without training"
            assert np.isfinite(each.vectors[name]).all()
        before = each.vectors
    assert not any(report["lost_state"] for each in rounds for report in each.reports)


@combinations(100)
@given(job=jobs(), tiers=FLEETS)
def test_a_combination_is_refused_in_one_line_or_keeps_the_laws(job, tiers):
    try:
        check(job, tiers)
    except InputError as error:
        assert "\n" not in str(error) and str(error).startswith(REFUSED), str(error)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_algorithm_keeps_the_laws(name):
    check(published_job(name), MIXED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_device_that_lost_what_it_kept_goes_on_from_the_servers_value_and_says_so(name):
    job = {**published_job(name), "participate": {}}
    with fleet_of(job, MIXED) as fleet, fleet_of(job, MIXED) as whole:
        fleet.rounds(2)
        for path in (fleet.folder / "kept" / "3").glob("*"):
            path.unlink()
        each = fleet.round()
        lost = {report["lost_state"] for report in each.reports if report["samples"] == fleet.problem.samples[3]}
        others = {report["lost_state"] for report in each.reports if report["samples"] != fleet.problem.samples[3]}
        assert lost == {fleet.plan.choices.keeps_state} and others == {False}
        undisturbed = whole.rounds(3)[-1]
        same = undisturbed.vectors["model"].tobytes() == each.vectors["model"].tobytes()
        # FedLAMA's window has ended after two rounds: all of it was synchronised. DOMO's last version can be fetched.
        matters = fleet.plan.choices.keeps_state and name not in ("fedlama", "domo", "domo_s")
        assert same != matters
        assert not any(report["lost_state"] for report in fleet.round().reports), "it is said once"


def test_a_device_without_its_own_model_starts_from_the_servers():
    with fleet_of({**published_job("partial_averaging"), "participate": {}}, {}) as fleet:
        fleet.rounds(2)
        for path in (fleet.folder / "kept" / "3").glob("*"):
            path.unlink()
        started = {}
        train = fleet.train
        fleet.train = lambda devices, tasks, received, *more: (  # type: ignore[method-assign]
            started.update(zip(devices, (np.array(r.parameters) for r in received)))
            or train(devices, tasks, received, *more)
        )
        server = np.array(fleet.server.state.vectors["model"])
        fleet.round()
    assert started["3"].tobytes() == server.tobytes()
    assert started["2"].tobytes() != server.tobytes()


def test_a_device_that_fails_counts_for_nothing():
    """Its round is as if it had not been drawn."""
    job = {**published_job("scaffold"), "participate": {}, "serve": {"devices": 4}}
    with fleet_of(job, {}) as fleet:
        fleet.losing = {1}
        each = fleet.round()
        assert sorted(report["samples"] for report in each.reports) == sorted(
            count for device, count in enumerate(fleet.problem.samples) if device != 1
        )
        assert each.sums.totals["model"].count(0) == 3
        assert isinstance(fleet.plan.choices.rules[0], ControlVariate)
        fleet.losing = set()
        assert not any(report["lost_state"] for report in fleet.round().reports)
