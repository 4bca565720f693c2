"""The rules of a round one by one: offers, leases, deadlines, quorums, outages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from federation.axes.participate import Participation
from federation.cohort import (
    AcceptUpdate,
    AlreadyAccepted,
    Cohort,
    GrantLease,
    LeaseRenewed,
    LeaseTaken,
    OfferTask,
    RefuseLease,
    RejectUpdate,
    RenewLease,
    Seat,
    TaskReturned,
    UpdateArrived,
)
from federation.errors import InputError
from federation.rounds import (
    LEAST_DEADLINE,
    LEAST_STUCK,
    MAX_TASK,
    MOST_TRIES,
    OVERDUE,
    STUCK,
    VACANT,
    Abandon,
    CloseFailed,
    CloseRequested,
    CloseRound,
    Committed,
    DevicesAvailable,
    DevicesLeft,
    Event,
    Resumed,
    Round,
    RoundAbandoned,
    Stop,
    Tick,
    WaitForDevices,
    WaitForUpdates,
    WarnLayerUncovered,
    advance,
    decode,
    open_round,
)
from federation.seating import MOST_WORK
from tests.federation.round_examples import (
    EXAMPLES,
    LEASE,
    OFFER,
    closing,
    cohort,
    collecting,
    encoded,
    late_at,
    member,
    opened,
    run,
    wakes_at,
)


def test_a_whole_round() -> None:
    round, effects = advance(opened(), DevicesAvailable(cohort=cohort("abc", 3, 2)), 1.0)
    assert round.state == "collecting"
    assert effects == tuple(OfferTask(seat) for seat in round.slots)
    assert wakes_at(round) == 1.0 + OFFER
    round, (granted,) = advance(round, LeaseTaken("b", 1), 2.0)
    assert granted == GrantLease(round.slots[1])
    assert round.seat_of("b") == Seat(1, member("b"), 1, "leased", 2.0 + LEASE, ("b",), 2.0, began=2.0)
    round, _ = run(round, (LeaseTaken("a", 0), 2.0), (LeaseTaken("c", 2), 2.0))
    round, effects = advance(round, UpdateArrived("c", 2, 1), 3.0)
    assert effects == (AcceptUpdate(round.slots[2]),)
    round, _ = advance(round, UpdateArrived("a", 0, 1), 4.0)
    round, effects = advance(round, UpdateArrived("b", 1, 1), 5.0)
    assert effects == (AcceptUpdate(round.slots[1]), CloseRound(round.slots))  # in the order of slots
    assert (round.state, wakes_at(round)) == ("closing", None)
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
    same, _ = advance(round, DevicesAvailable((member("b"),)), 2.0)  # whether it may is the coordinator's to say
    assert same.slots[1].state == "offered"
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
    assert (round.state, wakes_at(round)) == ("collecting", 20.0)
    closed, effects = advance(round, Tick(), 20.0)
    assert effects == (CloseRound((closed.slots[0], closed.slots[2])),)
    late, effects = advance(round, UpdateArrived("b", 1, 1), 20.0)  # no tick in between: the same
    assert late == closed
    assert effects[-1] == RejectUpdate("b", "round_closed")


def test_without_a_quorum_the_deadline_is_told_once_and_waited_through() -> None:
    round, effects = run(collecting(deadline=20.0), (UpdateArrived("a", 0, 1), 1.0), (Tick(), 20.0), (Tick(), 21.0))
    assert (round.state, round.overdue) == ("collecting", True)
    assert effects.count(WaitForUpdates(1)) == 1
    assert wakes_at(round) == LEASE
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


def test_a_renewed_lease_lasts_and_one_that_is_not_runs_out() -> None:
    round, effects = run(collecting(), (LeaseRenewed("a", 0, 1), 20.0), (LeaseRenewed("a", 0, 1), 45.0))
    assert effects == [
        RenewLease(replace(round.slots[0], until=20.0 + LEASE)),
        WaitForDevices(2),
        RenewLease(round.slots[0]),
    ]
    assert [(seat.state, seat.until) for seat in round.slots[:2]] == [("leased", 45.0 + LEASE), ("expired", LEASE)]
    assert advance(round, LeaseRenewed("b", 1, 1), 46.0)[1] == (RefuseLease("b", "expired"),)
    assert advance(closing(), LeaseRenewed("a", 0, 1), 2.0)[1] == (RefuseLease("a", "round_closed"),)


def test_with_a_quorum_a_round_closes_when_the_rest_is_late() -> None:
    """Two took 6 and 8 seconds, 7 by the median: the third is late after 21 of its own."""
    round = collecting("abc", wanted=3, quorum=2)
    round, _ = run(round, (UpdateArrived("a", 0, 1), 6.0))
    assert late_at(round) is None, "there is no quorum"
    round, _ = advance(round, UpdateArrived("b", 1, 1), 8.0)
    assert (round.usual, late_at(round), wakes_at(round)) == (7.0, 21.0, 21.0)
    assert advance(round, Tick(), 20.9)[0].state == "collecting"
    closed, effects = advance(round, Tick(), 21.0)
    assert effects == (CloseRound(closed.counted),) and closed.arrived == 2
    in_time, _ = advance(round, UpdateArrived("c", 2, 1), 20.9)
    assert in_time.arrived == 3


def test_a_device_that_returns_its_task_again_and_again_gains_no_time() -> None:
    """Two took 6 seconds: the third is late after 18, though it takes its task anew each second."""
    round = collecting("abc", wanted=3, quorum=2)
    round, _ = run(round, (UpdateArrived("a", 0, 1), 6.0), (UpdateArrived("b", 1, 1), 6.0))
    now = 6.0
    while round.state == "collecting" and now < 100.0:
        held = len(round.slots[2].holders)
        round, _ = run(
            round,
            (TaskReturned("c", 2, held), now),
            (DevicesAvailable((member("c"),)), now + 0.1),
            (LeaseTaken("c", 2), now + 0.1),
        )
        now += 1.0
    assert round.state == "closing" and now == 19.0
    another, _ = run(
        collecting("abc", 3, 2),
        (UpdateArrived("a", 0, 1), 6.0),
        (UpdateArrived("b", 1, 1), 6.0),
        (TaskReturned("c", 2, 1), 10.0),
        (DevicesAvailable((member("d"),)), 10.0),
        (LeaseTaken("d", 2), 10.0),
    )
    assert late_at(another) == 28.0, "another device has its own time"


def beating(round: Round, now: float, until: float, *spare: str) -> tuple[Round, float]:
    """Let the device of the last seat beat while others wait, until it loses its seat."""
    last = round.slots[-1]
    while round.slots[-1].holders == last.holders and round.slots[-1].state == "leased" and now < until:
        now += 10.0
        round, _ = run(
            round,
            (LeaseRenewed(last.member.device, last.number, len(last.holders)), now),
            (DevicesAvailable(tuple(map(member, spare))), now),
        )
    return round, now


@pytest.mark.parametrize(
    ("own", "rule", "taken_at"),
    [(None, {}, 60.0), (2.0, {}, 60.0), (40.0, {}, 160.0), (None, {"deadline": 200.0}, 200.0)],
)
def test_a_device_that_only_beats_loses_its_seat_to_one_that_waits(
    own: float | None, rule: dict[str, float], taken_at: float
) -> None:
    drawn = Cohort((Seat(0, member("a")), Seat(1, replace(member("b"), seconds=own))), 2, 2)
    facts = (DevicesAvailable(cohort=drawn), LeaseTaken("a", 0), LeaseTaken("b", 1), UpdateArrived("a", 0, 1))
    round, _ = run(opened(**rule), *((fact, 0.0) for fact in facts))
    alone, now = beating(round, 0.0, 500.0)
    assert (now, alone.slots[1].state) == (500.0, "leased"), "it may answer yet, and no other device would"
    round, now = beating(round, 0.0, 1000.0, "d")
    assert (now, round.slots[1].member.device) == (taken_at, "d")
    round, effects = run(round, (LeaseTaken("d", 1), now), (LeaseRenewed("b", 1, 1), now))
    assert effects[-1] == RefuseLease("b", "late")
    round, _ = run(round, (DevicesAvailable((member("e"),)), now + 1.0))
    assert round.slots[1].member.device == "d", "it has its time, too"
    assert advance(round, UpdateArrived("d", 1, 2), now + 2.0)[0].state == "closing"


def test_where_nothing_is_known_a_task_has_an_end_all_the_same() -> None:
    round, now = beating(collecting("ab", 2, 2), 0.0, 1e6)
    assert (now, round.slots[1].state) == (MAX_TASK, "expired")
    restored, _ = advance(collecting("ab", 2, 2), Resumed(50.0), 60.0)
    assert beating(restored, 60.0, 1e6)[1] == MAX_TASK + 50.0, "an outage is not its time"
    long = open_round(0, 1, Participation(), 0.0, lease=90000.0, offer=OFFER)
    assert long.max_task == 90000.0, "a lease lasts as long as the job says"


@pytest.mark.parametrize(
    ("own", "usual", "rule", "ends"),
    [
        (None, 1.0, {}, LEAST_STUCK),
        (50.0, 1.0, {}, LEAST_STUCK),
        (100.0, 1.0, {}, STUCK * 100),
        (None, 90.0, {}, STUCK * 90),
        (1.0, 1.0, {"deadline": 2000.0}, 2000.0),
        (1e9, 1.0, {}, MAX_TASK),
    ],
)
def test_a_device_that_only_beats_and_that_no_other_can_replace_loses_its_task_by_what_is_known(
    own: float | None, usual: float, rule: dict[str, float], ends: float
) -> None:
    drawn = Cohort((Seat(0, member("a")), Seat(1, replace(member("b"), seconds=own))), 2, 2)
    facts = [(DevicesAvailable(cohort=drawn), 0.0), (LeaseTaken("b", 1), 0.0), (LeaseTaken("a", 0), 0.0)]
    beats = [(LeaseRenewed(d, n, 1), t) for t in (20.0, 40.0, 60.0, 80.0) for n, d in enumerate("ab") if t < usual]
    round, _ = run(opened(**rule), *facts, *beats, (UpdateArrived("a", 0, 1), usual))
    round, now = beating(round, usual // 10 * 10, 1e6)
    assert (now, round.slots[1].state) == (ends, "expired")
    known = replace(member("b"), seconds=ends)  # as it is after this
    round, _ = run(round, (DevicesAvailable((known,)), now), (LeaseTaken("b", 1), now))
    assert round.ends_by(round.slots[1]) == now + min(STUCK * ends, MAX_TASK), "it has longer each time"


def test_a_fleet_is_waited_for_by_its_own_measure() -> None:
    """Whether tasks take a second, a minute or an hour: bad luck costs a round as many times what it takes."""
    for usual in (1.0, 60.0, 3600.0):
        rule = Participation()
        round = open_round(0, 1, rule, 0.0, lease=2 * usual, offer=OFFER)
        facts: list[tuple[Event, float]] = [(DevicesAvailable(cohort=cohort("abcd", 4, 2)), 0.0)]
        facts += [(LeaseTaken(device, n), 0.0) for n, device in enumerate("abc")]
        round, _ = run(round, *facts, *((UpdateArrived(device, n, 1), usual) for n, device in enumerate("ab")))
        assert late_at(round) == rule.lateness * usual
        round, _ = run(round, (UpdateArrived("c", 2, 1), usual))
        assert round.state == "closing", "d did not come in that time"


def test_no_device_is_late_before_the_grace() -> None:
    round, _ = run(collecting("abc", 3, 2), (UpdateArrived("a", 0, 1), 0.1), (UpdateArrived("b", 1, 1), 0.2))
    assert late_at(round) == 5.0


def test_a_device_that_is_known_to_be_slower_is_waited_for_longer_but_not_for_ever() -> None:
    for own, expected in ((None, 30.0), (3.0, 30.0), (15.0, 45.0), (100.0, 60.0)):
        drawn = Cohort(tuple(Seat(n, replace(member(d), seconds=own)) for n, d in enumerate("abc")), 3, 2)
        taken = ((LeaseTaken(d, n), 0.0) for n, d in enumerate("abc"))
        round, _ = run(opened(), (DevicesAvailable(cohort=drawn), 0.0), *taken)
        round, _ = run(round, (UpdateArrived("a", 0, 1), 10.0), (UpdateArrived("b", 1, 1), 10.0))
        assert late_at(round) == expected, own


def test_a_device_that_has_more_to_do_is_waited_for_accordingly() -> None:
    """One trains ten times as much as three others, whose tasks take a second: it is not measured by theirs."""

    def begun(seconds: float | None, work: float) -> Round:
        members = [replace(member(d), seconds=None if seconds is None else 1.0) for d in "abc"]
        seats = [Seat(n, m) for n, m in enumerate([*members, replace(member("d"), seconds=seconds, work=work)])]
        round, _ = run(opened(grace=0.5), (DevicesAvailable(cohort=Cohort(tuple(seats), 4, 2)), 0.0))
        round, _ = run(round, *((LeaseTaken(device, n), 0.0) for n, device in enumerate("abcd")))
        return run(round, *((UpdateArrived(device, n, 1), 1.0) for n, device in enumerate("abc")))[0]

    for seconds, work, late in (
        (None, 1.0, 3.0),  # nothing is known of it, and it has as much to do
        (None, 10.0, 30.0),
        (None, 1e9, 3.0 * MOST_WORK),  # a rough measure has an end
        (4.0, 1.0, 6.0),  # known to be slower, and given twice as much
        (9.0, 10.0, 27.0),  # what it takes itself is the better measure
        (90.0, 10.0, 60.0),
    ):
        assert late_at(begun(seconds, work)) == late, (seconds, work)
    assert begun(None, 10.0).deadline == 1.0 + LEAST_DEADLINE
    assert begun(None, 50.0).deadline == 1.0 + OVERDUE * 50
    for work, held_up in ((1.0, True), (10.0, False)):
        round, _ = run(begun(4.0, work), (UpdateArrived("d", 3, 1), 5.0))
        assert round.is_held_up_after(round.slots[3]) == held_up


def test_a_round_whose_devices_have_failed_closes_with_a_quorum_of_those_that_are_there() -> None:
    """Five were drawn and three are a quorum; two answer, two return their tasks, and one is not heard of again."""

    def left_alone(rule: dict[str, float]) -> Round:
        begun = run(opened(**rule), (DevicesAvailable(cohort=cohort("abcde", 5, 3)), 0.0))[0]
        facts: list[Event] = [LeaseTaken(device, n) for n, device in enumerate("abcde")]
        facts += [UpdateArrived("a", 0, 1), UpdateArrived("b", 1, 1), TaskReturned("c", 2, 1), TaskReturned("d", 3, 1)]
        return run(begun, *((fact, 1.0) for fact in facts))[0]

    round = left_alone({})
    assert (round.quorum, wakes_at(round)) == (3, 1.0 + OFFER)
    round, _ = advance(round, Tick(), 1.0 + OFFER - 0.1)
    assert round.quorum == 3, "another device may come"
    round, _ = advance(round, Tick(), 1.0 + OFFER)
    assert (round.state, round.quorum) == ("closing", 2), "half of three, and the third is late"
    for rule in ({"quorum": 3}, {"quorum": 1.0}, {"deadline": 1e6}):
        kept, _ = run(left_alone(rule), (Tick(), 5000.0))
        assert (kept.state, kept.quorum) == ("collecting", 3), rule
    taken, _ = run(left_alone({}), (DevicesAvailable((member("f"), member("g"))), 2.0), (LeaseTaken("f", 2), 2.0))
    taken, _ = run(taken, (LeaseTaken("g", 3), 2.0), (Tick(), 1.0 + OFFER))
    assert (taken.state, taken.quorum) == ("collecting", 3), "their seats are taken"
    spare = run(collecting("abcd", 2, 2), (UpdateArrived("a", 0, 1), 1.0), (TaskReturned("c", 2, 1), 1.0))[0]
    assert advance(spare, Tick(), 20.0)[0].quorum == 2, "more were invited than wanted"


def test_a_seat_without_a_device_is_late_after_the_grace() -> None:
    round, _ = advance(opened(), DevicesAvailable(cohort=cohort("abc", 3, 2)), 0.0)
    round, _ = run(round, (LeaseTaken("a", 0), 0.0), (LeaseTaken("b", 1), 0.0))
    round, _ = run(round, (UpdateArrived("a", 0, 1), 1.0), (UpdateArrived("b", 1, 1), 2.0))
    assert late_at(round) == 5.0, "c was offered its task at 0, and did not come"
    failed, _ = run(round, (LeaseTaken("c", 2), 2.0), (TaskReturned("c", 2, 1), 3.0))
    assert late_at(failed) == 3.0 + VACANT, "devices that wait would have taken it"
    assert advance(failed, Tick(), 3.0 + VACANT)[0].state == "closing"
    again, _ = run(failed, (DevicesAvailable((member("d"),)), 3.1), (LeaseTaken("d", 2), 3.1))
    assert late_at(again) == 8.1


def test_every_update_of_a_full_quorum_and_every_second_of_a_deadline_is_waited_for() -> None:
    full, _ = run(collecting("abc", 3, 3), (UpdateArrived("a", 0, 1), 1.0), (UpdateArrived("b", 1, 1), 1.0))
    assert late_at(full) is None
    timed, _ = run(collecting(deadline=29.0), (UpdateArrived("a", 0, 1), 1.0), (UpdateArrived("b", 1, 1), 1.0))
    assert late_at(timed) is None and advance(timed, Tick(), 28.9)[0].state == "collecting"


def test_a_deadline_follows_from_what_tasks_take() -> None:
    round, effects = run(collecting("abc", 3, 3), (UpdateArrived("a", 0, 1), 20.0))
    assert round.deadline == 20.0 + 80.0
    round, effects = run(
        round, *((LeaseRenewed(d, n, 1), t) for t in (29.0, 55.0, 80.0) for n, d in ((1, "b"), (2, "c")))
    )
    round, effects = advance(round, Tick(), 100.0)
    assert effects == (WaitForUpdates(2),) and round.state == "collecting"
    known = Cohort(tuple(Seat(n, replace(member(d), seconds=25.0)) for n, d in enumerate("ab")), 2, 1)
    assert advance(opened(), DevicesAvailable(cohort=known), 3.0)[0].deadline == 103.0
    quick = Cohort(tuple(Seat(n, replace(member(d), seconds=0.1)) for n, d in enumerate("ab")), 2, 1)
    assert advance(opened(), DevicesAvailable(cohort=quick), 3.0)[0].deadline == 63.0
    assert advance(opened(), DevicesAvailable(cohort=cohort("ab", 2, 1)), 3.0)[0].deadline is None


def test_what_is_late_stays_so_over_a_restart_and_an_outage_is_no_lateness() -> None:
    round, _ = run(collecting("abc", 3, 2), (UpdateArrived("a", 0, 1), 5.0), (UpdateArrived("b", 1, 1), 5.0))
    restored, _ = advance(decode(*json.loads(json.dumps(encoded(round)))), Resumed(100.0), 110.0)
    assert late_at(restored) == 115.0
    assert advance(restored, Tick(), 115.0)[0].state == "closing"


def test_a_device_that_takes_another_seat_leaves_its_old_one() -> None:
    """Two leases run out; the device with the higher seat comes back first, and gets the lower one."""
    round, _ = run(collecting(), (UpdateArrived("c", 2, 1), 1.0), (DevicesAvailable((member("b"),)), LEASE))
    assert [seat.member.device for seat in round.slots] == ["b", "a", "c"]
    assert [seat.state for seat in round.slots] == ["offered", "expired", "arrived"]
    round, _ = run(round, (DevicesAvailable((member("d"), member("a"))), LEASE))
    assert [seat.member.device for seat in round.slots] == ["b", "d", "c"]


def test_a_round_of_an_earlier_program_in_which_a_device_has_two_seats_is_mended() -> None:
    round, _ = run(collecting(), (UpdateArrived("c", 2, 1), 1.0), (Tick(), LEASE))
    head, rows = encoded(round)
    for row in rows[:2]:
        row["member"]["device"] = "c"
    mended = decode(head, rows)
    assert [seat.member.device for seat in mended.slots] == ["vacant-0", "vacant-1", "c"]


def test_a_round_that_can_never_be_closed_is_given_up() -> None:
    round = closing()
    for _ in range(MOST_TRIES - 1):
        round, effects = advance(round, CloseFailed("a defect"), 2.0)
        assert (round.state, effects) == ("closing", ())
    assert advance(round, Committed(), 3.0)[0].reason == ""
    round, effects = advance(round, CloseFailed("a defect"), 2.0)
    assert (round.state, effects) == ("abandoned", (RoundAbandoned("a defect"),))


def test_an_outage_is_held_against_nobody() -> None:
    round = collecting(deadline=40.0)
    round, effects = advance(round, Resumed(1000.0), 1020.0)
    assert effects == ()
    assert (round.slots[0].until, round.deadline) == (1020.0 + LEASE, 1040.0)  # a lease begins anew
    assert advance(round, UpdateArrived("a", 0, 1), 1025.0)[1] == (
        AcceptUpdate(replace(round.slots[0], state="arrived", since=1025.0, seconds=25.0)),
    )
    with pytest.raises(InputError, match="outage: expected seconds from 0, got -1"):
        Resumed(-1.0)


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_time_is_a_number(now: float) -> None:
    with pytest.raises(InputError, match="now: expected a finite time"):
        advance(opened(), Tick(), now)
