"""The use cases of devices: wait for a task, send an update, give up. No HTTP here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import cohort, rounds
from coordinator.errors import NotAllowed, NotFound, Refused
from coordinator.job_runner import JobRunner
from coordinator.keeper import JobKeeper
from coordinator.store.files import publish
from coordinator.store.schema import DeviceRow, EventRow, JobRow, UpdateRow
from federation.axes.cover import DeviceProfile
from federation.decode import decode
from federation.errors import EmbraceError, InputError
from federation.messages import encode_task
from federation.wire import CheckedUpdate, Limits, UpdateDecoder, update_header

log = logging.getLogger("embrace.coordinator")
PRESENCE = 60.0  # seconds after which a device that was not heard of counts as gone


@dataclass(frozen=True)
class TaskOffer:
    """A task as a device gets it."""

    id: str
    job: str
    bundle: str
    version: int
    lease_until: float
    work: dict[str, Any]  # messages.Task, rules as JSON


@dataclass(frozen=True)
class Receiving:
    """Where an update goes while it arrives, and what it has to be."""

    task: str
    path: Path
    decoder: UpdateDecoder


class Coordinator(JobKeeper):
    """Everything the API can do."""

    def revoke(self, device: str) -> None:
        """Shut a device out; what it holds is free for another."""
        with self._lock, self._transaction(*self._runners.values()) as session:
            row = session.get(DeviceRow, device)
            if row is None:
                raise NotFound(f"there is no device {device!r}")
            row.revoked = True
            for runner in self._runners.values():
                self._advance(session, runner, rounds.DevicesLeft((device,)))
            self._then.append(self.bell.ring)

    def next_task(self, device: str) -> TaskOffer | None:
        """A task for a device, if there is one; the bell says when to ask again."""
        with self._lock:
            return None if self.leaving else self._try_task(device)

    def receive(self, device: str, task: str) -> Receiving:
        """Prepare for an update: only the device that holds the task may send it."""
        with self._lock:
            with self.sessions() as session:
                known = session.get(UpdateRow, task)
            if known is not None and known.device == device:  # its round may be over since
                raise Refused("this update has arrived already", "duplicate")
            runner, seat, _ = self._held(device, task)
            bounds = runner.plan.bounds
            layer = runner.boundary(seat).layer
            header = 4 * len(update_header(runner.space, layer)) + 4096  # room for another way of writing the same
            limits = Limits(max_header_bytes=header, max_norm=bounds.max_norm, max_value=bounds.max_value)
            decoder = UpdateDecoder(runner.space, layer, limits)
            return Receiving(task, self.files.arriving(task), decoder)

    def accept(
        self, device: str, receiving: Receiving, checked: CheckedUpdate, sha256: str, report: dict[str, Any]
    ) -> None:
        """Record an update that is whole and sound. When this returns, it is never lost."""
        body = self.files.arrived(receiving.task, sha256)
        try:
            publish(receiving.path, body)
            self._reached("after-spool")
            with self._lock:
                answer = self._record(device, receiving.task, checked, sha256, report)
            if isinstance(answer, cohort.RejectUpdate):
                raise Refused(f"the update of task {receiving.task} does not count: {answer.reason}", answer.reason)
        except BaseException:
            receiving.path.unlink(missing_ok=True)
            with self._lock:
                if not self._counts(receiving.task, sha256):
                    body.unlink(missing_ok=True)
            raise

    def _record(
        self, device: str, task: str, checked: CheckedUpdate, sha256: str, report: dict[str, Any]
    ) -> rounds.Effect:
        runner, seat, attempt = self._held(device, task)
        assert runner.round is not None
        samples = _samples(report, runner.plan.bounds.max_samples)
        number = runner.round.number
        with self._transaction(runner) as session:
            effects = self._advance(session, runner, cohort.UpdateArrived(device, seat.number, attempt))
            answer = next(e for e in effects if isinstance(e, _ANSWERS))
            if isinstance(answer, cohort.AcceptUpdate):
                row = UpdateRow(
                    task=task, job=runner.id, round=number, slot=seat.number, device=device,
                    sha256=sha256, bytes=checked.size, samples=samples,
                    weight=runner.plan.weigh.weight(samples), report=report, arrived_at=self.clock(),
                )  # fmt: skip
                session.add(row)
                fold = partial(self._fold, runner, row, checked)  # before the round is closed, if this is the last
                self._then[:0] = [partial(self._reached, "after-record"), partial(self._work.put, fold)]
            elif isinstance(answer, cohort.AlreadyAccepted):  # twice at once
                raise Refused("this update has arrived already", "duplicate")
        return answer

    def _counts(self, task: str, sha256: str) -> bool:
        """Whether this body is part of a round that is open."""
        runner = self._runners.get(task.partition("-")[0])
        with self.sessions() as session:
            row = session.get(UpdateRow, task)
        if row is None or row.sha256 != sha256 or runner is None or runner.round is None:
            return False
        return runner.round.number == row.round

    def fail_task(self, device: str, task: str, reason: str, message: str) -> None:
        """A device gives up; its slot is free for another."""
        with self._lock:
            runner, seat, attempt = self._held(device, task)
            with self._transaction(runner) as session:
                self._advance(session, runner, cohort.TaskFailed(device, seat.number, attempt))
                body = {"task": task, "device": device, "reason": reason, "message": message}
                session.add(EventRow(job=runner.id, at=self.clock(), kind="TaskFailed", body=body))

    def _try_task(self, device: str) -> TaskOffer | None:
        now = self.clock()
        with self._transaction(*self._runners.values()) as session:
            row = session.get_one(DeviceRow, device)
            if row.revoked:
                raise NotAllowed("this device was shut out")
            if not now - PRESENCE / 8 < row.seen_at <= now:  # a fleet that waits does not write all the time
                row.seen_at = now
            profile = decode(DeviceProfile, row.profile, "profile", defaults=True)
            running = set(session.scalars(select(JobRow.id).where(JobRow.state == "running")))
            for runner in list(self._runners.values()):
                if runner.id in running and runner.round is not None:
                    offer = self._offer(session, runner, device, profile)
                    if offer is not None:
                        return offer
        return None

    def _offer(self, session: Session, runner: JobRunner, device: str, profile: DeviceProfile) -> TaskOffer | None:
        assert runner.round is not None
        if runner.round.state == "selecting":
            profiles = self._present(session)
            self._advance(session, runner, rounds.DevicesAvailable(cohort=runner.assign(profiles, profiles)))
        elif runner.round.state == "collecting" and runner.round.seat_of(device) is None:
            try:
                member = cohort.member_of(device, profile, runner.cover, runner.manifest)
            except EmbraceError:  # a device that can train nothing here
                return None
            self._advance(session, runner, rounds.DevicesAvailable((member,)))
        seat = runner.round.seat_of(device)
        if runner.round.state != "collecting" or seat is None or seat.state == "arrived":
            return None
        effects = self._advance(session, runner, cohort.LeaseTaken(device, seat.number))
        granted = next((e.seat for e in effects if isinstance(e, cohort.GrantLease)), None)
        return self._task(session, runner, granted) if granted else None

    def _task(self, session: Session, runner: JobRunner, seat: cohort.Seat) -> TaskOffer:
        assert runner.round is not None
        job = session.get_one(JobRow, runner.id)
        seed = runner.plan.seed * 1_000_003 + seat.number
        work = encode_task(runner.plan.local.task(seat.member.boundary, runner.round.number, seed))
        return TaskOffer(runner.task_id(seat), job.id, job.bundle, job.version, seat.until, work)

    def _present(self, session: Session) -> dict[str, DeviceProfile]:
        """Devices that were heard of lately."""
        here = select(DeviceRow).where(DeviceRow.revoked.is_(False), DeviceRow.seen_at > self.clock() - PRESENCE)
        return {row.id: decode(DeviceProfile, row.profile, "profile", defaults=True) for row in session.scalars(here)}

    def _held(self, device: str, task: str) -> tuple[JobRunner, cohort.Seat, int]:
        """The seat that a task is about, if it ever was this device's."""
        job, _, rest = task.partition("-")
        try:
            number, slot, attempt = map(int, rest.split("-"))
        except ValueError:
            raise NotFound(f"there is no task {task!r}") from None
        if task != f"{job}-{number}-{slot}-{attempt}":  # one task has one name
            raise NotFound(f"there is no task {task!r}")
        runner = self._runners.get(job)
        if runner is None or runner.round is None:
            with self.sessions() as session:
                row = session.get(JobRow, job)
            if row is not None:
                raise Refused(f"job {job} is {row.state}", "round_closed")
            raise NotFound(f"there is no task {task!r}")
        if number != runner.round.number:
            raise Refused(f"round {number} is over; the job is in round {runner.round.number}", "round_closed")
        slots = runner.round.slots
        if not 0 <= slot < len(slots) or device not in slots[slot].holders:
            raise NotFound(f"there is no task {task!r}")  # whose it is, is nobody's business
        return runner, slots[slot], attempt


_ANSWERS = (cohort.AcceptUpdate, cohort.AlreadyAccepted, cohort.RejectUpdate)


def _samples(report: dict[str, Any], most: int) -> int:
    samples = report.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= most:
        raise InputError(f"report.samples: expected a number from 1 to {most}, got {samples!r}")
    return samples
