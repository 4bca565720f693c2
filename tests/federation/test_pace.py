"""Pace steering, alone and with thousands of devices on a clock that is not the world's."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from federation.pace import SOONEST, Crowd, Pace, longest_seconds, mean_seconds, seconds_away

PACE = Pace(long_polls=100, check_ins_per_second=20.0, longest_away=900.0)


def test_a_small_fleet_is_never_steered() -> None:
    for there in (1, 99, 100):
        assert seconds_away(PACE, Crowd(there, there, seats=1, demand=1e-6), "a", 1.0, is_useful=False) is None


def test_a_device_that_a_round_is_short_of_is_not_steered() -> None:
    full = Crowd(there=10**6, waiting=10**5, seats=10)
    assert seconds_away(PACE, full, "a", 1.0, is_needed=True) is None
    assert seconds_away(PACE, full, "a", 1.0) is not None


@pytest.mark.parametrize(("seats", "waiting", "steered"), [(0, 100, 0), (0, 101, 1), (1000, 1100, 0), (1000, 1101, 1)])
def test_as_many_wait_as_the_next_rounds_take(seats: int, waiting: int, steered: int) -> None:
    assert (seconds_away(PACE, Crowd(10_000, waiting, seats), "a", 1.0) is not None) == bool(steered)


def test_a_device_that_no_job_can_use_does_not_wait_in_a_large_fleet() -> None:
    assert seconds_away(PACE, Crowd(10_000, 1, seats=1000), "a", 1.0, is_useful=False) is not None


def test_times_differ_by_device_and_by_occasion_and_are_the_same_for_the_same() -> None:
    crowd = Crowd(10_000, 5000)
    told = {
        (name, now): seconds_away(PACE, crowd, name, now) or 0.0 for name in map(str, range(100)) for now in (1.0, 2.0)
    }
    assert len(set(told.values())) == 200
    assert told["7", 2.0] == seconds_away(PACE, crowd, "7", 2.0)
    longest = SOONEST + 2 * mean_seconds(PACE, crowd)
    assert min(told.values()) >= SOONEST and max(told.values()) <= longest
    assert abs(sum(told.values()) / 200 - (SOONEST + longest) / 2) < longest / 10


def test_the_pause_follows_the_rounds_between_what_the_coordinator_bears_and_the_longest() -> None:
    means = [mean_seconds(PACE, Crowd(10_000, 0, 100, demand=100 / seconds)) for seconds in (1, 10, 36, 1800)]
    assert means == [500.0, 500.0, 500.0, 500.0], "20 a second are 500 s, more than half of the longest"
    quick = Pace(long_polls=100, check_ins_per_second=1000.0, longest_away=900.0)
    means = [mean_seconds(quick, Crowd(10_000, 0, 100, demand=100 / seconds)) for seconds in (0.1, 1, 6, 1800)]
    assert means == [10.0, 50.0, 300.0, 450.0]
    assert mean_seconds(quick, Crowd(10_000, 0)) == 450.0, "without a job"
    assert mean_seconds(quick, Crowd(10**6, 0)) == 1000.0, "the rate of check-ins comes first"


@dataclass
class Fleet:
    """Devices, a coordinator that draws rounds of those that wait, and a clock. Devices come all at once.

    The rule of the coordinator, in its simplest form: a round begins when as many devices wait as it takes.
    """

    devices: int
    seats: int
    seconds: float  # that a task takes, more or less
    pace: Pace
    now: float = 0.0
    waiting: set[int] = field(default_factory=set)
    away: int = 0
    left: int = 0  # tasks of the round that are not answered
    began: list[float] = field(default_factory=list)
    check_ins: Counter[int] = field(default_factory=Counter)  # second -> how many
    drawn: Counter[int] = field(default_factory=Counter)  # device -> tasks
    most_waiting: int = 0

    def run(self, until: float) -> Fleet:
        chance, order = random.Random(1), itertools.count()
        events = [(chance.uniform(0, 1), next(order), "came", device) for device in range(self.devices)]
        heapq.heapify(events)
        while events and events[0][0] < until:
            self.now, _, what, device = heapq.heappop(events)
            for at, then, whose in self._happens(what, device, chance):
                heapq.heappush(events, (at, next(order), then, whose))
        return self

    def _happens(self, what: str, device: int, chance: random.Random) -> list[tuple[float, str, int]]:
        if what == "back":
            self.away -= 1
        if what == "done":
            self.left -= 1
        self.check_ins[int(self.now)] += 1
        self.waiting.add(device)
        begun = []
        if not self.left and len(self.waiting) >= self.seats:
            cohort = chance.sample(sorted(self.waiting), self.seats)
            self.waiting.difference_update(cohort)
            self.drawn.update(cohort)
            self.left = self.seats
            self.began.append(self.now)
            begun = [(self.now + self.seconds * chance.uniform(0.5, 1.5), "done", member) for member in cohort]
        if device in self.waiting:
            crowd = Crowd(len(self.waiting) + self.away + self.left, len(self.waiting), self.seats, self._demand())
            told = seconds_away(self.pace, crowd, str(device), self.now, is_needed=not self.left)
            if told is not None:
                self.waiting.remove(device)
                self.away += 1
                return [*begun, (self.now + told, "back", device)]
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return begun

    def _demand(self) -> float:
        lengths = [later - earlier for earlier, later in pairwise(self.began)]
        return self.seats / max(1.0, *lengths[-1:], self.now - self.began[-1] if self.began else 0.0)


@pytest.mark.parametrize(("seats", "seconds"), [(50, 10.0), (50, 120.0), (500, 60.0), (1000, 20.0)])
def test_thousands_of_devices_come_back_one_by_one_and_rounds_fill(seats: int, seconds: float) -> None:
    pace = Pace(long_polls=100, check_ins_per_second=50.0, longest_away=300.0)
    fleet = Fleet(5000, seats, seconds, pace).run(until=1500.0)
    later = [fleet.check_ins[second] for second in range(10, 1500)]
    busiest = max(sum(later[first : first + 20]) / 20 for first in range(len(later) - 20))
    answered = seats / (1.5 * seconds / 2)  # devices come with their updates, too, whatever they were told
    assert busiest <= 1.5 * 50.0 + answered
    assert sum(later) / len(later) < 1.1 * 50.0 + answered
    assert fleet.most_waiting <= max(100, 1.1 * seats) + 2
    gaps = [later - earlier for earlier, later in pairwise(fleet.began)]
    fill = seats / 25.0  # seconds until as many have come as a round takes, at half of the rate
    assert len(gaps) >= 5 and max(gaps) <= 1.5 * seconds + max(2.0, fill)


def test_no_device_is_forgotten() -> None:
    fleet = Fleet(2000, 100, 20.0, Pace(long_polls=100, check_ins_per_second=50.0, longest_away=300.0)).run(5000.0)
    assert len(fleet.drawn) == 2000, "every device had a task"
    mean = sum(fleet.drawn.values()) / 2000
    assert max(fleet.drawn.values()) < 3 * mean, "and none had far more than others"


def test_a_fleet_as_small_as_the_long_polls_only_waits() -> None:
    fleet = Fleet(100, 10, 20.0, PACE).run(1000.0)
    assert fleet.away == 0 and fleet.most_waiting >= 90


def test_without_rounds_a_fleet_keeps_calm() -> None:
    fleet = Fleet(5000, 10**6, 1.0, Pace(100, 50.0, 300.0))
    fleet.left = 1  # a round of another fleet goes on for ever
    fleet.run(2000.0)
    assert sum(fleet.check_ins[second] for second in range(300, 2000)) / 1700 < 1.1 * 5000 / 100


@pytest.mark.parametrize("there", [1001, 20_000, 1_000_000])
@pytest.mark.parametrize("demand", [0.0, 0.01, 50.0])
def test_no_device_is_away_for_longer_than_the_longest_time(there: int, demand: float) -> None:
    crowd = Crowd(there, there, 10, demand)
    told = [seconds_away(Pace(), crowd, f"device {number}", 0.0) for number in range(300)]
    assert max(seconds for seconds in told if seconds is not None) <= longest_seconds(Pace(), there)
