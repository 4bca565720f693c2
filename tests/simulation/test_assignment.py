"""Every device is assigned once; stacks follow from the cohort alone and stay together, whatever the processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.cohort import Member, Seat
from federation.messages import Task
from simulation.assignment import LEAST_STACKED, MOST_STACKED, Assigner
from simulation.server import SeatTask
from tests.laws.world import manifest

MODEL = manifest()
LARGE = replace(MODEL, layers=tuple(replace(layer, macs=2 * 10**6) for layer in MODEL.layers))
BOUNDARIES = ("first", "second", "head", "first@0.5")


def assigner_of(workers: int, *, stacks: bool = True, samples: dict[str, int] | None = None) -> Assigner:
    return Assigner(MODEL, samples or {str(number): 40 for number in range(200)}, stacks, workers)


def seats_of(*boundaries: str, steps: int = 10, activations: Any = "float32") -> list[SeatTask]:
    tasks = [Task(boundary, steps, 8, 0.1, activations=activations) for boundary in boundaries]
    seats = [Seat(slot, Member(str(slot), task.boundary, 1)) for slot, task in enumerate(tasks)]
    return [SeatTask(f"simulated-0-{seat.number}-1", seat, task) for seat, task in zip(seats, tasks)]


def sizes(assigner: Assigner, seats: list[SeatTask]) -> list[list[int]]:
    """Of each share the sizes of what is trained together."""
    return [[len(unit) for unit in share] for share in assigner.assign(seats)]


@pytest.mark.parametrize(
    ("count", "workers", "expected"),
    [
        (32, 1, [[16, 16]]),
        (32, 2, [[16], [16]]),
        (16, 2, [[16]]),  # a stack is never split
        (10, 2, [[10]]),
        (48, 2, [[16, 16], [16]]),
        (40, 2, [[16], [16, 8]]),
        (18, 2, [[16], [1, 1]]),  # two are too few for a stack
        (3, 2, [[1, 1], [1]]),
    ],
)
def test_small_models_are_stacked_and_stacks_are_never_split(count, workers, expected):
    found = sizes(assigner_of(workers), seats_of(*["first"] * count))
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_stacks_are_filled_up_in_the_order_of_the_cohort():
    kinds = ["first", "head"] * 20
    units = [[seat.slot for seat in unit] for unit in assigner_of(2).units(seats_of(*kinds))]
    first, head = list(range(0, 40, 2)), list(range(1, 40, 2))
    assert units == [first[:16], first[16:], head[:16], head[16:]]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_what_is_not_stacked_goes_one_by_one_to_all_processes(workers):
    seats = seats_of(*["head"] * 15)
    for assigner, given_seats in (
        (assigner_of(workers, stacks=False), seats),
        (assigner_of(workers), seats_of(*["head"] * 15, activations="float16")),
        (assigner_of(workers), seats_of(*["first@0.5|first@0.25"] * 15)),
        (replace(assigner_of(workers), manifest=LARGE), seats),
    ):
        shares = assigner.assign(given_seats)
        assert all(len(unit) == 1 for share in shares for unit in share)
        assert len(shares) == workers and max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=200, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(BOUNDARIES), st.sampled_from([3, 8, 40])), min_size=1, max_size=60),
    workers=st.integers(1, 9),
)
def test_units_do_not_depend_on_the_number_of_processes(kinds, workers):
    seats = seats_of(*(boundary for boundary, _ in kinds))
    samples = {str(number): size for number, (_, size) in enumerate(kinds)}
    shares = assigner_of(workers, samples=samples).assign(seats)
    units = [[seat.slot for seat in unit] for share in shares for unit in share]
    assert all(shares) and sorted(slot for unit in units for slot in unit) == list(range(len(seats)))
    alone = [[seat.slot for seat in unit] for unit in assigner_of(1, samples=samples).units(seats)]
    assert sorted(units) == sorted(alone)
    places = [(boundary, min(8, size)) for boundary, size in kinds]
    for unit in units:
        assert len({places[slot] for slot in unit}) == 1
        assert len(unit) == 1 or LEAST_STACKED <= len(unit) <= MOST_STACKED
    for kind, count in Counter(places).items():
        found = sorted((len(unit) for unit in units if places[unit[0]] == kind), reverse=True)
        full, rest = divmod(count, MOST_STACKED)
        assert found == [MOST_STACKED] * full + ([rest] if rest >= LEAST_STACKED else [1] * rest)


def test_long_work_is_handed_out_as_processes_come_for_it():
    assigner = replace(assigner_of(2), manifest=LARGE)
    assert sizes(assigner, seats_of(*["head"] * 5)) == [[1, 1, 1], [1, 1]]
    assert sizes(assigner, seats_of(*["head"] * 5, steps=200)) == [[1]] * 5
    mixed = assigner.assign(seats_of("head", "head", "first", "head", steps=200))
    assert mixed[0][0][0].task.boundary == "first", "the longest begins first"
