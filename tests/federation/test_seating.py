"""The cost of a round grows with its devices, not with their square; that answers are the same: test_any_round.py."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.cohort import Cohort, LeaseTaken, Member, Seat, UpdateArrived
from federation.errors import InputError
from federation.rounds import DevicesAvailable, Round, advance
from federation.seating import Seats
from tests.federation.round_examples import opened

DEVICES = 300


def test_every_fact_about_a_seat_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()

    def counted(kind: type[Any], name: str) -> None:
        found = vars(kind)[name]
        original = found.fget if isinstance(found, property) else found

        def call(*given: Any) -> Any:
            looks[name] += 1
            return original(*given)

        monkeypatch.setattr(kind, name, property(call) if isinstance(found, property) else call)

    counted(Round, "_ends_at")
    counted(Seat, "free")
    counted(Seat, "running")
    seats = tuple(Seat(n, Member(f"device {n}", "stem", 3)) for n in range(DEVICES))
    round, _ = advance(opened(), DevicesAvailable(cohort=Cohort(seats, DEVICES, DEVICES // 2)), 0.0)
    for n in range(DEVICES):
        assert round.seat_of(f"device {n}") is round.slots[n]
        round, _ = advance(round, LeaseTaken(f"device {n}", n), 1.0 + n / DEVICES)
    for n in reversed(range(DEVICES)):
        assert not round.is_due(3.0)
        round, _ = advance(round, UpdateArrived(f"device {n}", n, 1), 3.0 - n / DEVICES)
    assert round.state == "closing" and len(round.counted) == DEVICES
    assert all(count < 20 * DEVICES for count in looks.values()), looks


def test_seats_are_numbered_in_their_order() -> None:
    one, other = Seat(0, Member("a", "stem", 3)), Seat(1, Member("b", "stem", 3))
    assert Seats([one, other]) == (one, other)
    with pytest.raises(InputError, match="numbers from 0"):
        Seats([other, one])


@given(st.data())
def test_what_is_carried_over_is_what_is_found_anew(data: st.DataObject) -> None:
    """Devices of any speed and with any work come to any seat, in any state."""
    some = st.sampled_from([None, 1.0, 2.0, 2.0, 50.0])

    def any_seat(number: int) -> Seat:
        member = Member(data.draw(st.sampled_from("abc")), "stem", 3, data.draw(some), data.draw(some) or 3.0)
        state = data.draw(st.sampled_from(["offered", "leased", "arrived", "expired", "failed"]))
        seconds = data.draw(some) if state == "arrived" else None
        return Seat(number, member, 1, state, 9.0, (member.device,), seconds=seconds)

    seats = Seats(map(any_seat, range(4)))
    for _ in range(6):
        seats = seats.put(any_seat(data.draw(st.integers(0, 3))))
        anew = Seats(list(seats))
        assert (seats.durations, seats.works) == (anew.durations, anew.works)
        assert seats.usual_seconds == (statistics.median(anew.durations) if anew.durations else None)
