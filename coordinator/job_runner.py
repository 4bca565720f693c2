"""One job at work: its round, its sums, and the facts that move them.

Everything that matters is in the database before anybody hears of it. The sums are not: after a restart they are folded
again from the bodies, and give the same bits in whatever order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from sqlalchemy import Insert, Table, Update, bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from coordinator.store.files import Files
from coordinator.store.schema import EventRow, JobRow, RoundRow, SeatRow, UpdateRow
from coordinator.summing import Summing
from federation import cohort, rounds
from federation.axes.cover import DeviceProfile
from federation.axes.sync import Rotating
from federation.exchange import Exchange, Inherit
from federation.job import Plan
from federation.manifest import Manifest
from federation.messages import Task
from federation.round_sums import Reached

Mark = tuple[Any, ...]


class JobRunner:
    """The round of a job that is open. All methods are called with the coordinator's lock held."""

    def __init__(self, row: JobRow, plan: Plan, manifest: Manifest, files: Files, reached: Reached) -> None:
        self.id = row.id
        self.plan = plan
        self.manifest = manifest
        self.files = files
        self.space = manifest.space
        self.summing = Summing(row.id, plan, manifest, files, reached)
        self.round: rounds.Round | None = None
        self.previous: cohort.Cohort | None = None
        self.paused_at: float | None = None
        self.close_at: float | None = None  # when to try again to close the round
        self.unfit: Mapping[str, str] = {}  # devices that can train nothing here, and why; new with every draw
        self._waiting_for: tuple[int, rounds.Effect] | None = None
        self._kept: tuple[cohort.Seat, ...] = ()  # the seats as the database has them
        self._notes: list[dict[str, Any]] = []  # events that are not in the database yet

    def mark(self) -> Mark:
        """What a transaction that fails has to bring back."""
        return self.round, self.previous, self.paused_at, self._kept, self._waiting_for, self.unfit

    def back_to(self, mark: Mark) -> None:
        self.round, self.previous, self.paused_at, self._kept, self._waiting_for, self.unfit = mark
        self._notes = []

    def open(self, session: Session, number: int, now: float) -> None:
        """The next round."""
        limits = self.plan.bounds
        self.save(session)
        self.previous, self._kept = _cohort(self.round) if self.round else None, ()
        self.round = rounds.open_round(
            number, self.plan.seed, self.plan.participation, now, lease=limits.lease, offer=limits.offer
        )
        self.summing.forget()
        session.add(
            RoundRow(
                job=self.id,
                number=number,
                state=self.round.state,
                body=rounds.encode_head(self.round),
                summary={},
                opened_at=now,
                closed_at=None,
            )
        )

    def restore(self, session: Session, row: RoundRow) -> None:
        """The round as the database has it; its bodies are folded again by whoever calls this."""
        self.round = self._decoded(session, row)
        self._kept = self.round.slots
        before = session.get(RoundRow, (self.id, row.number - 1))
        self.previous = _cohort(self._decoded(session, before)) if before else None
        self.summing.resume(row.number, before.summary if before else None)

    def _decoded(self, session: Session, row: RoundRow) -> rounds.Round:
        mine = select(SeatRow.body).where(SeatRow.job == self.id, SeatRow.round == row.number)
        return rounds.decode(row.body, session.scalars(mine.order_by(SeatRow.number)))

    def advance(self, session: Session, event: rounds.Event, now: float) -> tuple[rounds.Effect, ...]:
        """Apply a fact. Its seats and events are written by `save`, those of several facts at once."""
        assert self.round is not None
        before = self.round
        self.round, effects = rounds.advance(before, event, now)
        head = rounds.encode_head(self.round)
        if self.round is not before and head != rounds.encode_head(before):
            row = session.get_one(RoundRow, (self.id, self.round.number))
            row.state, row.body = self.round.state, head
            if self.round.state in ("committed", "abandoned"):
                row.closed_at = now
        for effect in effects:
            self._tell(effect, now)
        return effects

    def save(self, session: Session) -> None:
        """Everything that the caller's transaction has to have in it before it ends."""
        if self.round is not None and self.round.slots is not self._kept:
            new = not self._kept
            changed = [
                {"of": self.id, "in": self.round.number, "at": seat.number, "body": rounds.encode_seat(seat)}
                for number, seat in enumerate(self.round.slots)
                if new or seat is not self._kept[number]
            ]
            if changed:
                _write(session, _NEW_SEAT if new else _SEAT, changed)
            self._kept = self.round.slots
        if self._notes:
            _write(session, _EVENT, self._notes)
            self._notes = []

    def note(self, kind: str, body: dict[str, Any], now: float) -> None:
        """Something for whoever watches."""
        self._notes.append({"job": self.id, "at": now, "kind": kind, "body": body})

    def _tell(self, effect: rounds.Effect, now: float) -> None:
        """What whoever watches wants to see."""
        assert self.round is not None
        shown = (
            rounds.WarnLayerUncovered,
            rounds.RoundAbandoned,
            rounds.WaitForDevices,
            rounds.WaitForUpdates,
            cohort.GrantLease,
            cohort.AcceptUpdate,
            cohort.RejectUpdate,
        )
        if isinstance(effect, rounds.WaitForDevices):  # devices ask again and again; watchers hear it once
            before, self._waiting_for = self._waiting_for, (self.round.number, effect)
            if before == self._waiting_for:
                return
        if isinstance(effect, rounds.CloseRound):  # of many seats, which can be read elsewhere
            self.note("CloseRound", {"round": self.round.number, "updates": len(effect.seats)}, now)
        elif isinstance(effect, shown):
            facts = {
                name: rounds.encode_seat(value) if isinstance(value, cohort.Seat) else value
                for name, value in vars(effect).items()
            }
            self.note(type(effect).__name__, {"round": self.round.number, **facts}, now)

    def assign(self, available: Iterable[str], profiles: dict[str, DeviceProfile]) -> cohort.Cohort:
        """The cohort of the round that is being selected."""
        assert self.round is not None
        return cohort.assign(
            self.plan.seed,
            self.round.number,
            available,
            profiles,
            self.plan.participation,
            self.plan.cover,
            self.manifest,
            self.plan.local.batch,
            self.previous,
        )

    def know_unfit(self, unfit: Mapping[str, str], now: float) -> None:
        """Whoever watches hears of each once."""
        assert self.round is not None
        for device, why in unfit.items():
            if self.unfit.get(device) != why:
                self.note("DeviceUnfit", {"round": self.round.number, "device": device, "message": why}, now)
        self.unfit = unfit

    def task_id(self, seat: cohort.Seat) -> str:
        assert self.round is not None
        return f"{self.id}-{self.round.number}-{seat.number}-{len(seat.holders)}"

    def task(self, session: Session, seat: cohort.Seat, seed: int) -> Task:
        """What the device of a seat is to do."""
        assert self.round is not None
        return self.plan.local.task(seat.member.boundary, self.round.number, seed, self._exchange(session, seat))

    def _exchange(self, session: Session, seat: cohort.Seat) -> Exchange:
        assert self.round is not None
        plan, number = self.plan, self.round.number
        last = None
        if plan.choices.keeps_state:
            mine = select(UpdateRow.round, UpdateRow.task).where(
                UpdateRow.job == self.id, UpdateRow.device == seat.member.device, UpdateRow.round < number
            )
            row = session.execute(mine.order_by(UpdateRow.round.desc()).limit(1)).first()
            last = (row.round, row.task) if row else None
        return plan.choices.exchange(
            plan.when(number),
            self.summing.facts,
            steps=plan.local.steps,
            window_from=plan.window_from(number),
            last=last,
            inherit=self.inherit(session, seat.number),
        )

    def hands_on(self, number: int) -> bool:
        """Whether a round begins with the local models of the round before."""
        sync = self.plan.choices.sync
        local = isinstance(sync, Rotating) and sync.redistribute == "local"
        return local and number > 0 and self.plan.when(number - 1).ends_window

    def inherit(self, session: Session, slot: int) -> Inherit | None:
        """Whose local model the device of a slot goes on with."""
        assert self.round is not None
        if not self.hands_on(self.round.number):
            return None
        theirs = select(UpdateRow).where(
            UpdateRow.job == self.id, UpdateRow.round == self.round.number - 1, UpdateRow.slot == slot
        )
        row = session.scalars(theirs).first()
        seats = self.previous.seats if self.previous else ()
        return Inherit(row.task, seats[slot].member.boundary) if row is not None and slot < len(seats) else None

    def contributors(self, session: Session) -> int:
        """How many devices have taken part so far, this round included."""
        assert self.round is not None
        mine = select(func.count(UpdateRow.device.distinct()))
        return session.scalar(mine.where(UpdateRow.job == self.id, UpdateRow.round <= self.round.number)) or 1

    def updates(self, session: Session, before: int = 0) -> list[UpdateRow]:
        """What was acknowledged in this round, or so many rounds before, in the order of the slots."""
        assert self.round is not None
        mine = select(UpdateRow).where(UpdateRow.job == self.id, UpdateRow.round == self.round.number - before)
        return list(session.scalars(mine.order_by(UpdateRow.slot)))

    def needed(self, session: Session) -> list[UpdateRow]:
        """The updates whose bodies are of use: those of this round, and those that it goes on from."""
        handed_on = self.round is not None and self.hands_on(self.round.number)
        return [*self.updates(session), *(self.updates(session, before=1) if handed_on else ())]


# Statements about tables: many rows at a time take a fraction of what the same takes as objects.
_seats, _events = cast(Table, SeatRow.__table__), cast(Table, EventRow.__table__)
_KEY: dict[str, Any] = {"job": bindparam("of"), "round": bindparam("in"), "number": bindparam("at")}
_NEW_SEAT: Final = insert(_seats).values(**_KEY, body=bindparam("body"))
_SEAT: Final = (
    update(_seats).where(*(_seats.c[name] == value for name, value in _KEY.items())).values(body=bindparam("body"))
)
_EVENT: Final = insert(_events)


def _write(session: Session, statement: Insert | Update, rows: list[dict[str, Any]]) -> None:
    session.flush()  # what these rows refer to
    session.connection().execute(statement, rows)


def _cohort(round: rounds.Round) -> cohort.Cohort | None:
    """Who took part, for the next round of a window."""
    return cohort.Cohort(round.slots, round.wanted, round.quorum) if round.slots else None
