"""A round as one state machine: facts go in; a new round, and what to do about it, come out. Time is an argument.

    selecting ──► collecting ──► closing ──► committed
        └──────────────┴────────────┴──────► abandoned

A round that could close with a quorum waits until everything that was uploaded is checked, for a bounded time; one that
is complete does not. `advance` lets time pass first (offers, leases, the deadline), so that nothing depends on when the
clock was last read. A round is an immutable value; the same facts in the same order give the same round, after a
restart too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, get_args

from federation import cohort as seats
from federation.axes.participate import OnMissingQuorum, Participation, quorum_of_share
from federation.cohort import (
    Cohort,
    LeaseRenewed,
    LeaseTaken,
    Member,
    Seat,
    TaskReturned,
    UpdateArrived,
    UpdateChecked,
    UpdateUploaded,
    one_seat_each,
)
from federation.errors import EmbraceError, InputError
from federation.seating import Seats

State = Literal["selecting", "collecting", "closing", "committed", "abandoned"]
SLOWEST: Final = 2.0  # times the usual duration that a device may be known to take and is waited for accordingly
VACANT: Final = 0.5  # seconds after which a seat that is free, and that no device has taken, is not waited for
OVERDUE: Final = 4.0  # times the slowest known duration, after which a round says what it waits for
LEAST_DEADLINE: Final = 60.0  # seconds
MAX_TASK: Final = 6 * 3600.0  # seconds
STUCK, LEAST_STUCK = 10.0, 600.0  # times a known duration, and seconds, after which a task is taken back in any case
MOST_TRIES: Final = 8  # attempts to close a round, after which it is abandoned


class RoundError(EmbraceError):
    """A command that the round's state does not allow, such as committing what is not closed; nothing has changed."""

    status: ClassVar[int] = 409


@dataclass(frozen=True)
class Round:
    """Everything about a round; `open_round` makes one."""

    number: int
    seed: int
    opened_at: float
    lease: float  # seconds for a task
    offer: float  # seconds to come for it
    patience: float | None  # seconds from the first offers to the deadline
    on_missing_quorum: OnMissingQuorum
    lateness: float | None = None  # times what is expected of a device, after which it is late; None: none ever is
    grace: float = 0.5  # seconds that no device is late before
    state: State = "selecting"
    slots: Seats = field(default_factory=Seats)
    wanted: int = 0  # draws that make it complete
    quorum: int = 0
    deadline: float | None = None
    overdue: bool = False  # the deadline came without a quorum; closes as soon as there is one
    reason: str = ""  # why it was abandoned, or could not be closed yet
    tries: int = 0  # attempts to close it that failed
    max_task: float = MAX_TASK  # seconds after which a task is taken back, however alive its device is
    share: float | None = None  # of the draws that are a quorum, if seats that no device takes are not counted

    def __post_init__(self) -> None:
        if self.number < 0 or not (0 < self.lease < math.inf and 0 < self.offer < math.inf):
            raise InputError(f"round {self.number}: expected a number from 0, lease and offer above 0 seconds")
        if self.state not in get_args(State):
            raise InputError(f"round {self.number}: expected {', '.join(get_args(State))}, got {self.state!r}")
        least = self.quorum if self.state in ("closing", "committed") else 0
        begun = bool(self.slots) or self.state in ("selecting", "abandoned")
        if not begun or not least <= self.arrived <= self.wanted:
            raise InputError(f"round {self.number} is {self.state}, with {self.arrived} of {self.wanted} arrived")

    @property
    def counted(self) -> tuple[Seat, ...]:
        """What is summed, in the order of the slots: the order of arrival makes no difference."""
        return tuple(seat for seat in self.slots if seat.state == "arrived")

    @property
    def arrived(self) -> int:
        """Draws that were answered: an update that counts twice is two of them."""
        return self.slots.arrived

    @cached_property
    def usual(self) -> float | None:
        """Seconds that a task of this round takes: the median over those that arrived, and what the others took before.

        Of those that arrive first alone, a fleet of which half is slower would be measured by its quick half.
        """
        return self.slots.usual_seconds if self.arrived else None

    def is_late(self, now: float) -> bool:
        """Whether the round closes with the updates that it has: a quorum is there, and the rest is late."""
        if self.lateness is None or self.state != "collecting" or not self.quorum <= self.arrived < self.wanted:
            return False
        if self.slots.uploaded:
            return False
        return self.slots.all_answered_or(lambda seat: now >= self._ends_at(seat))

    def is_due(self, now: float) -> bool:
        """Whether time alone changes something now."""
        if self.state != "collecting":
            return False
        if (self.has_passed(now) and (not self.overdue or self.arrived >= self.quorum)) or self.slots.over(now):
            return True
        return self.is_late(now) or self.quorum_at(now) < self.quorum

    def has_passed(self, now: float) -> bool:
        """Whether the deadline has come, and what was uploaded is checked, or has had the time for that."""
        if self.deadline is None or now < self.deadline:
            return False
        return not self.slots.uploaded or now >= self.deadline + seats.CHECK

    def quorum_at(self, now: float) -> int:
        """The quorum without the seats that are free, and that no device has come for in the time of an offer.

        Else a round whose devices have failed or gone would wait for devices that there are not.
        """
        if self.share is None or self.state != "collecting" or self.arrived >= self.quorum or not self.slots.free:
            return self.quorum
        deserted = sum(seat.count for seat in self.slots if seat.free and now >= seat.since + self.offer)
        missing = deserted + self.wanted - sum(seat.count for seat in self.slots)  # more may be invited than wanted
        return min(self.quorum, quorum_of_share(self.share, self.wanted - missing)) if missing > 0 else self.quorum

    def _ends_at(self, seat: Seat) -> float:
        """When a seat is late. A device that returns it and takes it again gains no time."""
        began = seat.since if seat.began is None else seat.began
        return min(seat.since + self._allowed(seat), began + self._at_work(seat))

    def _allowed(self, seat: Seat) -> float:
        """Seconds for which a seat is waited for: by what the others took, and what its device is known to take."""
        if seat.free:  # devices that wait hear of it at once
            return min(VACANT, self.grace)
        return self._at_work(seat) if seat.state == "leased" else max(self.grace, self.usual or 0.0)

    def _at_work(self, seat: Seat) -> float:
        if self.usual is None or self.lateness is None:
            return self.grace
        known, expected = seat.member.seconds, self.slots.share_of_work(seat.member) * self.usual
        own = expected if known is None else min(max(known, self.usual), SLOWEST * expected)
        return max(self.grace, self.lateness * own)

    def is_held_up_after(self, seat: Seat) -> bool:
        """Whether an update came so late that the round was longer than its other devices would have made it."""
        if self.lateness is None or self.usual is None or self.quorum >= self.wanted or seat.seconds is None:
            return False
        expected = self.slots.share_of_work(seat.member) * self.usual
        return seat.seconds > max(self.grace, self.lateness * expected)

    def is_held_up_by(self, seat: Seat, now: float) -> bool:
        """Whether the deadline has passed without a quorum, and a device has had more than its time, too."""
        if seat.state != "leased" or not self.overdue:
            return False
        known = [seconds for seconds in (seat.member.seconds, self.usual) if seconds is not None]
        allowed = self.max_task
        if self.lateness is None:
            allowed = self.patience or self.max_task
        elif known:
            allowed = max(LEAST_DEADLINE, self.lateness * max(known))
        return now >= seat.since + min(allowed, self.max_task)

    def ends_by(self, seat: Seat) -> float:
        """When a task is taken back, however alive its device is: heartbeats alone are no progress.

        A device that was only slower than ever is known to be, once this has happened, and has longer the next time.
        """
        known = [seconds for seconds in (seat.member.seconds, self.usual) if seconds is not None]
        longest = max(self.lease, LEAST_STUCK, self.patience or 0.0, STUCK * max(known)) if known else self.max_task
        return seat.since + min(longest, self.max_task)

    def seat_of(self, device: str) -> Seat | None:
        """What a device is offered, holds or has answered; never more than one."""
        return self.slots.of(device)


@dataclass(frozen=True)
class DevicesAvailable:  # they want something to do
    members: tuple[Member, ...] = ()  # in the order in which they are to be served
    cohort: Cohort | None = None  # while selecting: drawn from all that are there


@dataclass(frozen=True)
class DevicesLeft:  # they said goodbye or were shut out; one that just vanishes lets its lease run out
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Tick:
    """Nothing but time."""


@dataclass(frozen=True)
class Resumed:  # the coordinator was down, or the job paused; this is held against no device
    outage: float  # seconds

    def __post_init__(self) -> None:
        if not 0 <= self.outage < math.inf:
            raise InputError(f"outage: expected seconds from 0, got {self.outage}")


@dataclass(frozen=True)
class CloseRequested:
    """The deadline is now."""


@dataclass(frozen=True)
class Committed:
    """The new version is on disk."""


@dataclass(frozen=True)
class CloseFailed:  # the sums or the new version could not be made, by a defect; it may be tried again
    reason: str


@dataclass(frozen=True)
class Abandon:
    reason: str


@dataclass(frozen=True)
class Stop:  # the job ends; a round that is closing is still brought to its end
    reason: str = "the job was stopped"


@dataclass(frozen=True)
class CloseRound:  # sum these, in this order
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class WarnLayerUncovered:
    layers: tuple[str, ...]


@dataclass(frozen=True)
class RoundAbandoned:
    reason: str


@dataclass(frozen=True)
class WaitForDevices:  # so many are missing to begin, or so many seats are free: answer with DevicesAvailable
    count: int


@dataclass(frozen=True)
class WaitForUpdates:  # the deadline has passed, and so many are missing for a quorum
    count: int


Command = CloseRequested | Committed | CloseFailed | Abandon | Stop
Event = DevicesAvailable | DevicesLeft | seats.SeatFact | Tick | Resumed | Command
Effect = seats.SeatEffect | CloseRound | WarnLayerUncovered | RoundAbandoned | WaitForDevices | WaitForUpdates
Step = tuple[Round, list[Effect]]

_S, _L, _C, _D, _A = get_args(State)
# What leads where; None is a RoundError. The last six are conditions, looked at after each fact and as time passes.
_TABLE: Final[Mapping[type[Event] | str, tuple[State | None, ...]]] = {
    # in state         selecting  collecting  closing  committed  abandoned
    DevicesAvailable: (_S, _L, _C, _D, _A),
    DevicesLeft:      (_S, _L, _C, _D, _A),
    LeaseTaken:       (_S, _L, _C, _D, _A),
    LeaseRenewed:     (_S, _L, _C, _D, _A),
    UpdateArrived:    (_S, _L, _C, _D, _A),
    UpdateUploaded:   (_S, _L, _C, _D, _A),
    UpdateChecked:    (_S, _L, _C, _D, _A),
    TaskReturned:     (_S, _L, _C, _D, _A),
    Tick:             (_S, _L, _C, _D, _A),
    Resumed:          (_S, _L, _C, _D, _A),
    CloseRequested:   (None, _L, _C, _D, _A),
    Committed:        (None, None, _D, _D, None),
    CloseFailed:      (None, None, _C, None, None),
    Abandon:          (_A, _A, _A, None, _A),
    Stop:             (_A, _A, _C, _D, _A),
    "seated":         (_L, None, None, None, None),
    "complete":       (None, _C, None, None, None),
    "late":           (None, _C, None, None, None),
    "due":            (None, _C, None, None, None),
    "hopeless":       (None, _A, None, None, None),
    "unclosable":     (None, None, _A, None, None),
}  # fmt: skip
TRANSITIONS: Final[Mapping[tuple[State, type[Event] | str], State]] = {
    (state, trigger): to for trigger, row in _TABLE.items() for state, to in zip(get_args(State), row) if to is not None
}


def open_round(
    number: int,
    seed: int,
    rule: Participation,
    now: float,
    *,
    lease: float,
    offer: float,
    max_task: float = MAX_TASK,
) -> Round:
    """A new round, waiting for its devices."""
    lateness = rule.lateness if rule.deadline is None else None  # a deadline means what it says
    most = max(lease, max_task)
    missing = rule.on_missing_quorum
    times = lateness, rule.grace
    return Round(number, seed, now, lease, offer, rule.deadline, missing, *times, max_task=most, share=rule.share)


def advance(round: Round, event: Event, now: float) -> tuple[Round, tuple[Effect, ...]]:
    """The round after a fact at a time, and what is to be done."""
    if not math.isfinite(now):
        raise InputError(f"now: expected a finite time, got {now}")
    resumed = _shifted(round, event.outage, now) if isinstance(event, Resumed) else round
    round, effects = _settle(_pass_time(resumed, now), now)
    to = TRANSITIONS.get((round.state, type(event)))
    if to is None:
        raise RoundError(f"round {round.number} is {round.state}: {type(event).__name__} is not possible")
    round, more = _settle(_enter(_apply(round, event, now), to), now)
    return round, (*effects, *more)


_HEAD: Final = tuple(own.name for own in fields(Round) if own.name != "slots")


def encode_head(round: Round) -> dict[str, Any]:
    """A round but for its seats, which are kept one by one: a fact changes one of them, and a round has many."""
    return {name: getattr(round, name) for name in _HEAD}


def encode_seat(seat: Seat) -> dict[str, Any]:
    return {**vars(seat), "member": dict(vars(seat.member))}


def decode(head: Mapping[str, Any], seats: Iterable[Mapping[str, Any]], known: Seats | None = None) -> Round:
    """From what `encode_head` and `encode_seat` made, in the order of the seats, also if it was JSON in between.

    With the seats that were `known` of the round before, only those that have changed since are needed.
    """
    try:
        rows = ({**row, "member": Member(**row["member"]), "holders": tuple(row["holders"])} for row in seats)
        decoded = [Seat(**row) for row in rows]
        return Round(**head, slots=known.put_all(decoded) if known else Seats(one_seat_each(decoded)))
    except (KeyError, TypeError) as error:
        raise InputError(f"this is no round: {error}") from None


def _enter(step: Step, to: State) -> Step:
    round, effects = step
    if to == round.state:
        return step
    entered: dict[State, Effect] = {"closing": CloseRound(round.counted), "abandoned": RoundAbandoned(round.reason)}
    return replace(round, state=to), [*effects, entered[to]] if to in entered else effects


def _settle(step: Step, now: float) -> Step:
    """Follow the conditions that hold."""
    if (quorum := step[0].quorum_at(now)) < step[0].quorum:
        step = replace(step[0], quorum=quorum), step[1]
    round, arrived = step[0], step[0].arrived
    passed = round.has_passed(now)
    for condition, holds in (
        ("seated", bool(round.slots)),
        ("complete", arrived >= round.wanted),
        ("late", step[0].is_late(now)),
        ("due", passed and arrived >= round.quorum),
        ("hopeless", passed and arrived < round.quorum and round.on_missing_quorum == "fail"),
        ("unclosable", round.tries >= MOST_TRIES),
    ):
        to = TRANSITIONS.get((step[0].state, condition))
        if holds and to is not None:
            why = f"{arrived} of {round.quorum} at the deadline" if condition == "hopeless" else round.reason
            step = _enter((replace(step[0], reason=why), step[1]), to)
    if passed and step[0].state == "collecting" and not round.overdue:
        return replace(step[0], overdue=True), [*step[1], WaitForUpdates(round.quorum - arrived)]
    return step


def _pass_time(round: Round, now: float, left: tuple[str, ...] = ()) -> Step:
    if round.state != "collecting":
        return round, []
    if not left and not round.slots.over(now):
        return round, []
    slots, freed = seats.run_out(round.slots, now, left)
    return (replace(round, slots=Seats(slots)), [WaitForDevices(freed)]) if freed else (round, [])


def _shifted(round: Round, outage: float, now: float) -> Round:
    """Move every time by an outage. What runs begins anew at least: renewals are not recorded."""
    if round.state != "collecting":
        return round
    moved = [
        replace(
            seat,
            since=seat.since + outage,
            until=seat.until + outage,
            began=None if seat.began is None else seat.began + outage,
        )
        for seat in round.slots
    ]
    slots = Seats(replace(seat, until=max(seat.until, _least_until(round, seat, now))) for seat in moved)
    deadline = round.deadline if round.deadline is None or round.overdue else round.deadline + outage
    return replace(round, slots=slots, deadline=deadline)


def _least_until(round: Round, seat: Seat, now: float) -> float:
    """Until when an offer or a lease lasts that begins anew, or is renewed; no task and no check lasts for ever."""
    if seat.state == "uploaded":
        return seat.since + seats.CHECK
    if seat.state == "leased":
        return min(now + round.lease, round.ends_by(seat))
    return now + round.offer if seat.state == "offered" else seat.until


def _take_back(round: Round, waiting: Iterable[Member], now: float) -> Step:
    """Free seats that hold the round up, the longest held first, as far as there are devices to take them over."""
    if not round.overdue:
        return round, []
    spare = len(seats.idle_among(round.slots, waiting)) - round.slots.free
    held_up = sorted((seat for seat in round.slots if round.is_held_up_by(seat, now)), key=lambda seat: seat.since)
    taken = [replace(seat, state="expired", since=now) for seat in held_up[: max(0, spare)]]
    if not taken:
        return round, []
    by_number = {seat.number: seat for seat in taken}
    slots = Seats(by_number.get(seat.number, seat) for seat in round.slots)
    return replace(round, slots=slots), [WaitForDevices(len(taken))]


def _apply(round: Round, event: Event, now: float) -> Step:
    """What a fact does to the seats; what it does to the state is in the table."""
    collecting = round.state == "collecting"
    match event:
        case DevicesAvailable(cohort=Cohort() as cohort) if round.state == "selecting":
            return _begin(round, cohort, now)
        case DevicesAvailable(members) if collecting:
            round, freed = _take_back(round, members, now)
            if not round.slots.free:
                return round, []
            slots, offered = seats.hand_out(round.slots, members, now, now + round.offer)
            return replace(round, slots=Seats(slots)), [*freed, *map(seats.OfferTask, offered)]
        case DevicesLeft(devices):
            return _pass_time(round, now, devices)
        case LeaseTaken(device, slot):
            return _put(round, *_seat(round, slot).leased_to(device, now, now + round.lease, closed=not collecting))
        case LeaseRenewed(device, slot, attempt):
            seat = _seat(round, slot)
            until = _least_until(round, seat, now)
            return _put(round, *seat.renewed_by(device, attempt, until, closed=not collecting))
        case UpdateArrived(device, slot, attempt):
            answered, effect = _seat(round, slot).answered_by(device, attempt, now, closed=not collecting)
            return _put(_with_deadline(round, _slowest(round, answered), now), answered, effect)
        case UpdateUploaded(device, slot, attempt):
            seat = _seat(round, slot)
            return _put(round, *seat.answered_by(device, attempt, now, closed=not collecting, checked=False))
        case UpdateChecked(device, slot, attempt, sound=True):
            answered, effect = _seat(round, slot).found_sound(device, attempt, now, closed=not collecting)
            return _put(_with_deadline(round, _slowest(round, answered), now), answered, effect)
        case UpdateChecked(device, slot, attempt) if collecting:
            return _free(round, slot, _seat(round, slot).failed_by(device, attempt, now, "uploaded"))
        case TaskReturned(device, slot, attempt) if collecting:
            return _free(round, slot, _seat(round, slot).failed_by(device, attempt, now))
        case CloseRequested() if collecting and (round.deadline is None or now < round.deadline):
            return replace(round, deadline=now), []
        case CloseFailed(reason):
            return replace(round, tries=round.tries + 1, reason=reason), []
        case Committed():
            return replace(round, reason=""), []
        case Abandon(reason) | Stop(reason) if TRANSITIONS[round.state, type(event)] != round.state:
            return replace(round, reason=reason), []
    return round, []


def _begin(round: Round, cohort: Cohort, now: float) -> Step:
    if cohort.missing:
        return round, [WaitForDevices(cohort.missing)]
    slots = Seats(seat.offered_to(seat.member, now, now + round.offer) for seat in cohort.seats)
    deadline = None if round.patience is None else now + round.patience
    begun = replace(round, slots=slots, wanted=cohort.wanted, quorum=cohort.quorum, deadline=deadline)
    known = [seat.member.seconds for seat in slots if seat.member.seconds is not None]
    begun = _with_deadline(begun, max(known) if 2 * len(known) >= len(slots) else None, now)
    warnings = [WarnLayerUncovered(cohort.uncovered)] if cohort.uncovered else []
    return begun, [*warnings, *map(seats.OfferTask, slots)]


def _slowest(round: Round, answered: Seat) -> float | None:
    """Seconds that the device with the most to do takes, by what another took."""
    if answered.state != "arrived" or answered.seconds is None:
        return None
    return round.slots.most_work(answered.member) * answered.seconds


def _with_deadline(round: Round, slowest: float | None, now: float) -> Round:
    """Let a deadline follow from what tasks take, if the job gives none."""
    if round.lateness is None or round.deadline is not None or slowest is None:
        return round
    return replace(round, deadline=now + min(max(LEAST_DEADLINE, OVERDUE * slowest), round.max_task))


def _seat(round: Round, number: int) -> Seat:
    return round.slots[number] if 0 <= number < len(round.slots) else _NOWHERE


def _free(round: Round, slot: int, failed: Seat) -> Step:
    return _put(round, failed, WaitForDevices(1)) if failed is not _seat(round, slot) else (round, [])


def _put(round: Round, seat: Seat, effect: Effect) -> Step:
    if seat is _seat(round, seat.number) or seat is _NOWHERE:
        return round, [effect]
    return replace(round, slots=round.slots.put(seat)), [effect]


_NOWHERE: Final = Seat(
    0, Member("none", "nowhere", 1), state="expired"
)  # like a seat that was never offered to the device
