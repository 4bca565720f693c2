"""All seats of a round, as one value that knows what follows from them: a fact about one seat costs no look at others.

A round of n devices has about 3 n facts. Counting, searching and checking all seats for each of them would make its
cost grow with n²; here `put` carries over what was known and corrects it by the one seat that changed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import chain

from federation.cohort import Seat
from federation.errors import InputError


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
        made._ends = min(self._ends, seat.until if seat.running else math.inf)
        made._watched = self._watched
        for known, value in (
            ("arrived", self.arrived + _arrived(seat) - _arrived(before)),
            ("free", self.free + seat.free - before.free),
        ):
            made.__dict__[known] = value
        if (before.free, before.member.device) == (seat.free, seat.member.device):
            made.__dict__["_numbers"] = self._numbers
        if before.state != "arrived":  # an update that has arrived stays
            made.__dict__["durations"] = _inserted(self.durations, seat)
        return made

    @cached_property
    def arrived(self) -> int:
        """Draws that were answered: an update that counts twice is two of them."""
        return sum(map(_arrived, self))

    @cached_property
    def free(self) -> int:
        """Seats that a device may take over."""
        return sum(seat.free for seat in self)

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """Seconds of all tasks that were answered, in order."""
        return tuple(sorted(seat.seconds for seat in self if seat.state == "arrived" and seat.seconds is not None))

    def of(self, device: str) -> Seat | None:
        """Find what a device is offered, holds or has answered; never more than one."""
        number = self._numbers.get(device)
        return None if number is None else self[number]

    def over(self, now: float) -> list[Seat]:
        """List the seats whose offer or lease has run out."""
        if now < self._ends:
            return []
        found = [seat for seat in self if seat.running and seat.until <= now]
        if not found:
            self._ends = min((seat.until for seat in self if seat.running), default=math.inf)
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
    _ends: float = -math.inf  # no offer and no lease runs out before
    _watched: int = 0


def _arrived(seat: Seat) -> int:
    return seat.count if seat.state == "arrived" else 0


def _inserted(durations: tuple[float, ...], seat: Seat) -> tuple[float, ...]:
    if seat.state != "arrived" or seat.seconds is None:
        return durations
    place = bisect_left(durations, seat.seconds)
    return (*durations[:place], seat.seconds, *durations[place:])
