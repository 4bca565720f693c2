"""All seats of a round, as one value that knows what follows from them: a fact about one seat costs no look at others.

A round of n devices has about 3 n facts. Counting, searching and checking all seats for each of them would make its
cost grow with n²; here `put` carries over what was known and corrects it by the one seat that changed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, reduce
from itertools import chain

from federation.cohort import Member, Seat
from federation.errors import InputError

FEW = 16  # seats that are replaced one by one; more of them at once, and what follows from all is computed anew
MOST_WORK = 100.0  # times as much as another: what a task takes follows from it only roughly


class Seats(tuple[Seat, ...]):
    """A tuple of seats, numbered from 0. What is known of them is computed once and never changes.

    >>> from federation.cohort import Member
    >>> seats = Seats([Seat(0, Member("a", "stem", 3)), Seat(1, Member("b", "stem", 3))])
    >>> seats.of("b").number, seats.arrived
    (1, 0)
    """

    def __new__(cls, seats: Iterable[Seat] = ()) -> Seats:
        if isinstance(seats, Seats):
            return seats
        made = super().__new__(cls, seats)
        if any(seat.number != number for number, seat in enumerate(made)):
            raise InputError("the seats of a round: expected numbers from 0 in their order")
        return made

    def put(self, seat: Seat) -> Seats:
        """Replace the seat of the same number."""
        before, changed = self[seat.number], list(self)
        changed[seat.number] = seat
        made = tuple.__new__(Seats, changed)
        made._ends = min(self._ends, seat.until if seat.runs_out else math.inf)
        made._watched = self._watched
        for known, value in (
            ("arrived", self.arrived + _arrived(seat) - _arrived(before)),
            ("free", self.free + seat.free - before.free),
            ("uploaded", self.uploaded + (seat.state == "uploaded") - (before.state == "uploaded")),
        ):
            made.__dict__[known] = value
        if (before.free, before.member.device) == (seat.free, seat.member.device):
            made.__dict__["_numbers"] = self._numbers
        made.__dict__["durations"] = _exchanged(self.durations, _seconds(before), _seconds(seat))
        made.__dict__["works"] = _exchanged(self.works, before.member.work, seat.member.work)
        return made

    def put_all(self, seats: Collection[Seat]) -> Seats:
        """Replace the seats of the same numbers."""
        if len(seats) <= FEW:
            return reduce(Seats.put, seats, self)
        new = {seat.number: seat for seat in seats}
        return Seats(new.get(seat.number, seat) for seat in self)

    @cached_property
    def arrived(self) -> int:
        """Draws that were answered: an update that counts twice is two of them."""
        return sum(map(_arrived, self))

    @cached_property
    def free(self) -> int:
        """Seats that a device may take over."""
        return sum(seat.free for seat in self)

    @cached_property
    def uploaded(self) -> int:
        """Seats whose updates are not checked yet."""
        return sum(seat.state == "uploaded" for seat in self)

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """Seconds of all tasks that were answered, and those that the other devices took before, in order."""
        return tuple(sorted(seconds for seconds in map(_seconds, self) if seconds is not None))

    @cached_property
    def works(self) -> tuple[float, ...]:
        """What the devices have to do, in order."""
        return tuple(sorted(seat.member.work for seat in self))

    @property
    def usual_seconds(self) -> float | None:
        return _median(self.durations) if self.durations else None

    def share_of_work(self, member: Member) -> float:
        """Compare what a device has to do with what is usual; if it is not known what it takes, with the least.

        A device that trains the whole model is not late because those that train a little of it have finished.
        """
        other = self.works[0] if member.seconds is None else _median(self.works)
        return min(max(1.0, member.work / other), MOST_WORK)

    def most_work(self, member: Member) -> float:
        """Compare what the device with the most to do has with what another has."""
        return min(max(1.0, self.works[-1] / member.work), MOST_WORK)

    def of(self, device: str) -> Seat | None:
        """Find what a device is offered, holds or has answered; never more than one."""
        number = self._numbers.get(device)
        return None if number is None else self[number]

    def over(self, now: float) -> list[Seat]:
        """List the seats whose offer, lease or check has run out."""
        if now < self._ends:
            return []
        found = [seat for seat in self if seat.is_over(now)]
        if not found:
            self._ends = min((seat.until for seat in self if seat.runs_out), default=math.inf)
        return found

    def all_answered_or(self, late: Callable[[Seat], bool]) -> bool:
        """Whether every seat was answered or is late: the one that was not when last asked is looked at first."""
        first = self._watched
        for number in chain(range(first, len(self)), range(first)):
            if self[number].state != "arrived" and not late(self[number]):
                self._watched = number
                return False
        return True

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {seat.member.device: seat.number for seat in self if not seat.free}

    # Hints, which save time and change no answer.
    _ends: float = -math.inf  # no offer, lease or check runs out before
    _watched: int = 0


def _arrived(seat: Seat) -> int:
    return seat.count if seat.state == "arrived" else 0


def _seconds(seat: Seat) -> float | None:
    return seat.seconds if seat.state == "arrived" else seat.member.seconds


def _median(values: tuple[float, ...]) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _exchanged(values: tuple[float, ...], old: float | None, new: float | None) -> tuple[float, ...]:
    """Take a value out of sorted ones, and put another in."""
    if old == new:
        return values
    if old is not None:
        place = bisect_left(values, old)
        values = values[:place] + values[place + 1 :]
    if new is not None:
        place = bisect_left(values, new)
        values = (*values[:place], new, *values[place:])
    return values
