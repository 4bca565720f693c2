"""The cohort of a round: the device of every slot, what it trains, and how a seat is leased and answered.

Pure: the same arguments give the same cohort, on every machine and after every restart. What the seats together mean
for the round is the business of rounds.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, get_args

from federation.axes.cover import Cover, DeviceProfile, ensure_coverage, uncovered_layers
from federation.axes.participate import Participation, Slot
from federation.coverage import coverage, width_of
from federation.errors import InputError, OutOfMemory
from federation.manifest import Manifest

_NOTHING_KNOWN: Final[Mapping[str, float]] = MappingProxyType({})
CHECK: Final = 600.0  # seconds in which an update that was uploaded is checked; after that its seat is free again
SeatState = Literal["offered", "leased", "uploaded", "arrived", "expired", "failed"]
Reason = Literal["late", "duplicate", "not_yours", "expired", "round_closed"]
Load = Callable[[DeviceProfile], tuple[int | None, int]]  # samples at once, None: the manifest's; vectors of a step


@dataclass(frozen=True)
class Member:
    """A device and what it would train."""

    device: str
    boundary: str  # what it trains, as text: federation/coverage.py
    trains: int  # layers; a device that takes over a slot should train as many
    seconds: float | None = None  # that its tasks in this job took so far
    work: float = 1.0  # multiply-accumulates of what it trains, or any measure by which devices compare

    def __post_init__(self) -> None:
        if not self.device or not self.boundary or self.trains < 1 or not 0 < self.work < math.inf:
            raise InputError(f"member: expected a device, a boundary and at least 1 trained layer, got {self!r}")


@dataclass(frozen=True)
class Seat:
    """A slot of a cohort and the device in it: offered, leased, arrived; or expired or failed, and free for another.

    Between lease and arrival it may be uploaded: what the device sent lies in object storage and is not checked yet.
    Its update does not count. Where no verdict comes such a seat runs out, too, whatever its device says.
    """

    number: int
    member: Member  # whose turn it is, or was last
    count: int = 1  # times that its update counts
    state: SeatState = "offered"
    until: float = 0.0  # offer, lease and check: when they run out
    holders: tuple[str, ...] = ()  # all devices that took it; the last of n holds attempt n
    since: float = 0.0  # when it came into its state
    seconds: float | None = None  # from the lease to the update
    began: float | None = None  # when it first came to a device that had not had it; returns do not set it back

    def __post_init__(self) -> None:
        if self.number < 0 or self.count < 1 or not math.isfinite(self.until):
            raise InputError(f"seat: expected a number from 0, a count from 1 and a finite time, got {self!r}")
        if self.state not in get_args(SeatState):
            raise InputError(f"seat {self.number}: expected {', '.join(get_args(SeatState))}, got {self.state!r}")
        if self.state not in ("offered", "expired") and (not self.holders or self.holders[-1] != self.member.device):
            raise InputError(f"seat {self.number} is {self.state}: expected its device to be the last holder")

    @property
    def free(self) -> bool:
        return self.state in ("expired", "failed")

    @property
    def running(self) -> bool:
        """Whether its device is awaited."""
        return self.state in ("offered", "leased")

    def is_over(self, now: float) -> bool:
        """Whether its offer, its lease or the time for its check has run out."""
        return self.until <= now and self.runs_out

    @property
    def runs_out(self) -> bool:
        return self.running or self.state == "uploaded"

    @property
    def answered(self) -> bool:
        """Whether the device has sent its update."""
        return self.state in ("uploaded", "arrived")

    def offered_to(self, member: Member, now: float, until: float) -> Seat:
        began = self.began if member.device in self.holders else now
        return replace(self, member=member, state="offered", until=until, since=now, began=began)

    def heir(self, waiting: Iterable[Member]) -> Member | None:
        """Choose the next device of a free seat: rather one that trains as much and has not had it; then the first."""
        return min(waiting, key=lambda m: (m.trains < self.member.trains, m.device in self.holders), default=None)

    def leased_to(self, device: str, now: float, until: float, *, closed: bool) -> tuple[Seat, SeatEffect]:
        if self.free or self.member.device != device:
            return self, RefuseLease(device, "expired" if device in self.holders else "not_yours")
        if closed or self.answered:
            return self, RefuseLease(device, "round_closed" if closed else "duplicate")
        began = self.began if device in self.holders else now
        first = replace(self, state="leased", until=until, since=now, began=began, holders=(*self.holders, device))
        seat = first if self.state == "offered" else self
        return seat, GrantLease(seat)

    def renewed_by(self, device: str, attempt: int, until: float, *, closed: bool) -> tuple[Seat, SeatEffect]:
        """Only the holder of the running lease keeps it."""
        if not self._held(device, attempt):
            return self, RefuseLease(device, "not_yours")
        if closed or self.answered:
            return self, RefuseLease(device, "round_closed" if closed else "duplicate")
        if self.state != "leased" or attempt != len(self.holders):
            return self, RefuseLease(device, "expired" if self.member.device == device else "late")
        seat = replace(self, until=max(until, self.until))
        return seat, RenewLease(seat)

    def answered_by(
        self, device: str, attempt: int, now: float, *, closed: bool, checked: bool = True
    ) -> tuple[Seat, SeatEffect]:
        """Only the holder of the running lease is accepted; and told so again, whenever it repeats itself."""
        if not self._held(device, attempt):
            return self, RejectUpdate(device, "not_yours")
        latest = attempt == len(self.holders)
        if latest and self.answered:
            return self, AlreadyAccepted(self)
        if closed:
            return self, RejectUpdate(device, "round_closed")
        if not latest:
            own = self.answered and self.member.device == device
            return self, RejectUpdate(device, "duplicate" if own else "late")
        if self.state != "leased":
            return self, RejectUpdate(device, "expired")
        seat = replace(self, state="arrived", since=now, seconds=now - self.since)
        held = replace(seat, state="uploaded", until=now + CHECK)
        return (seat, AcceptUpdate(seat)) if checked else (held, HoldUpdate(held))

    def found_sound(self, device: str, attempt: int, now: float, *, closed: bool) -> tuple[Seat, SeatEffect]:
        """Let what was uploaded count."""
        if not self._runs(device, attempt, "uploaded"):
            return self, AlreadyAccepted(self) if self._runs(device, attempt, "arrived") else RejectUpdate(
                device, "late"
            )
        if closed:
            return self, RejectUpdate(device, "round_closed")
        seat = replace(self, state="arrived", since=now)
        return seat, AcceptUpdate(seat)

    def failed_by(self, device: str, attempt: int, now: float, state: SeatState = "leased") -> Seat:
        """Free, if it was the running attempt and in a state: at work, or uploaded (and found unsound)."""
        return replace(self, state="failed", since=now, seconds=None) if self._runs(device, attempt, state) else self

    def is_at_work(self, device: str, attempt: int) -> bool:
        """Whether a device holds the running attempt."""
        return self._runs(device, attempt, "leased")

    def _runs(self, device: str, attempt: int, state: SeatState) -> bool:
        return self.state == state and attempt == len(self.holders) and self._held(device, attempt)

    def _held(self, device: str, attempt: int) -> bool:
        return 1 <= attempt <= len(self.holders) and self.holders[attempt - 1] == device


@dataclass(frozen=True)
class LeaseTaken:  # a device came for its task
    device: str
    slot: int


@dataclass(frozen=True)
class LeaseRenewed:  # a device is at work still
    device: str
    slot: int
    attempt: int


@dataclass(frozen=True)
class UpdateArrived:  # received whole and found sound
    device: str
    slot: int
    attempt: int


@dataclass(frozen=True)
class UpdateUploaded:  # it lies in object storage, as its device says
    device: str
    slot: int
    attempt: int


@dataclass(frozen=True)
class UpdateChecked:  # what was uploaded was looked at
    device: str
    slot: int
    attempt: int
    sound: bool


@dataclass(frozen=True)
class TaskReturned:  # the device gives up, or what it sent is unsound
    device: str
    slot: int
    attempt: int


@dataclass(frozen=True)
class OfferTask:
    seat: Seat


@dataclass(frozen=True)
class GrantLease:  # again, if the device asks again
    seat: Seat


@dataclass(frozen=True)
class RenewLease:
    seat: Seat


@dataclass(frozen=True)
class RefuseLease:
    device: str
    reason: Reason


@dataclass(frozen=True)
class AcceptUpdate:
    seat: Seat


@dataclass(frozen=True)
class HoldUpdate:  # to be checked
    seat: Seat


@dataclass(frozen=True)
class AlreadyAccepted:  # a repeated upload: acknowledged, not counted again
    seat: Seat


@dataclass(frozen=True)
class RejectUpdate:
    device: str
    reason: Reason


SeatFact = LeaseTaken | LeaseRenewed | UpdateArrived | UpdateUploaded | UpdateChecked | TaskReturned
SeatEffect = (
    OfferTask | GrantLease | RenewLease | RefuseLease | AcceptUpdate | HoldUpdate | AlreadyAccepted | RejectUpdate
)


@dataclass(frozen=True)
class Cohort:
    """The outcome of a draw. Without seats the round cannot start yet: `missing` says how many devices it takes."""

    seats: tuple[Seat, ...] = ()
    wanted: int = 0  # draws that make a full round; seats beyond are over-selected
    quorum: int = 0  # of these
    missing: int = 0
    uncovered: tuple[str, ...] = ()  # layers that none of them trains
    unfit: tuple[tuple[str, str], ...] = ()  # devices that can train nothing here, and why

    def __post_init__(self) -> None:
        counts = [seat.count for seat in self.seats]
        if [seat.number for seat in self.seats] != list(range(len(counts))):
            raise InputError("cohort: expected seats numbered from 0")
        if len({seat.member.device for seat in self.seats}) != len(counts):
            raise InputError("cohort: expected every device in one seat; several draws of it are its count")
        if not counts:
            if (self.wanted, self.quorum) != (0, 0) or self.missing < 1:
                raise InputError("cohort: expected seats, or how many devices are missing")
        elif not 1 <= self.quorum <= self.wanted <= sum(counts) or self.missing:
            raise InputError(
                f"cohort: expected 1 <= quorum <= wanted <= {sum(counts)} draws and no device missing, "
                f"got {self.quorum}, {self.wanted} and {self.missing}"
            )
        elif max(counts) > 1 and self.wanted != sum(counts):
            raise InputError("cohort: expected no over-selection where an update counts more than once")


def member_of(
    device: str,
    profile: DeviceProfile,
    cover: Cover,
    manifest: Manifest,
    batch: int | None,
    seconds: float | None = None,
    buffers: int = 1,
) -> Member:
    """A device that may take over a seat."""
    return _member(device, cover.cover(manifest, profile, batch, buffers), manifest, seconds)


def assign(
    seed: int,
    round_number: int,
    available: Iterable[str],
    profiles: Mapping[str, DeviceProfile],
    participation: Participation,
    cover: Cover,
    manifest: Manifest,
    load: Load,
    previous: Cohort | None = None,
    seconds: Mapping[str, float] = _NOTHING_KNOWN,
    resting: int = 0,
    away: int = 0,
) -> Cohort:
    """Draw the cohort of a round. `previous` is the cohort of the round before, for the rounds inside a window.

    `seconds` has what tasks of devices took before. So many devices are `resting`: they are there, and a round does not
    wait for them to begin, but they are not invited. What the job says in numbers of devices is kept all the same.
    So many more are `away`: they come back, and count as there; a round takes as many devices as with them, of others.

    Inside a window a device that is still there keeps its slot, also if others have joined since; a device that has
    left is replaced by the next one of the window's random order, for the rest of the window. A device without a
    profile is taken as able to train everything. `load` says for what a device's memory is predicted.
    """
    fit, reasons = _fit(available, profiles, cover, manifest, load)
    if missing := missing_to_begin(participation, len(fit), resting, away):
        return Cohort(missing=missing, unfit=reasons)
    order = participation.order(fit, seed, round_number)
    fixed: set[str] = set()
    if previous is None or not previous.seats or participation.starts_window(round_number):
        slots = participation.draw(fit, seed, round_number, away)
        wanted = participation.wanted(len(fit) + away)
    else:
        fixed = {seat.member.device for seat in previous.seats} & fit.keys()
        slots = _carried_over(previous, fixed, order)
        wanted = min(previous.wanted, sum(slot.count for slot in slots))
    if participation.balance and not participation.replacement:
        drawn = {slot.device for slot in slots}
        reserve = [device for device in order if device not in drawn]
        slots = ensure_coverage(manifest, slots, fit, reserve, fixed=fixed)
    return Cohort(
        seats=tuple(
            Seat(slot.number, _member(slot.device, fit[slot.device], manifest, seconds.get(slot.device)), slot.count)
            for slot in slots
        ),
        wanted=wanted,
        quorum=participation.quorum_of(wanted),
        uncovered=tuple(uncovered_layers(manifest, (fit[slot.device] for slot in slots))),
        unfit=reasons,
    )


def missing_to_begin(participation: Participation, fit: int, resting: int = 0, away: int = 0) -> int:
    """Count the devices that are missing before a cohort can be drawn, if so many are fit; see `assign`."""
    there = fit + away
    seats = min(participation.invited(there), there)
    missing = max(max(participation.needed - resting, participation.least) - there, seats - fit)
    return max(1, missing) if missing > 0 or not fit else 0


def _fit(
    available: Iterable[str],
    profiles: Mapping[str, DeviceProfile],
    cover: Cover,
    manifest: Manifest,
    load: Load,
) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """What every available device trains; and of those that cannot train anything here, why not."""
    fit: dict[str, str] = {}
    unfit: dict[str, str] = {}
    known: dict[DeviceProfile, str | InputError | OutOfMemory] = {}  # many devices are of the same kind
    for device in sorted(set(available)):
        profile = profiles.get(device) or DeviceProfile()
        if profile not in known:
            try:
                known[profile] = cover.cover(manifest, profile, *load(profile))
            except (InputError, OutOfMemory) as error:  # one unfit device must not stop the others
                known[profile] = error
        found = known[profile]
        if isinstance(found, str):
            fit[device] = found
        else:
            unfit[device] = str(found)
    return fit, tuple(unfit.items())


def _member(device: str, text: str, manifest: Manifest, seconds: float | None) -> Member:
    covered = coverage(manifest, text)
    macs = sum(manifest.layers[layer].macs for layer in covered.layers) * width_of(covered.boundary) ** 2
    return Member(device, text, len(covered.layers), seconds, max(1.0, macs))


def _carried_over(previous: Cohort, fixed: set[str], order: Sequence[str]) -> list[Slot]:
    """Take over the slots of the round before; vacancies are filled in the given order, and the rest close up."""
    comers = iter([device for device in order if device not in fixed])
    slots = []
    for seat in previous.seats:
        device = seat.member.device if seat.member.device in fixed else next(comers, None)
        if device is not None:
            slots.append(Slot(seat.number, device, seat.count))
    return [replace(slot, number=number) for number, slot in enumerate(slots)]


def idle_among(seats: Iterable[Seat], waiting: Iterable[Member]) -> dict[str, Member]:
    """List the devices that wait and have neither a seat nor answered, by name."""
    busy = {seat.member.device for seat in seats if not seat.free}
    return {member.device: member for member in waiting if member.device not in busy}


def run_out(seats: Sequence[Seat], now: float, left: Collection[str] = ()) -> tuple[tuple[Seat, ...], int]:
    """Free the seats whose time is over, or whose device has left its work; and say how many these are."""
    over = [seat for seat in seats if seat.is_over(now) or (seat.member.device in left and seat.running)]
    after = list(seats)
    for seat in over:
        after[seat.number] = replace(seat, state="expired", since=min(seat.until, now), seconds=None)
    return tuple(after), len(over)


def hand_out(
    seats: Sequence[Seat], waiting: Iterable[Member], now: float, until: float
) -> tuple[tuple[Seat, ...], list[Seat]]:
    """Offer free seats to devices that wait and have none, and list the new offers.

    A device that has answered is not asked again: its data would count twice. A device that had another seat before
    leaves that to the device whose seat it takes: seats never name one device twice.
    """
    idle = idle_among(seats, waiting)
    if not idle:
        return tuple(seats), []
    after, offered = list(seats), []
    had = {seat.member.device: seat.number for seat in seats if seat.free}
    for number in range(len(after)):
        seat = after[number]
        heir = seat.heir(idle.values()) if seat.free else None
        if heir is not None:
            old = had.pop(heir.device, number)
            had.pop(seat.member.device, None)
            if old != number:
                after[old] = replace(after[old], member=seat.member, state="expired")
                had[seat.member.device] = old
            after[number] = seat.offered_to(heir, now, until)
            offered.append(after[number])
            del idle[heir.device]
    return tuple(after), offered


def one_seat_each(seats: Iterable[Seat]) -> tuple[Seat, ...]:
    """Let free seats forget a device that another seat names, as earlier programs recorded them."""
    known = list(seats)
    named = {seat.member.device for seat in known if not seat.free}
    for number, seat in enumerate(known):
        if seat.free and seat.member.device in named:
            known[number] = replace(seat, member=replace(seat.member, device=f"vacant-{number}"), state="expired")
        named.add(known[number].member.device)
    return tuple(known)
