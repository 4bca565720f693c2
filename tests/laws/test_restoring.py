"""A run that was broken off goes on as if nothing had happened: from the checkpoint, and from what devices kept."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given

pytest.importorskip("torch")

from federation.algorithms import PUBLISHED
from federation.errors import InputError
from simulation.simulate import Simulation
from tests.laws.combinations import FLEETS, combinations, fleet_of, jobs
from tests.laws.test_combinations import MIXED, assert_same, published_job
from tests.laws.world import Fleet


def checkpoint(fleet: Fleet) -> Simulation:
    """The part of a simulation that saves and restores, around this fleet's server."""
    simulation = Simulation.__new__(Simulation)
    simulation.folder, simulation.server, simulation.records = fleet.folder, fleet.server, []
    (fleet.folder / "metrics.jsonl").touch()
    return simulation


def check(job: dict[str, Any], tiers: dict[int, str], rounds: int, saved: int, beyond: int) -> None:
    """Saved after some rounds, broken off `beyond` rounds later, and begun again from the checkpoint."""
    job = {**job, "num_rounds": rounds}
    with fleet_of(job, tiers) as whole:
        undisturbed = whole.rounds()
        facts = whole.server.state
    with fleet_of(job, tiers) as first:
        first.rounds(saved)
        simulation = checkpoint(first)
        simulation._save()
        first.saved = simulation.saved
        first.rounds(beyond)
        with fleet_of(job, tiers) as second:
            shutil.copytree(first.folder, second.folder, dirs_exist_ok=True)
            simulation = checkpoint(second)
            simulation._resume()
            second.saved = simulation.saved
            assert second.server.state.number == saved
            assert_same(second.rounds(rounds - saved), undisturbed[saved:])
            assert (second.server.state.facts, second.server.state.last) == (facts.facts, facts.last)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_algorithm_goes_on_from_a_checkpoint(name):
    check(published_job(name), MIXED, 6, 3, 2)


@pytest.mark.parametrize("saved", [19, 20, 21])
@pytest.mark.parametrize("redistribute", ["local", "averaged"])
def test_partial_averaging_goes_on_where_the_cohort_changes(redistribute, saved):
    job = published_job("partial_averaging")
    check({**job, "sync": {"parts": 2, "redistribute": redistribute}}, {}, 43, saved, 21)


@combinations(40)
@given(job=jobs(), tiers=FLEETS)
def test_combinations_go_on_from_a_checkpoint(job, tiers):
    with suppress(InputError):  # tests/laws/test_combinations.py looks at what is refused
        check(job, tiers, 5, 2, 2)
