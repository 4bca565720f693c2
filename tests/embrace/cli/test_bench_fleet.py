"""`embrace bench fleet`: real agents, a few of them, and bad luck."""

from __future__ import annotations

import pytest

from bench.fleet import FleetReport, FleetRow, Luck
from embrace.cli.bench.fleet import report_of, summary
from federation.errors import InputError
from tests.embrace.cli.conftest import run


@pytest.mark.slow
def test_a_small_fleet_with_every_kind_of_bad_luck() -> None:
    options = ("--agents", 5, "--killed", 1, "--wrong", 1, "--slow", 1, "--rounds", 3, "--steps", 2)
    answer = run("bench", "fleet", *options, "--json")
    assert answer.code == 0
    healthy, unlucky, left = answer.json["fleets"]
    assert (healthy["updates"], healthy["failed"], left["updates"]) == (15, 0, 6)
    assert unlucky["failed"] >= 1, "wrong data"
    assert 6 <= unlucky["updates"] < 15
    assert all(len(fleet["rounds"]) == 3 and fleet["seconds"] > 0 for fleet in (healthy, unlucky, left))


@pytest.mark.parametrize("luck", [(2, 1, 1, 0), (0, 0, 0, 0), (3, -1, 0, 0)])
def test_a_fleet_needs_a_device_that_is_well(luck: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError, match="more agents than are killed"):
        Luck("x", *luck)


def row(seconds: float, *luck: int) -> FleetRow:
    return FleetRow(Luck("a fleet", *luck), seconds, [seconds / 2] * 2, 10, 1, 2, (0.5, 1.5))


@pytest.mark.parametrize(("seconds", "said"), [(15.0, "1.50, at most 1.5: met"), (15.2, "1.52, at most 1.5: missed")])
def test_the_report_says_whether_the_bound_was_met(seconds: float, said: str) -> None:
    found = FleetReport([row(10.0, 5), row(seconds, 5, 1, 1, 1), row(5.0, 2)], {"cores": "2"})
    report = report_of(found)
    assert report.bars == [f"with bad luck against healthy: {said}"]
    assert f"of those that are left: {seconds / 5:.2f}" in report.notes[0]
    assert [fleet["ratio"] for fleet in summary(found)["fleets"]] == [1.0, seconds / 10, 0.5]
