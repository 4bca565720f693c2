"""Any sequence of facts, with restarts in between: nothing is counted twice, lost or closed twice."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from federation import rounds
from federation.cohort import (
    CHECK,
    AcceptUpdate,
    AlreadyAccepted,
    Cohort,
    GrantLease,
    HoldUpdate,
    LeaseRenewed,
    LeaseTaken,
    RejectUpdate,
    RenewLease,
    TaskReturned,
    UpdateArrived,
    UpdateChecked,
    UpdateUploaded,
)
from federation.rounds import (
    MOST_TRIES,
    Abandon,
    CloseFailed,
    CloseRequested,
    CloseRound,
    Committed,
    DevicesAvailable,
    DevicesLeft,
    Effect,
    Event,
    Resumed,
    Round,
    RoundError,
    Stop,
    Tick,
    advance,
    decode,
)
from tests.federation.round_examples import (
    DEVICES,
    LEASE,
    RUN_OUT,
    cohort,
    collecting,
    encoded,
    late_at,
    member,
    opened,
    run,
    wakes_at,
)

MOST = 20 * LEASE  # seconds for a task
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
        self.uploaded: dict[int, tuple[str, int]] = {}  # of every slot: what is not checked, whose and of which attempt
        self.check_by: dict[int, float] = {}  # of every slot that was uploaded: until when that may be checked
        self.closed: list[CloseRound] = []
        self.deserted = False
        self.unreadable = False
        self.leases: dict[int, list[tuple[str, float]]] = {}  # of every slot: who was granted it, until when

    @initialize(
        rule=constants, wanted=st.integers(1, 4), extra=st.integers(0, 2), deserted=st.booleans(), data=st.data()
    )
    def begin(self, rule: dict[str, Any], wanted: int, extra: int, deserted: bool, data: Any) -> None:
        self.deserted = deserted
        self.unreadable = data.draw(st.booleans())
        self.first = self.round = opened(most=MOST, **rule)
        self.cohort = cohort(DEVICES[: wanted + extra], wanted, data.draw(st.integers(1, wanted)))
        if data.draw(st.sampled_from([True, True, True, False])):
            self.draw()

    def tell(self, event: Event) -> tuple[Effect, ...]:
        before = self.round
        try:
            self.round, effects = advance(before, event, self.now)
        except RoundError:
            assert not isinstance(event, (DevicesAvailable, DevicesLeft, LeaseTaken, UpdateArrived, TaskReturned, Tick))
            assert not isinstance(event, (UpdateUploaded, UpdateChecked))
            return ()
        self.facts.append((event, self.now))
        if isinstance(event, Resumed) and before.state == "collecting":
            self.check_by = {slot: until + event.outage for slot, until in self.check_by.items()}
        for slot in list(self.uploaded) if before.state == "collecting" else ():
            if self.check_by[slot] <= self.now:
                del self.uploaded[slot]
        if isinstance(event, Resumed):
            for leases in self.leases.values():
                leases[:] = [(device, max(until + event.outage, self.now + LEASE)) for device, until in leases]
        if self.round.slots is not before.slots and isinstance(event, UpdateChecked) and not event.sound:
            self.uploaded.pop(event.slot, None)
        for effect in effects:
            if isinstance(effect, GrantLease):
                assert self.round.state == "collecting"
                leases = self.leases.setdefault(effect.seat.number, [])
                if len(effect.seat.holders) > len(leases):
                    leases.append((effect.seat.member.device, self.now + LEASE))
            if isinstance(effect, RenewLease):
                leases = self.leases[effect.seat.number]
                assert self.now < leases[-1][1] and effect.seat.member.device == leases[-1][0]
                leases[-1] = (leases[-1][0], self.now + LEASE)
            if isinstance(effect, (AcceptUpdate, HoldUpdate)) and not isinstance(event, UpdateChecked):
                assert isinstance(event, UpdateArrived if isinstance(effect, AcceptUpdate) else UpdateUploaded)
                device, until = self.leases[event.slot][-1]
                assert (device, event.attempt) == (event.device, len(self.leases[event.slot]))  # the latest lease
                assert self.now < until
                in_time = before.deadline is None or self.now < before.deadline
                waits = self.uploaded and before.deadline is not None and self.now < before.deadline + CHECK
                assert in_time or before.arrived < before.quorum or waits
            if isinstance(effect, HoldUpdate):
                assert event.slot not in self.uploaded and event.slot not in self.accepted
                self.uploaded[event.slot] = (event.device, event.attempt)
                self.check_by[event.slot] = self.now + CHECK
            if isinstance(effect, AcceptUpdate):
                if isinstance(event, UpdateChecked):
                    assert event.sound and self.uploaded.pop(event.slot) == (event.device, event.attempt)
                assert before.state == "collecting" and not self.closed
                assert effect.seat.number not in self.accepted  # never twice for a slot
                assert effect.seat.member.device not in self.accepted.values()  # nor for a device
                self.accepted[effect.seat.number] = effect.seat.member.device
            if isinstance(effect, CloseRound):
                waited = self.round.deadline is not None and self.now >= self.round.deadline + CHECK
                complete = self.round.arrived == self.round.wanted
                assert not self.uploaded or complete or waited, "it waits for what is not checked"
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

    @rule(device=st.sampled_from(DEVICES), back=st.sampled_from([0, 0, 0, 1]))
    def upload(self, device: str, back: int) -> None:
        for seat in self.round.slots:
            if device in seat.holders:
                self.tell(UpdateUploaded(device, seat.number, len(seat.holders) - back))

    @rule(slot=st.integers(0, 5), sound=st.sampled_from([True, True, False]))
    def check(self, slot: int, sound: bool) -> None:
        """Come to a verdict, twice: another process may have come to the same."""
        if slot in self.uploaded:
            device, attempt = self.uploaded[slot]
            self.tell(UpdateChecked(device, slot, attempt, sound))
            known = self.round
            self.tell(UpdateChecked(device, slot, attempt, sound))
            assert self.round == known

    @rule(device=st.sampled_from(DEVICES), slot=st.integers(-1, 6), attempt=st.integers(-1, 3), sound=st.booleans())
    def check_what_was_not_uploaded(self, device: str, slot: int, attempt: int, sound: bool) -> None:
        if self.uploaded.get(slot) != (device, attempt):
            effects = self.tell(UpdateChecked(device, slot, attempt, sound))
            assert not any(isinstance(effect, AcceptUpdate) for effect in effects)

    @rule(device=st.sampled_from(DEVICES), slot=st.integers(-1, 6), attempt=st.integers(-1, 3), failed=st.booleans())
    def meddle(self, device: str, slot: int, attempt: int, failed: bool) -> None:
        seat = rounds._seat(self.round, slot)
        own = 1 <= attempt <= len(seat.holders) and seat.holders[attempt - 1] == device
        effects = self.tell(TaskReturned(device, slot, attempt) if failed else UpdateArrived(device, slot, attempt))
        if not own and not failed:
            assert effects[-1] == RejectUpdate(device, "not_yours") or isinstance(effects[-1], CloseRound)

    @rule(device=st.sampled_from(DEVICES), seconds=st.sampled_from([0.0, 5.0, 20.0]))
    def heartbeat(self, device: str, seconds: float) -> None:
        self.now += seconds
        seat = self.round.seat_of(device)
        if seat is not None:
            self.tell(LeaseRenewed(device, seat.number, len(seat.holders)))

    @rule(device=st.sampled_from(DEVICES))
    def fail(self, device: str) -> None:
        seat = self.round.seat_of(device)
        if seat is not None:
            self.tell(TaskReturned(device, seat.number, len(seat.holders)))

    @rule(devices=st.lists(st.sampled_from(DEVICES), max_size=2))
    def leave(self, devices: list[str]) -> None:
        self.tell(DevicesLeft(tuple(devices)))

    @rule(seconds=st.sampled_from([0.5, 5.0, 12.0, 31.0, CHECK - 31.0]))
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

    @rule(seconds=st.sampled_from([0.5, 31.0, 200.0]))
    def pause(self, seconds: float) -> None:
        """Time passes for all but the job."""
        self.now += seconds
        self.tell(Resumed(seconds))

    @rule(event=st.sampled_from([Committed(), Committed(), CloseFailed("a defect"), CloseRequested()]))
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
        held = {
            seat.number: (seat.member.device, len(seat.holders))
            for seat in self.round.slots
            if seat.state == "uploaded"
        }
        assert held == self.uploaded, "it runs out when its time is over, and else stays"
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
    def the_next_round_can_be_drawn_from_this_one(self) -> None:
        """No device has two seats, not even a free one that it had before: a window's next cohort takes them over."""
        if self.round.slots:
            Cohort(self.round.slots, self.round.wanted, self.round.quorum)

    @invariant()
    def what_is_known_of_the_seats_is_what_a_look_at_each_of_them_gives(self) -> None:
        slots, now = self.round.slots, self.now
        arrived = [seat for seat in slots if seat.state == "arrived"]
        assert slots.arrived == sum(seat.count for seat in arrived)
        assert slots.free == sum(seat.free for seat in slots)
        assert slots.uploaded == sum(seat.state == "uploaded" for seat in slots)
        assert self.round.usual == (
            median(seat.seconds for seat in arrived if seat.seconds is not None) if arrived else None
        )
        for device in (*DEVICES, "none"):
            found = [seat for seat in slots if not seat.free and seat.member.device == device]
            assert [self.round.seat_of(device)] == (found or [None])
        ends, wakes = late_at(self.round), wakes_at(self.round)
        for at in (now, now + 3.0, now + 40.0, now):
            assert slots.over(at) == [seat for seat in slots if seat.state in RUN_OUT and seat.until <= at]
            assert self.round.is_late(at) == (ends is not None and ends <= at)
            assert self.round.is_due(at) == (wakes is not None and wakes <= at)

    def teardown(self) -> None:
        assert run(self.first, *self.facts)[0] == self.round  # the same facts, the same round
        if self.round.state == "selecting":
            self.draw()
        for slot in list(self.uploaded) if not self.unreadable else ():
            self.check(slot, sound=False)
        if self.round.state == "collecting" and self.unreadable:
            self.no_verdict_comes()
        if self.round.state == "collecting" and self.deserted:
            self.no_other_device_comes()
        if self.round.state == "collecting":
            self.one_only_beats()
        for _ in range(MOST_TRIES):
            if self.round.state == "closing":
                self.tell(CloseFailed("a defect"))
        assert self.round.state in ("committed", "abandoned")

    def no_verdict_comes(self) -> None:
        """Liveness: a round that was told to close does so with its quorum, though nothing that lies there is read."""
        self.tell(CloseRequested())
        enough = self.round.arrived >= self.round.quorum
        self.now += CHECK
        self.tell(Tick())
        assert not self.uploaded or self.round.state != "collecting"
        assert self.round.state != "collecting" or not enough

    def no_other_device_comes(self) -> None:
        """Liveness: if a share is the quorum, one update is enough when all other devices have failed or gone."""
        taken = [seat for seat in self.round.slots if seat.state == "leased"]
        if taken:
            self.tell(UpdateArrived(taken[0].member.device, taken[0].number, len(taken[0].holders)))
        if self.round.share is not None and self.round.arrived:
            for _ in range(3):
                self.now += 2 * LEASE
                self.tell(Tick())
            assert self.round.state == "closing"

    def one_only_beats(self) -> None:
        """Liveness: when enough devices come, take and answer, the round ends, though one only beats."""
        hung = next((seat.member.device for seat in self.round.slots if seat.state == "leased"), "none")
        others = [device for device in DEVICES if device != hung]
        end = self.now + 2 * MOST
        while self.round.state == "collecting" and self.now < end:
            self.tell(DevicesAvailable(tuple(map(member, others))))
            for device in others:
                self.take(device)
                self.answer(device, 0)
            self.heartbeat(hung, LEASE / 2)
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
