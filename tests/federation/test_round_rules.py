"""The rules of a round one by one: offers, leases, deadlines, quorums, outages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.cohort import (
    AcceptUpdate,
    AlreadyAccepted,
    Cohort,
    GrantLease,
    LeaseTaken,
    OfferTask,
    RefuseLease,
    RejectUpdate,
    Seat,
    TaskReturned,
    UpdateArrived,
)
from federation.errors import InputError
from federation.rounds import (
    Abandon,
    CloseRequested,
    CloseRound,
    Committed,
    DevicesAvailable,
    DevicesLeft,
    Resumed,
    RoundAbandoned,
    Stop,
    Tick,
    WaitForDevices,
    WaitForUpdates,
    WarnLayerUncovered,
    advance,
)
from tests.federation.round_examples import EXAMPLES, LEASE, OFFER, closing, cohort, collecting, member, opened, run


def test_a_whole_round() -> None:
    round, effects = advance(opened(), DevicesAvailable(cohort=cohort("abc", 3, 2)), 1.0)
    assert round.state == "collecting"
    assert effects == tuple(OfferTask(seat) for seat in round.slots)
    assert round.wakes_at == 1.0 + OFFER
    round, (granted,) = advance(round, LeaseTaken("b", 1), 2.0)
    assert granted == GrantLease(round.slots[1])
    assert round.seat_of("b") == Seat(1, member("b"), 1, "leased", 2.0 + LEASE, ("b",))
    round, _ = run(round, (LeaseTaken("a", 0), 2.0), (LeaseTaken("c", 2), 2.0))
    round, effects = advance(round, UpdateArrived("c", 2, 1), 3.0)
    assert effects == (AcceptUpdate(round.slots[2]),)
    round, _ = advance(round, UpdateArrived("a", 0, 1), 4.0)
    round, effects = advance(round, UpdateArrived("b", 1, 1), 5.0)
    assert effects == (AcceptUpdate(round.slots[1]), CloseRound(round.slots))  # in the order of slots
    assert (round.state, round.wakes_at) == ("closing", None)
    round, effects = advance(round, Committed(), 6.0)
    assert (round.state, effects) == ("committed", ())
    assert advance(round, Committed(), 7.0) == (round, ())  # said again after a restart


def test_too_few_devices_are_waited_for_and_uncovered_layers_told() -> None:
    round, effects = advance(opened(), DevicesAvailable(cohort=Cohort(missing=2)), 0.0)
    assert (round, effects) == (opened(), (WaitForDevices(2),))
    assert advance(round, DevicesAvailable((member("a"),)), 0.0) == (round, ())
    round, effects = advance(round, DevicesAvailable(cohort=cohort("a", 1, 1, uncovered=("stem",))), 1.0)
    assert effects == (WarnLayerUncovered(("stem",)), OfferTask(round.slots[0]))


def test_an_offer_that_nobody_comes_for_goes_to_another() -> None:
    round, _ = advance(opened(), DevicesAvailable(cohort=cohort("ab", 2, 1)), 0.0)
    round, effects = advance(round, Tick(), OFFER)
    assert effects == (WaitForDevices(2),)
    round, effects = advance(round, DevicesAvailable((member("c"), member("a"))), 11.0)
    assert [effect.seat.member.device for effect in effects if isinstance(effect, OfferTask)] == ["c", "a"]
    assert advance(round, LeaseTaken("b", 0), 12.0)[1] == (RefuseLease("b", "not_yours"),)
    round, _ = advance(round, LeaseTaken("c", 0), 12.0)
    assert round.slots[0].holders == ("c",)  # an offer that was not taken is no attempt


def test_an_expired_lease_is_handed_out_again_and_its_update_comes_too_late() -> None:
    round = collecting()
    round, effects = advance(round, UpdateArrived("a", 0, 1), LEASE)  # nobody looked at the clock before
    assert effects == (WaitForDevices(3), RejectUpdate("a", "expired"))
    round, effects = advance(round, DevicesAvailable((member("d"),)), LEASE)
    assert effects == (OfferTask(round.slots[0]),)
    round, _ = advance(round, LeaseTaken("d", 0), LEASE)
    assert advance(round, UpdateArrived("a", 0, 1), LEASE)[1] == (RejectUpdate("a", "late"),)
    assert advance(round, UpdateArrived("d", 0, 1), LEASE)[1] == (RejectUpdate("d", "not_yours"),)
    round, effects = advance(round, UpdateArrived("d", 0, 2), LEASE + 1)
    assert effects == (AcceptUpdate(round.slots[0]),)
    assert advance(round, UpdateArrived("a", 0, 1), LEASE + 1)[1] == (RejectUpdate("a", "late"),)


def test_a_repeated_upload_is_acknowledged_and_counted_once() -> None:
    round, _ = advance(collecting(), UpdateArrived("a", 0, 1), 1.0)
    again, effects = advance(round, UpdateArrived("a", 0, 1), 2.0)
    assert (again, effects) == (round, (AlreadyAccepted(round.slots[0]),))
    done = EXAMPLES["committed"]
    assert advance(done, UpdateArrived("a", 0, 1), 9.0) == (done, (AlreadyAccepted(done.slots[0]),))


@pytest.mark.parametrize("slot", [-1, 3, 10**9])
def test_slots_that_do_not_exist_are_not_yours(slot: int) -> None:
    round = collecting()
    assert advance(round, LeaseTaken("a", slot), 1.0) == (round, (RefuseLease("a", "not_yours"),))
    assert advance(round, UpdateArrived("a", slot, 1), 1.0) == (round, (RejectUpdate("a", "not_yours"),))
    assert advance(round, TaskReturned("a", slot, 1), 1.0) == (round, ())


def test_a_failed_task_is_free_for_another() -> None:
    round, effects = advance(collecting(), TaskReturned("b", 1, 1), 1.0)
    assert (round.slots[1].state, effects) == ("failed", (WaitForDevices(1),))
    assert advance(round, TaskReturned("b", 1, 1), 1.0) == (round, ())
    assert advance(round, UpdateArrived("b", 1, 1), 1.0)[1] == (RejectUpdate("b", "expired"),)
    assert advance(round, DevicesAvailable((member("b"),)), 2.0) == (round, ())  # not at once again
    round, _ = advance(round, DevicesAvailable((member("b"), member("d"))), 2.0)
    assert round.slots[1].member.device == "d"


def test_who_leaves_frees_its_slot_unless_it_has_answered() -> None:
    round, _ = advance(collecting(), UpdateArrived("a", 0, 1), 1.0)
    round, effects = advance(round, DevicesLeft(("a", "b", "x")), 2.0)
    assert [seat.state for seat in round.slots] == ["arrived", "expired", "leased"]
    assert effects == (WaitForDevices(1),)


def test_the_first_that_are_wanted_count() -> None:
    round = collecting("abcde", wanted=2, quorum=2)
    round, effects = run(round, (UpdateArrived("e", 4, 1), 1.0), (UpdateArrived("b", 1, 1), 2.0))
    assert effects[-1] == CloseRound((round.slots[1], round.slots[4]))
    assert advance(round, UpdateArrived("a", 0, 1), 3.0) == (round, (RejectUpdate("a", "round_closed"),))
    assert advance(round, LeaseTaken("a", 0), 3.0) == (round, (RefuseLease("a", "round_closed"),))
    assert advance(round, UpdateArrived("x", 0, 1), 3.0) == (round, (RejectUpdate("x", "not_yours"),))


def test_an_update_that_counts_twice_is_two_of_the_wanted() -> None:
    drawn = Cohort((Seat(0, member("a"), 2), Seat(1, member("b"))), 3, 2)
    round, _ = run(opened(deadline=20.0), (DevicesAvailable(cohort=drawn), 0.0), (LeaseTaken("a", 0), 0.0))
    round, _ = advance(round, UpdateArrived("a", 0, 1), 1.0)
    assert (round.state, round.arrived) == ("collecting", 2)
    assert advance(round, Tick(), 20.0)[0].state == "closing"


def test_at_the_deadline_a_quorum_is_enough() -> None:
    round = collecting(deadline=20.0)
    round, _ = run(round, (UpdateArrived("a", 0, 1), 1.0), (UpdateArrived("c", 2, 1), 2.0), (Tick(), 19.9))
    assert (round.state, round.wakes_at) == ("collecting", 20.0)
    closed, effects = advance(round, Tick(), 20.0)
    assert effects == (CloseRound((closed.slots[0], closed.slots[2])),)
    late, effects = advance(round, UpdateArrived("b", 1, 1), 20.0)  # no tick in between: the same
    assert late == closed
    assert effects[-1] == RejectUpdate("b", "round_closed")


def test_without_a_quorum_the_deadline_is_told_once_and_waited_through() -> None:
    round, effects = run(collecting(deadline=20.0), (UpdateArrived("a", 0, 1), 1.0), (Tick(), 20.0), (Tick(), 21.0))
    assert (round.state, round.overdue) == ("collecting", True)
    assert effects.count(WaitForUpdates(1)) == 1
    assert round.wakes_at == LEASE
    round, effects = advance(round, UpdateArrived("b", 1, 1), 25.0)
    assert effects == (AcceptUpdate(round.slots[1]), CloseRound(round.slots[:2]))


def test_or_the_round_is_given_up_as_the_rule_says() -> None:
    round = collecting(deadline=20.0, on_missing_quorum="fail")
    round, effects = run(round, (UpdateArrived("a", 0, 1), 1.0), (Tick(), 20.0))
    assert (round.state, round.reason) == ("abandoned", "1 of 2 at the deadline")
    assert effects[-1] == RoundAbandoned("1 of 2 at the deadline")


def test_asked_to_close_it_does_so_as_at_its_deadline() -> None:
    round, _ = run(collecting(), (UpdateArrived("a", 0, 1), 1.0), (CloseRequested(), 2.0))
    assert (round.state, round.overdue) == ("collecting", True)
    round, effects = advance(round, UpdateArrived("b", 1, 1), 3.0)
    assert effects[-1] == CloseRound(round.slots[:2])


def test_stop_gives_up_what_is_collected_and_lets_end_what_is_closing() -> None:
    round, effects = advance(collecting(), Stop(), 1.0)
    assert (round.state, effects) == ("abandoned", (RoundAbandoned("the job was stopped"),))
    assert advance(round, Abandon("later"), 2.0) == (round, ())  # the first reason stays
    round, effects = advance(closing(), Stop(), 2.0)
    assert (round, effects) == (closing(), ())
    assert advance(round, Committed(), 3.0)[0].state == "committed"


def test_an_outage_is_held_against_nobody() -> None:
    round = collecting(deadline=40.0)
    round, effects = advance(round, Resumed(1000.0), 1020.0)
    assert effects == ()
    assert (round.slots[0].until, round.deadline) == (LEASE + 1000.0, 1040.0)
    assert advance(round, UpdateArrived("a", 0, 1), 1025.0)[1] == (
        AcceptUpdate(replace(round.slots[0], state="arrived")),
    )
    with pytest.raises(InputError, match="outage: expected seconds from 0, got -1"):
        Resumed(-1.0)


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_time_is_a_number(now: float) -> None:
    with pytest.raises(InputError, match="now: expected a finite time"):
        advance(opened(), Tick(), now)
