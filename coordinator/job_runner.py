"""One job at work: its round, its accumulator, and the facts that move them.

Everything that matters is in the database before anybody hears of it. The accumulator is not: after a restart it is
folded again from the bodies, and gives the same bits in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from coordinator import cohort, rounds
from coordinator.aggregate import means, write_version
from coordinator.plan import Plan
from coordinator.robust import robust_moves
from coordinator.store.files import Files
from coordinator.store.schema import EventRow, JobRow, RoundRow, SeatRow, UpdateRow
from federation.accumulate import Accumulator
from federation.axes.cover import DeviceProfile
from federation.errors import EmbraceError
from federation.manifest import Boundary, Manifest
from federation.space import Vector
from federation.wire import CheckedUpdate, read_blocks, update_header

Reached = Callable[[str], None]  # told of points at which a test may end the process
Mark = tuple[Any, ...]


class JobRunner:
    """The round of a job that is open. All methods are called with the coordinator's lock held, but for `fold`."""

    def __init__(self, row: JobRow, plan: Plan, manifest: Manifest, files: Files, reached: Reached) -> None:
        self.id, self.plan, self.manifest, self.files = row.id, plan, manifest, files
        self.cover = plan.cover.build(plan.local.batch)
        self.space = manifest.space
        self._reached = reached
        self.round: rounds.Round | None = None
        self.previous: cohort.Cohort | None = None
        self.total: Accumulator | None = None
        self.folded: dict[str, CheckedUpdate] = {}  # by task
        self.paused_at: float | None = None
        self.close_at: float | None = None  # when to try again to close the round
        self._waiting_for: tuple[int, rounds.Effect] | None = None
        self._kept: tuple[cohort.Seat, ...] = ()  # the seats as the database has them
        self._notes: list[dict[str, Any]] = []  # events that are not in the database yet
        self._header_bounds: dict[int, int] = {}

    def mark(self) -> Mark:
        """What a transaction that fails has to bring back."""
        return self.round, self.previous, self.paused_at, self._kept, self._waiting_for

    def back_to(self, mark: Mark) -> None:
        self.round, self.previous, self.paused_at, self._kept, self._waiting_for = mark
        self._notes = []

    def open(self, session: Session, number: int, now: float) -> None:
        """The next round."""
        limits = self.plan.bounds
        self.save(session)
        self.previous, self._kept = _cohort(self.round) if self.round else None, ()
        self.round = rounds.open_round(
            number, self.plan.seed, self.plan.participate, now, lease=limits.lease, offer=limits.offer
        )
        self.forget()
        session.add(
            RoundRow(
                job=self.id, number=number, state=self.round.state, body=rounds.encode_head(self.round),
                summary={}, opened_at=now, closed_at=None,
            )
        )  # fmt: skip

    def forget(self) -> None:
        """Begin the sums anew."""
        self.total, self.folded = None, {}

    def restore(self, session: Session, row: RoundRow) -> None:
        """The round as the database has it; its bodies are folded again by whoever calls this."""
        self.round = self._decoded(session, row)
        self._kept = self.round.slots
        before = session.get(RoundRow, (self.id, row.number - 1))
        self.previous = _cohort(self._decoded(session, before)) if before else None

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
                {"job": self.id, "round": self.round.number, "number": seat.number, "body": rounds.encode_seat(seat)}
                for number, seat in enumerate(self.round.slots)
                if new or seat is not self._kept[number]
            ]
            if changed:
                session.execute(insert(SeatRow) if new else update(SeatRow), changed)
            self._kept = self.round.slots
        if self._notes:
            session.execute(insert(EventRow), self._notes)
            self._notes = []

    def note(self, kind: str, body: dict[str, Any], now: float) -> None:
        """Something for whoever watches."""
        self._notes.append({"job": self.id, "at": now, "kind": kind, "body": body})

    def _tell(self, effect: rounds.Effect, now: float) -> None:
        """What whoever watches wants to see."""
        assert self.round is not None
        shown = (
            rounds.CloseRound, rounds.WarnLayerUncovered, rounds.RoundAbandoned, rounds.WaitForDevices,
            rounds.WaitForUpdates, cohort.GrantLease, cohort.AcceptUpdate, cohort.RejectUpdate,
        )  # fmt: skip
        if isinstance(effect, rounds.WaitForDevices):  # devices ask again and again; watchers hear it once
            before, self._waiting_for = self._waiting_for, (self.round.number, effect)
            if before == self._waiting_for:
                return
        if isinstance(effect, shown):
            self.note(type(effect).__name__, {"round": self.round.number, **asdict(effect)}, now)

    def assign(self, available: Iterable[str], profiles: dict[str, DeviceProfile]) -> cohort.Cohort:
        """The cohort of the round that is being selected."""
        assert self.round is not None
        return cohort.assign(
            self.plan.seed, self.round.number, available, profiles, self.plan.participate, self.cover, self.manifest,
            self.previous,
        )  # fmt: skip

    def boundary(self, seat: cohort.Seat) -> Boundary:
        return self.manifest.boundary(seat.member.boundary)

    def header_bound(self, layer: int) -> int:
        """Bytes for the header of an update from this layer on, with room for another way of writing the same."""
        if layer not in self._header_bounds:
            self._header_bounds[layer] = 4 * len(update_header(self.space, layer)) + 4096
        return self._header_bounds[layer]

    def task_id(self, seat: cohort.Seat) -> str:
        assert self.round is not None
        return f"{self.id}-{self.round.number}-{seat.number}-{len(seat.holders)}"

    def fold(self, row: UpdateRow, checked: CheckedUpdate, body: Path) -> None:
        """Add a body. The order of arrival makes no difference to a single bit."""
        assert self.round is not None
        if self.plan.serve.combine == "mean":
            if self.total is None:
                self.total = self._accumulator()
            seat = self.round.slots[row.slot]
            with body.open("rb") as file:
                self.total.fold(
                    checked.first_layer, self._clipped(read_blocks(file, checked), checked.norm),
                    row.weight * seat.count, checked.squares, largest=checked.largest,
                )  # fmt: skip
        last = next(reversed(self.folded.values()), checked)  # most devices write the same header: it is kept once
        self.folded[row.task] = replace(checked, places=last.places) if last.places == checked.places else checked

    def _accumulator(self) -> Accumulator:
        assert self.round is not None
        draws = sum(seat.count for seat in self.round.slots)
        most = draws * self.plan.weigh.weight(self.plan.bounds.max_samples)
        return Accumulator(self.space, max_value=self.plan.bounds.max_value, max_weight=max(most, 1.0))

    def _clipped(self, blocks: Iterable[tuple[slice, Vector]], norm: float) -> Iterable[tuple[slice, Vector]]:
        """The blocks of an update, shortened if it is too long."""
        most = self.plan.serve.clip_norm
        factor = np.float32(most / norm) if most is not None and norm > most else None
        for number, (at, values) in enumerate(blocks):
            if number == 1:
                self._reached("mid-fold")
            yield at, values if factor is None else values * factor

    def write_next(self, version: int, updates: list[UpdateRow]) -> None:
        """The weights after this round."""
        serve = self.plan.serve
        if not self.folded:
            raise EmbraceError(f"round {self.round.number if self.round else '?'} closed without an update")
        if serve.combine == "mean":
            assert self.total is not None
            moves = means(self.total, self.space)
        else:
            bodies = [(self.folded[row.task], self.files.arrived(row.task, row.sha256)) for row in updates]
            moves = robust_moves(bodies, serve.combine, serve.trim)
        old, new = self.files.version(self.id, version), self.files.version(self.id, version + 1)
        write_version(old, new, self.space, moves, serve.rate)

    def updates(self, session: Session) -> list[UpdateRow]:
        """What was acknowledged in this round, in the order of the slots."""
        assert self.round is not None
        mine = select(UpdateRow).where(UpdateRow.job == self.id, UpdateRow.round == self.round.number)
        return list(session.scalars(mine.order_by(UpdateRow.slot)))

    def summary(self, updates: list[UpdateRow]) -> dict[str, Any]:
        """What the round came to."""
        first = [checked.first_layer for checked in self.folded.values()]
        return {
            "updates": len(updates),
            "samples": sum(row.samples for row in updates),
            "bytes_up": sum(row.bytes for row in updates),
            "loss": _mean([row.report.get("loss") for row in updates]),
            "trainers": {layer.name: sum(f <= i for f in first) for i, layer in enumerate(self.manifest.layers)},
        }


def _cohort(round: rounds.Round) -> cohort.Cohort | None:
    """Who took part, for the next round of a window."""
    return cohort.Cohort(round.slots, round.wanted, round.quorum) if round.slots else None


def _mean(values: list[Any]) -> float | None:
    """Of what devices say: any number of any size may be among it."""
    kinds = (value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))
    known = [float(value) for value in kinds if abs(value) < 1e30]
    return sum(known) / len(known) if known else None
