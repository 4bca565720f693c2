"""How quick simulated devices are, and which of a round's updates come in time.

    [simulate.pace]
    gigamacs = 1.0                      # 10⁹ multiply-accumulates that a device makes in a second
    tiers = { strong = 4.0 }            # ... and devices of these tiers
    spread = 0.5

A task takes its arithmetic and its exchange; devices and tasks are up to a few times quicker or slower, at random. Time
passes in the round's own state machine (federation/rounds.py), which decides as in a coordinator who is late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from federation.axes.participate import Participation
from federation.cohort import Cohort, LeaseTaken, UpdateArrived
from federation.errors import EmbraceError, FieldError
from federation.identity import task_seed
from federation.rounds import DevicesAvailable, Round, Tick, advance, open_round
from federation.traffic import Link, Traffic

_LONG: Final = 1e9  # seconds: leases are renewed while a device is at work
_HALVINGS: Final = 50  # until the second of an end is found


@dataclass(frozen=True)
class Pace:
    """What a task takes on a device."""

    gigamacs: float = 1.0  # 10⁹ multiply-accumulates in a second
    tiers: dict[str, float] = field(default_factory=dict)  # the same for devices of a tier
    up: float = 5.0  # megabits in a second, from a device to the coordinator
    down: float = 20.0
    spread: float = 0.5  # standard deviation of the logarithm of what tasks take; half its square is the device's own

    def __post_init__(self) -> None:
        for name in ("gigamacs", "up", "down"):
            if not 0 < getattr(self, name) < math.inf:
                raise FieldError(name, f"expected a number above 0, got {getattr(self, name)}")
        if slow := [tier for tier, speed in self.tiers.items() if not 0 < speed < math.inf]:
            raise FieldError("tiers", f"expected numbers above 0, got {self.tiers[slow[0]]} for {slow[0]!r}")
        if not 0 <= self.spread <= 3:
            raise FieldError("spread", f"expected a number from 0 to 3, got {self.spread}")

    def seconds(self, seed: int, device: str, tier: str | None, number: int, macs: float, moved: Traffic) -> float:
        """What the task of a device takes in a round; the same for the same arguments."""
        own = task_seed(seed, device)
        always, now = (np.random.default_rng(parts).standard_normal() for parts in ([own], [own, number]))
        speed = 1e9 * self.tiers.get(tier or "", self.gigamacs)
        luck = math.exp(self.spread * (always + now) / math.sqrt(2))
        return luck * (macs / speed + Link(1e6 * self.up, 1e6 * self.down).seconds(moved))


@dataclass(frozen=True)
class Played:
    """How a round went."""

    counted: tuple[int, ...]  # slots whose updates came in time
    seconds: float


def play(number: int, seed: int, rule: Participation, cohort: Cohort, seconds: Mapping[int, float]) -> Played:
    """Let the devices of a cohort answer after so many seconds, by slot, until the round closes."""
    opened = open_round(number, seed, rule, 0.0, lease=_LONG, offer=_LONG, max_task=_LONG)
    round, _ = advance(opened, DevicesAvailable(cohort=cohort), 0.0)
    for seat in cohort.seats:
        round, _ = advance(round, LeaseTaken(seat.member.device, seat.number), 0.0)
    last = 0.0
    for seat in sorted(cohort.seats, key=lambda seat: (seconds[seat.number], seat.number)):
        before, at = round, seconds[seat.number]
        round, _ = advance(before, UpdateArrived(seat.member.device, seat.number, 1), at)
        if round.state != "collecting":
            last = at if round.arrived > before.arrived else _end_of(before, last, at)
            break
        last = at
    if round.state != "closing":
        raise EmbraceError(f"round {number + 1} was abandoned: {round.reason or 'no quorum'}")
    return Played(tuple(seat.number for seat in round.counted), last)


def _end_of(round: Round, still: float, over: float) -> float:
    """Find when a round ended by time alone: it went on at `still`, and was over at `over`."""
    for _ in range(_HALVINGS):
        middle = (still + over) / 2
        goes_on = advance(round, Tick(), middle)[0].state == "collecting"
        still, over = (middle, over) if goes_on else (still, middle)
    return over
