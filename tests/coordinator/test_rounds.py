"""The round: its table, its rules one by one, and any sequence of facts with restarts in between."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator import rounds
from coordinator.cohort import (
    AcceptUpdate,
    AlreadyAccepted,
    Cohort,
    GrantLease,
    LeaseTaken,
    Member,
    OfferTask,
    RefuseLease,
    RejectUpdate,
    Seat,
    TaskFailed,
    UpdateArrived,
)
from coordinator.rounds import (
    TRANSITIONS,
    Abandon,
    CloseRequested,
    CloseRound,
    Committed,
    DevicesAvailable,
    DevicesLeft,
    Effect,
    Event,
    Resumed,
    Round,
    RoundAbandoned,
    RoundError,
    State,
    Stop,
    Tick,
    WaitForDevices,
    WaitForUpdates,
    WarnLayerUncovered,
    advance,
    decode,
    encode_head,
    encode_seat,
    open_round,
)
from federation.axes.participate import Participation
from federation.errors import EmbraceError, InputError

LEASE, OFFER = 30.0, 10.0
DEVICES = "abcdef"


def member(device: str) -> Member:
    return Member(device, "stem", 3)


def cohort(devices: str, wanted: int, quorum: int, **more: Any) -> Cohort:
    return Cohort(tuple(Seat(n, member(device)) for n, device in enumerate(devices)), wanted, quorum, **more)


def opened(**constants: Any) -> Round:
    return open_round(3, 7, Participation(**constants), 0.0, lease=LEASE, offer=OFFER)


def run(round: Round, *facts: tuple[Event, float]) -> tuple[Round, list[Effect]]:
    effects: list[Effect] = []
    for event, now in facts:
        round, more = advance(round, event, now)
        effects += more
    return round, effects


def collecting(devices: str = "abc", wanted: int = 3, quorum: int = 2, **constants: Any) -> Round:
    """Everybody has a lease until 30."""
    round, _ = run(opened(**constants), (DevicesAvailable(cohort=cohort(devices, wanted, quorum)), 0.0))
    return run(round, *((LeaseTaken(device, n), 0.0) for n, device in enumerate(devices)))[0]


def closing() -> Round:
    return run(collecting(), *((UpdateArrived(device, n, 1), 1.0) for n, device in enumerate("abc")))[0]


EXAMPLES: dict[State, Round] = {
    "selecting": opened(),
    "collecting": collecting(),
    "closing": closing(),
    "committed": advance(closing(), Committed(), 2.0)[0],
    "abandoned": advance(collecting(), Abandon("why"), 2.0)[0],
}
FACTS: tuple[Event, ...] = (
    DevicesAvailable((member("z"),), cohort("z", 1, 1)),
    DevicesLeft(("a",)),
    LeaseTaken("a", 0),
    UpdateArrived("a", 0, 1),
    TaskFailed("a", 0, 1),
    Tick(),
    Resumed(5.0),
    CloseRequested(),
    Committed(),
    Abandon("because"),
    Stop(),
)
REFUSED = {
    ("selecting", CloseRequested),
    ("selecting", Committed),
    ("collecting", Committed),
    ("abandoned", Committed),
    ("committed", Abandon),
}


def test_the_examples_are_what_they_are_called_and_all_facts_are_there() -> None:
    assert {state: round.state for state, round in EXAMPLES.items()} == {state: state for state in get_args(State)}
    assert {type(fact) for fact in FACTS} == set(get_args(Event))


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_every_fact_in_every_state_is_in_the_table_or_refused(state: State, fact: Event) -> None:
    if (state, type(fact)) in REFUSED:
        assert (state, type(fact)) not in TRANSITIONS
        with pytest.raises(RoundError, match=f"round 3 is {state}: {type(fact).__name__} is not possible"):
            advance(EXAMPLES[state], fact, 3.0)
        return
    after, _ = advance(EXAMPLES[state], fact, 3.0)
    to = TRANSITIONS[state, type(fact)]
    follow = {TRANSITIONS[key] for key in TRANSITIONS if key[0] == to and isinstance(key[1], str)}
    assert after.state in {to} | follow


def test_the_table_has_no_way_back_and_its_ends_are_ends() -> None:
    order: tuple[State, ...] = get_args(State)
    assert all(order.index(to) >= order.index(state) for (state, _), to in TRANSITIONS.items())
    for end in ("committed", "abandoned"):
        assert {to for (state, _), to in TRANSITIONS.items() if state == end} == {end}


@pytest.mark.parametrize("state", ["closing", "committed", "abandoned"])
@pytest.mark.parametrize("fact", FACTS[:7], ids=lambda fact: type(fact).__name__)
def test_nothing_that_devices_do_changes_a_closed_round(state: State, fact: Event) -> None:
    after, effects = advance(EXAMPLES[state], fact, 1e6)
    assert after == EXAMPLES[state]
    assert not any(isinstance(effect, (AcceptUpdate, GrantLease, OfferTask)) for effect in effects)


def test_a_conflict_has_its_status() -> None:
    assert issubclass(RoundError, EmbraceError)
    assert RoundError.status == 409


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
    assert advance(round, TaskFailed("a", slot, 1), 1.0) == (round, ())


def test_a_failed_task_is_free_for_another() -> None:
    round, effects = advance(collecting(), TaskFailed("b", 1, 1), 1.0)
    assert (round.slots[1].state, effects) == ("failed", (WaitForDevices(1),))
    assert advance(round, TaskFailed("b", 1, 1), 1.0) == (round, ())
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


@pytest.mark.parametrize("round", EXAMPLES.values(), ids=EXAMPLES)
def test_rounds_survive_json(round: Round) -> None:
    head, seats = encoded(round)
    assert decode(head, seats) == decode(*json.loads(json.dumps([head, seats]))) == round


def encoded(round: Round) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return encode_head(round), [encode_seat(seat) for seat in round.slots]


@pytest.mark.parametrize(
    "change",
    [
        {"state": "asleep"},
        {"slots": []},
        {"colour": "red"},
        {"number": -1},
        {"number": "one"},
        {"lease": 0.0},
        {"wanted": 1},
        {"quorum": 4},
    ],
)
def test_what_is_no_round_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="round"):
        decode({**encode_head(EXAMPLES["closing"]), **change}, encoded(EXAMPLES["closing"])[1])


@pytest.mark.parametrize("seats", [[{}], [], "missing"])
def test_what_are_no_seats_is_refused(seats: Any) -> None:
    head, known = encoded(EXAMPLES["closing"])
    with pytest.raises(InputError, match="round"):
        decode(head, known[1:] if seats == "missing" else seats)


# ---- any sequence of facts ----

constants = st.fixed_dictionaries(
    {"deadline": st.sampled_from([25.0, 60.0]), "on_missing_quorum": st.sampled_from(["wait", "fail"])}
) | st.just({})


class AnyRound(RuleBasedStateMachine):
    """Devices that do what they should and what they should not; the bookkeeping beside is done from effects alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.facts: list[tuple[Event, float]] = []
        self.accepted: dict[int, str] = {}
        self.closed: list[CloseRound] = []
        self.leases: dict[int, list[tuple[str, float]]] = {}  # of every slot: who was granted it, until when

    @initialize(rule=constants, wanted=st.integers(1, 4), extra=st.integers(0, 2), data=st.data())
    def begin(self, rule: dict[str, Any], wanted: int, extra: int, data: Any) -> None:
        self.first = self.round = opened(**rule)
        self.cohort = cohort(DEVICES[: wanted + extra], wanted, data.draw(st.integers(1, wanted)))
        if data.draw(st.sampled_from([True, True, True, False])):
            self.draw()

    def tell(self, event: Event) -> tuple[Effect, ...]:
        before = self.round
        try:
            self.round, effects = advance(before, event, self.now)
        except RoundError:
            assert not isinstance(event, (DevicesAvailable, DevicesLeft, LeaseTaken, UpdateArrived, TaskFailed, Tick))
            return ()
        self.facts.append((event, self.now))
        if isinstance(event, Resumed):
            for leases in self.leases.values():
                leases[:] = [(device, until + event.outage) for device, until in leases]
        for effect in effects:
            if isinstance(effect, GrantLease):
                assert self.round.state == "collecting"
                leases = self.leases.setdefault(effect.seat.number, [])
                if len(effect.seat.holders) > len(leases):
                    leases.append((effect.seat.member.device, self.now + LEASE))
            if isinstance(effect, AcceptUpdate):
                assert isinstance(event, UpdateArrived)
                device, until = self.leases[event.slot][-1]
                assert (device, event.attempt) == (event.device, len(self.leases[event.slot]))  # the latest lease
                assert self.now < until
                in_time = before.deadline is None or self.now < before.deadline
                assert in_time or before.arrived < before.quorum
                assert before.state == "collecting" and not self.closed
                assert effect.seat.number not in self.accepted  # never twice for a slot
                assert effect.seat.member.device not in self.accepted.values()  # nor for a device
                self.accepted[effect.seat.number] = effect.seat.member.device
            if isinstance(effect, CloseRound):
                self.closed.append(effect)
        return effects

    @rule()
    def draw(self) -> None:
        self.tell(DevicesAvailable(cohort=self.cohort))

    @rule(devices=st.lists(st.sampled_from(DEVICES), max_size=3))
    def come(self, devices: list[str]) -> None:
        self.tell(DevicesAvailable(tuple(map(member, devices)), self.cohort))

    @rule(device=st.sampled_from(DEVICES))
    def take(self, device: str) -> None:
        seat = self.round.seat_of(device)
        if seat is not None:
            self.tell(LeaseTaken(device, seat.number))

    @rule(device=st.sampled_from(DEVICES), seconds=st.sampled_from([0.0, 0.0, 5.0, 31.0]), other=st.booleans())
    def work(self, device: str, seconds: float, other: bool) -> None:
        """Come, take, answer; perhaps too late, and perhaps somebody else has taken over."""
        self.come([device])
        self.take(device)
        self.now += seconds
        if other:
            self.come([*DEVICES])
            for taker in DEVICES:
                self.take(taker)
        self.answer(device, 0)
        self.answer(device, 1)

    @rule(device=st.sampled_from(DEVICES), back=st.sampled_from([0, 0, 0, 1]))
    def answer(self, device: str, back: int) -> None:
        for seat in self.round.slots:
            if device in seat.holders:
                effects = self.tell(UpdateArrived(device, seat.number, len(seat.holders) - back))
                if seat.number in self.accepted and back == 0 and device == self.accepted[seat.number]:
                    told = (AcceptUpdate, AlreadyAccepted)  # whoever was counted hears it, however often it asks
                    assert any(isinstance(effect, told) for effect in effects)

    @rule(device=st.sampled_from(DEVICES), slot=st.integers(-1, 6), attempt=st.integers(-1, 3), failed=st.booleans())
    def meddle(self, device: str, slot: int, attempt: int, failed: bool) -> None:
        seat = rounds._seat(self.round, slot)
        own = 1 <= attempt <= len(seat.holders) and seat.holders[attempt - 1] == device
        effects = self.tell(TaskFailed(device, slot, attempt) if failed else UpdateArrived(device, slot, attempt))
        if not own and not failed:
            assert effects[-1] == RejectUpdate(device, "not_yours") or isinstance(effects[-1], CloseRound)

    @rule(device=st.sampled_from(DEVICES))
    def fail(self, device: str) -> None:
        seat = self.round.seat_of(device)
        if seat is not None:
            self.tell(TaskFailed(device, seat.number, len(seat.holders)))

    @rule(devices=st.lists(st.sampled_from(DEVICES), max_size=2))
    def leave(self, devices: list[str]) -> None:
        self.tell(DevicesLeft(tuple(devices)))

    @rule(seconds=st.sampled_from([0.5, 5.0, 12.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    @rule(seconds=st.sampled_from([0.5, 12.0]))
    def time_passes_unseen(self, seconds: float) -> None:
        self.now += seconds

    @rule(outage=st.sampled_from([0.0, 100.0]))
    def restart(self, outage: float) -> None:
        self.now += outage
        self.round = decode(*json.loads(json.dumps(encoded(self.round))))
        self.tell(Resumed(outage))

    @rule(event=st.sampled_from([Committed(), Committed(), CloseRequested()]))
    def command(self, event: Event) -> None:
        self.tell(event)

    @precondition(lambda self: len(self.facts) > 12)
    @rule(event=st.sampled_from([Stop(), Abandon("because")]))
    def end(self, event: Event) -> None:
        before = self.round.state
        self.tell(event)
        if isinstance(event, Stop) and before == "closing":
            assert self.round.state == "closing"

    @invariant()
    def what_was_accepted_is_what_counts(self) -> None:
        assert {seat.number: seat.member.device for seat in self.round.counted} == self.accepted
        assert self.round.arrived <= self.round.wanted

    @invariant()
    def closed_once_with_a_quorum_and_all_that_counts_in_order(self) -> None:
        if self.round.state in ("closing", "committed"):
            assert self.round.arrived >= self.round.quorum >= 1
            assert len(self.closed) == 1
        for effect in self.closed:
            assert effect.seats == self.round.counted
            assert [seat.number for seat in effect.seats] == sorted(self.accepted)

    @invariant()
    def nobody_has_two_seats(self) -> None:
        busy = [seat.member.device for seat in self.round.slots if not seat.free]
        assert len(set(busy)) == len(busy)

    def teardown(self) -> None:
        assert run(self.first, *self.facts)[0] == self.round  # the same facts, the same round
        if self.round.state == "collecting":
            self.everybody_answers()

    def everybody_answers(self) -> None:
        """Liveness: when enough devices come, take and answer, the round ends."""
        for _ in range(4):
            self.now += OFFER  # those who failed have rested
            self.tell(DevicesAvailable(tuple(map(member, DEVICES))))
            for seat in self.round.slots:
                self.tell(LeaseTaken(seat.member.device, seat.number))
            for seat in self.round.slots:
                self.tell(UpdateArrived(seat.member.device, seat.number, len(seat.holders)))
        assert self.round.state in ("closing", "abandoned")


TestAnyRound = AnyRound.TestCase
TestAnyRound.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_the_order_of_arrival_makes_no_difference(one: list[int], other: list[int]) -> None:
    def closed(order: list[int]) -> Round:
        return run(collecting("abcd", 4, 4), *((UpdateArrived("abcd"[n], n, 1), 1.0) for n in order))[0]

    assert closed(one) == closed(other)


@given(st.lists(st.floats(0, 100), max_size=8))
def test_looking_at_the_clock_changes_nothing(ticks: list[float]) -> None:
    start, _ = advance(collecting(deadline=50.0), UpdateArrived("a", 0, 1), 1.0)
    round = start
    for now in sorted(ticks):
        round, _ = advance(round, Tick(), now)
    assert advance(round, Tick(), 100.0)[0] == advance(start, Tick(), 100.0)[0]
