"""Every device is dealt once; what is stacked stays together; no process is left without work that it could do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.axes.local import ControlVariate, Momentum
from federation.job import plan_from
from federation.messages import Task
from simulation.assignment import GROUP, LEAST, Dealer
from simulation.server import Seat
from tests.laws.world import manifest

MODEL = manifest()
LARGE = replace(MODEL, layers=tuple(replace(layer, macs=2 * 10**6) for layer in MODEL.layers))
BOUNDARIES = ("first", "second", "head", "first@0.5")
KEEP = [{"rule": "momentum", "factor": 0.9, "between": "keep"}]


def dealer_of(workers: int, *, stacks: bool = True, samples: dict[str, int] | None = None, **job: Any) -> Dealer:
    sizes = samples or {str(number): 40 for number in range(200)}
    return Dealer(plan_from({"bundle": "none", **job}), MODEL, sizes, stacks, workers)


def seats_of(*boundaries: str, steps: int = 10, activations: Any = "float32") -> list[Seat]:
    tasks = [Task(boundary, steps, 8, 0.1, activations=activations) for boundary in boundaries]
    return [Seat(slot, str(slot), 1, f"simulated-0-{slot}-1", task) for slot, task in enumerate(tasks)]


def sizes(dealer: Dealer, seats: list[Seat]) -> list[list[int]]:
    """Of each share the sizes of what is trained together."""
    return [[len(unit) for unit in share] for share in dealer.deal(seats)]


@pytest.mark.parametrize(
    ("count", "workers", "expected"),
    [
        (32, 1, [[16, 16]]),
        (32, 2, [[16], [16]]),
        (16, 2, [[8], [8]]),
        (10, 2, [[5], [5]]),
        (7, 2, [[7]]),  # two stacks of it would be too small
        (48, 2, [[16, 8], [16, 8]]),
        (16, 3, [[6], [5], [5]]),
        (32, 4, [[8]] * 4),
        (16, 16, [[4]] * 4),
    ],
)
def test_small_models_are_stacked_in_equal_parts(count, workers, expected):
    found = sizes(dealer_of(workers), seats_of(*["first"] * count))
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_what_is_not_stacked_goes_one_by_one_to_all_processes(workers):
    everybody = seats_of(*["head"] * 15)
    for dealer, seats in (
        (dealer_of(workers, stacks=False), everybody),
        (dealer_of(workers), seats_of(*["head"] * 15, activations="float16")),
        (dealer_of(workers), seats_of(*["first@0.5|first@0.25"] * 15)),
        (replace(dealer_of(workers), manifest=LARGE), everybody),
    ):
        shares = dealer.deal(seats)
        assert all(len(unit) == 1 for share in shares for unit in share)
        assert len(shares) == workers and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_devices_that_may_have_kept_different_things_are_not_parted():
    """Those of them that are stacked are known where the files are."""
    rules = plan_from({"bundle": "none", "local": {"rules": KEEP}}).choices.rules
    assert [rule.between for rule in rules if isinstance(rule, Momentum)] == ["keep"]
    assert sizes(dealer_of(2, local={"rules": KEEP}), seats_of(*["first"] * 16)) == [[16]]
    vrl = plan_from({"bundle": "none", "algorithm": "vrl_sgd"}).choices.rules
    assert [rule.origin for rule in vrl if isinstance(rule, ControlVariate)] == ["own"]
    assert sizes(dealer_of(2, algorithm="vrl_sgd"), seats_of(*["first"] * 16)) == [[16]]
    assert sizes(dealer_of(2, algorithm="scaffold"), seats_of(*["first"] * 16)) == [[8], [8]]


@settings(max_examples=200, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(BOUNDARIES), st.sampled_from([3, 8, 40])), min_size=1, max_size=60),
    workers=st.integers(1, 9),
)
def test_who_is_stacked_does_not_depend_on_the_number_of_processes(kinds, workers):
    seats = seats_of(*(boundary for boundary, _ in kinds))
    samples = {str(number): size for number, (_, size) in enumerate(kinds)}
    shares = dealer_of(workers, samples=samples).deal(seats)
    units = [[seat.slot for seat in unit] for share in shares for unit in share]
    assert all(shares) and sorted(slot for unit in units for slot in unit) == list(range(len(seats)))
    places = [(slot // GROUP, boundary, min(8, size)) for slot, (boundary, size) in enumerate(kinds)]
    alike = Counter(places)
    for unit in units:
        assert len({places[slot] for slot in unit}) == 1
        assert len(unit) == 1 if alike[places[unit[0]]] < LEAST else len(unit) >= LEAST


def test_long_work_is_dealt_as_processes_come_for_it():
    dealer = replace(dealer_of(2), manifest=LARGE)
    assert sizes(dealer, seats_of(*["head"] * 5)) == [[1, 1, 1], [1, 1]]
    assert sizes(dealer, seats_of(*["head"] * 5, steps=200)) == [[1]] * 5
    mixed = dealer.deal(seats_of("head", "head", "first", "head", steps=200))
    assert mixed[0][0][0].task.boundary == "first", "the longest begins first"
