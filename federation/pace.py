"""Pace steering: which devices may wait in a request for a task, and when the others come back.

Every device of a small fleet waits in a request. Of a large one so many wait as the next rounds take; each of the
others is told a time of its own. These times are spread evenly: a fleet that comes all at once comes back one by one,
not faster than the coordinator wants it, and fast enough that the next rounds find their devices.

Pure: the same arguments give the same time.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final

SOONEST: Final = 5.0  # seconds that a device is sent away at least
SPARE: Final = 1.1  # devices that wait for each seat of the next rounds: a few go, or cannot be used
PLENTY: Final = 2.0  # devices that come back for each seat, in the time of a round


@dataclass(frozen=True)
class Pace:
    """How a fleet is steered. `coordinator/settings.py` has the same names, and checks them."""

    long_polls: int = 1000  # devices that may wait in a request; a fleet of so many is never steered
    check_ins_per_second: float = 100.0  # of the devices that were told to come back, all together
    longest_away: float = 900.0  # seconds that a device is told, unless the rate above takes more


@dataclass(frozen=True)
class Crowd:
    """A fleet at a moment. Devices that were told to come back are there, and so are those at work."""

    there: int
    waiting: int  # of these, that would take a task at once
    seats: int = 0  # of the next round of every job
    demand: float = 0.0  # seats per second, by how long the rounds take


def seconds_away(
    pace: Pace, crowd: Crowd, device: str, now: float, *, is_needed: bool = False, is_useful: bool = True
) -> float | None:
    """Say for how long a device without a task goes away; None if it waits.

    `is_needed`: a round is short of devices and can use this one. `is_useful`: some job can use it, or there is none.

    >>> seconds_away(Pace(long_polls=1000), Crowd(there=1000, waiting=1000), "kitchen", 0.0) is None
    True
    >>> 5 <= seconds_away(Pace(long_polls=1000), Crowd(there=10_000, waiting=2000), "kitchen", 0.0) <= 905
    True
    """
    if crowd.there <= pace.long_polls or is_needed:
        return None
    if is_useful and crowd.waiting <= max(pace.long_polls, math.ceil(SPARE * crowd.seats)):
        return None
    return SOONEST + 2 * mean_seconds(pace, crowd) * _share(device, now)


def mean_seconds(pace: Pace, crowd: Crowd) -> float:
    """Say how long devices are away on average: as long as the rounds allow, so that they ask seldom."""
    by_rounds = crowd.there / (PLENTY * crowd.demand) if crowd.demand else math.inf
    return max(crowd.there / pace.check_ins_per_second, min(by_rounds, pace.longest_away / 2))


def longest_seconds(pace: Pace, there: int) -> float:
    """Say after how long all devices are back that were told a time; those that were told another are not needed."""
    return SOONEST + max(2 * there / pace.check_ins_per_second, pace.longest_away)


def _share(device: str, now: float) -> float:
    """A number in [0, 1) that differs from device to device, and from one time to the next."""
    digest = hashlib.sha256(f"embrace pace {now!r} {device}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)
