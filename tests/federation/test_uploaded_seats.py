"""Updates that were uploaded and are not checked: they hold their seats, do not count, and a round waits for them."""

from __future__ import annotations

import pytest

from federation.cohort import (
    CHECK,
    AcceptUpdate,
    AlreadyAccepted,
    HoldUpdate,
    LeaseRenewed,
    LeaseTaken,
    RefuseLease,
    RejectUpdate,
    TaskReturned,
    UpdateArrived,
    UpdateChecked,
    UpdateUploaded,
)
from federation.rounds import (
    CloseRequested,
    CloseRound,
    DevicesAvailable,
    DevicesLeft,
    Resumed,
    Stop,
    Tick,
    WaitForDevices,
    advance,
)
from tests.federation.round_examples import LEASE, collecting, member, run


def test_it_counts_once_it_is_found_sound() -> None:
    round, effects = advance(collecting(), UpdateUploaded("a", 0, 1), 2.0)
    assert effects == (HoldUpdate(round.slots[0]),)
    assert (round.slots[0].state, round.slots[0].seconds, round.arrived, round.usual) == ("uploaded", 2.0, 0, None)
    round, effects = advance(round, UpdateChecked("a", 0, 1, sound=True), 9.0)
    assert effects == (AcceptUpdate(round.slots[0]),)
    assert (round.slots[0].state, round.slots[0].seconds, round.arrived, round.usual) == ("arrived", 2.0, 1, 2.0)
    assert advance(round, UpdateChecked("a", 0, 1, sound=True), 10.0) == (round, (AlreadyAccepted(round.slots[0]),))
    assert advance(round, UpdateChecked("a", 0, 1, sound=False), 10.0) == (round, ())


def test_an_unsound_one_frees_its_seat() -> None:
    round, _ = advance(collecting(), UpdateUploaded("a", 0, 1), 2.0)
    round, effects = advance(round, UpdateChecked("a", 0, 1, sound=False), 3.0)
    assert effects == (WaitForDevices(1),)
    assert (round.slots[0].state, round.slots[0].seconds, round.slots.uploaded) == ("failed", None, 0)
    assert advance(round, UpdateChecked("a", 0, 1, sound=True), 4.0) == (round, (RejectUpdate("a", "late"),))
    round, _ = run(round, (DevicesAvailable((member("d"),)), 4.0), (LeaseTaken("d", 0), 4.0))
    round, effects = advance(round, UpdateArrived("d", 0, 2), 5.0)
    assert effects == (AcceptUpdate(round.slots[0]),)


def test_its_seat_is_taken_and_does_not_run_out_with_its_lease() -> None:
    round, _ = advance(collecting(), UpdateUploaded("a", 0, 1), 2.0)
    held = round.slots[0]
    round, _ = run(round, (Tick(), 10 * LEASE), (DevicesAvailable((member("d"),)), 10 * LEASE))
    assert round.slots[0] == held and round.seat_of("a") == held
    for fact, answer in (
        (LeaseTaken("a", 0), RefuseLease("a", "duplicate")),
        (LeaseRenewed("a", 0, 1), RefuseLease("a", "duplicate")),
        (UpdateArrived("a", 0, 1), AlreadyAccepted(held)),
        (UpdateUploaded("a", 0, 1), AlreadyAccepted(held)),
        (UpdateUploaded("b", 0, 1), RejectUpdate("b", "not_yours")),
    ):
        assert advance(round, fact, 10 * LEASE) == (round, (answer,))
    assert advance(round, TaskReturned("a", 0, 1), 10 * LEASE) == (round, ())


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("why", ["deadline", "asked", "late"])
def test_a_round_that_could_close_waits_for_the_verdict(why: str, sound: bool) -> None:
    constants = {"deadline": 10.0} if why == "deadline" else {}
    round, _ = run(
        collecting(quorum=2, **constants),
        (UpdateArrived("a", 0, 1), 1.0),
        (UpdateArrived("b", 1, 1), 1.0),
        (UpdateUploaded("c", 2, 1), 2.0),
    )
    if why == "asked":
        round, _ = advance(round, CloseRequested(), 3.0)
    assert not round.is_due(LEASE - 1) and not round.is_late(LEASE - 1)
    round, _ = advance(round, Tick(), LEASE - 1)
    assert round.state == "collecting"
    round, effects = advance(round, UpdateChecked("c", 2, 1, sound), LEASE - 1)
    assert round.state == "closing" and CloseRound(round.counted) in effects
    assert len(round.counted) == 2 + sound


def test_one_that_fails_at_the_deadline_waits_for_the_verdict() -> None:
    round, _ = run(
        collecting(quorum=1, deadline=10.0, on_missing_quorum="fail"), (UpdateUploaded("c", 2, 1), 2.0), (Tick(), 11.0)
    )
    assert round.state == "collecting"
    assert advance(round, UpdateChecked("c", 2, 1, sound=True), 12.0)[0].state == "closing"
    assert advance(round, UpdateChecked("c", 2, 1, sound=False), 12.0)[0].state == "abandoned"


def test_a_round_that_is_complete_or_stopped_does_not_wait() -> None:
    round, _ = run(collecting("abc", wanted=2), (UpdateUploaded("c", 2, 1), 1.0), (UpdateArrived("a", 0, 1), 1.0))
    round, _ = advance(round, UpdateArrived("b", 1, 1), 2.0)
    assert round.state == "closing"
    for sound, answer in ((True, (RejectUpdate("c", "round_closed"),)), (False, ())):
        assert advance(round, UpdateChecked("c", 2, 1, sound), 3.0) == (round, answer)
    stopped, _ = run(collecting(), (UpdateUploaded("c", 2, 1), 1.0), (Stop(), 1.0))
    assert advance(stopped, UpdateChecked("c", 2, 1, sound=True), 3.0)[1] == (RejectUpdate("c", "round_closed"),)


@pytest.mark.parametrize("why", ["deadline", "asked", "late"])
def test_a_round_waits_for_a_verdict_that_never_comes_for_a_bounded_time(why: str) -> None:
    round, _ = run(
        collecting("ab", 2, 1, **({"deadline": 60.0} if why == "deadline" else {})),
        (UpdateArrived("a", 0, 1), 1.0),
        (UpdateUploaded("b", 1, 1), 2.0),
    )
    if why == "asked":
        round, _ = advance(round, CloseRequested(), 3.0)
    ends = 2.0 + CHECK
    assert not round.is_due(ends - 1) and advance(round, Tick(), ends - 1)[0].state == "collecting"
    assert round.is_due(ends)
    round, effects = run(round, (Tick(), ends), (Tick(), ends + 1))  # a moment in which another device could take it
    assert round.state == "closing" and CloseRound(round.counted) in effects
    assert advance(round, UpdateChecked("b", 1, 1, sound=True), ends + 2)[1] == (RejectUpdate("b", "late"),)


def test_uploads_after_the_deadline_do_not_prolong_the_wait() -> None:
    facts = (UpdateArrived("a", 0, 1), 1.0), (UpdateUploaded("b", 1, 1), 2.0), (CloseRequested(), 3.0)
    round, _ = run(collecting("abc", 3, 1), *facts, (UpdateUploaded("c", 2, 1), LEASE - 1))
    assert not round.is_due(2.0 + CHECK - 1) and round.slots[2].until > 3.0 + CHECK
    round, _ = advance(round, Tick(), 2.0 + CHECK)
    assert (round.state, round.slots[1].state) == ("collecting", "expired")
    assert round.is_due(3.0 + CHECK) and advance(round, Tick(), 3.0 + CHECK)[0].state == "closing"


def test_a_seat_that_was_not_checked_in_time_goes_to_another_device() -> None:
    round, _ = run(collecting(), (UpdateUploaded("a", 0, 1), 2.0), (DevicesLeft(("a",)), 3.0))
    assert round.slots[0].state == "uploaded", "its device need not be there"
    round, _ = advance(round, DevicesAvailable((member("d"),)), 2.0 + CHECK)
    assert (round.slots[0].state, round.slots[0].member.device) == ("offered", "d")
    assert round.slots[0].seconds is None
    round, _ = advance(round, LeaseTaken("d", 0), 3.0 + CHECK)
    for sound in (True, False):
        assert advance(round, UpdateChecked("a", 0, 1, sound), 4.0 + CHECK)[0] == round


def test_a_restart_does_not_prolong_the_time_for_a_check() -> None:
    round, _ = run(collecting(), (UpdateUploaded("a", 0, 1), 2.0), (Resumed(100.0), 202.0), (Resumed(0.0), 300.0))
    assert round.slots[0].until == 2.0 + 100.0 + CHECK
