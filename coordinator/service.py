"""The use cases: enrol a device, create a job, hand out tasks, take updates, close rounds. No HTTP here.

One lock guards all state; nothing slow happens while it is held. Bodies are folded, and versions written, by one worker
thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import cohort, rounds
from coordinator.credentials import new_id
from coordinator.errors import NotAllowed, NotFound, Refused
from coordinator.job_runner import JobRunner, Reached
from coordinator.plan import Plan, plan_from, plan_to
from coordinator.store.database import Sessions
from coordinator.store.files import Files, publish
from coordinator.store.schema import DeviceRow, EventRow, JobRow, RoundRow, UpdateRow
from coordinator.views import FINISHED, Views
from federation.axes.cover import DeviceProfile
from federation.bundle_files import check_bundle
from federation.decode import decode
from federation.errors import EmbraceError, InputError
from federation.manifest import Manifest, read_manifest
from federation.messages import encode_task
from federation.wire import CheckedUpdate, Limits, UpdateDecoder

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


class Coordinator(Views):
    """Everything the API can do. Thread-safe."""

    def __init__(
        self,
        files: Files,
        sessions: Sessions,
        *,
        clock: Callable[[], float] = time.time,
        reached: Reached = lambda point: None,
    ) -> None:
        super().__init__(files, sessions)
        self.clock, self._reached = clock, reached
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._runners: dict[str, JobRunner] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._labour, name="fold", daemon=True)
        self._stopping = False

    def start(self) -> None:
        """Take up what was going on when the process ended, and go on."""
        self.files.forget_arriving()
        self._worker.start()
        with self._lock, self.sessions() as session:
            known = set(session.scalars(select(UpdateRow.task)))
            for task, path in self.files.spooled().items():
                if task not in known:  # it was never acknowledged: the device sends it again
                    path.unlink(missing_ok=True)
            for row in session.scalars(select(JobRow).where(JobRow.state.not_in(FINISHED))):
                self._recover(session, row)

    def stop(self) -> None:
        """Finish what is being folded, then rest."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._work.put(None)
        self._worker.join()

    def revoke(self, device: str) -> None:
        """Shut a device out; what it holds is free for another."""
        with self._changed, self._transaction(*self._runners.values()) as session:
            row = session.get(DeviceRow, device)
            if row is None:
                raise NotFound(f"there is no device {device!r}")
            row.revoked = True
            for runner in self._runners.values():
                self._advance(session, runner, rounds.DevicesLeft((device,)))
            self._changed.notify_all()

    # --- jobs --------------------------------------------------------------------------------------------------------

    def create_job(self, plan: Plan, bundle: str) -> str:
        """A job on a bundle that is here already."""
        directory = self.files.bundle(bundle)
        manifest = read_manifest(directory)
        check_bundle(directory, manifest)
        job, now = new_id(), self.clock()
        first = self.files.version(job, 0)
        first.parent.mkdir(parents=True)
        draft = first.with_suffix(".draft")
        draft.write_bytes((directory / manifest.weights.name).read_bytes())
        publish(draft, first)
        with self._changed, self.sessions.begin() as session:
            row = JobRow(
                id=job, name=plan.name or manifest.name, bundle=bundle, plan=plan_to(plan), state="running", version=0,
                created_at=now,
            )  # fmt: skip
            session.add(row)
            session.flush()
            runner = JobRunner(row, plan, manifest, self.files, self._reached)
            runner.open(session, 0, now)
            session.add(EventRow(job=job, at=now, kind="JobCreated", body={"name": row.name}))
            self._runners[job] = runner
            self._changed.notify_all()
        return job

    def set_state(self, job: str, state: str) -> None:
        """running, paused or stopped."""
        with self._changed, self._transaction(*self._runners.values()) as session:
            row = session.get(JobRow, job)
            if row is None:
                raise NotFound(f"there is no job {job!r}")
            if row.state in FINISHED:
                raise Refused(f"job {job} is {row.state}", "finished")
            row.state = state
            session.add(EventRow(job=job, at=self.clock(), kind="JobState", body={"state": state}))
            if state == "stopped":
                self._advance(session, self._runners[job], rounds.Stop())
            self._changed.notify_all()

    # --- tasks -------------------------------------------------------------------------------------------------------

    def next_task(self, device: str, wait: float) -> TaskOffer | None:
        """A task for a device, as soon as there is one; None after `wait` seconds."""
        until = time.monotonic() + wait
        with self._changed:
            while not self._stopping:
                offer = self._try_task(device)
                rest = until - time.monotonic()
                if offer is not None or rest <= 0:
                    return offer
                self._changed.wait(min(rest, 1.0))  # leases run out without anybody saying so
        return None

    def receive(self, device: str, task: str) -> Receiving:
        """Prepare for an update: only the device that holds the task may send it."""
        with self._lock:
            runner, seat, attempt = self._held(device, task)
            if seat.state == "arrived" and attempt == len(seat.holders):
                raise Refused("this update has arrived already", "duplicate")
            bounds = runner.plan.bounds
            limits = Limits(max_norm=bounds.max_norm, max_value=bounds.max_value)
            decoder = UpdateDecoder(runner.space, runner.boundary(seat).layer, limits)
            return Receiving(task, self.files.arriving(task), decoder)

    def accept(
        self, device: str, receiving: Receiving, checked: CheckedUpdate, sha256: str, report: dict[str, Any]
    ) -> None:
        """Record an update that is whole and sound. When this returns, it is never lost."""
        task = receiving.task
        publish(receiving.path, self.files.arrived(task))
        self._reached("after-spool")
        with self._changed:
            runner, seat, attempt = self._held(device, task)
            assert runner.round is not None
            samples = _samples(report, runner.plan.bounds.max_samples)
            with self._transaction(runner) as session:
                effects = self._advance(session, runner, cohort.UpdateArrived(device, seat.number, attempt))
                answer = next(e for e in effects if isinstance(e, _ANSWERS))
                if isinstance(answer, cohort.AcceptUpdate):
                    row = UpdateRow(
                        task=task, job=runner.id, round=runner.round.number, slot=seat.number, device=device,
                        sha256=sha256, bytes=checked.size, samples=samples,
                        weight=runner.plan.weigh.weight(samples), report=report, arrived_at=self.clock(),
                    )  # fmt: skip
                    session.add(row)
            self._reached("after-record")
            if isinstance(answer, cohort.RejectUpdate):
                self.files.arrived(task).unlink(missing_ok=True)
                raise Refused(f"the update of task {task} does not count: {answer.reason}", answer.reason)
            if isinstance(answer, cohort.AcceptUpdate):
                self._work.put(lambda: self._fold(runner, row, checked))
                self._follow(runner, effects)
            self._changed.notify_all()

    def fail_task(self, device: str, task: str, reason: str, message: str) -> None:
        """A device gives up; its slot is free for another."""
        with self._changed:
            runner, seat, attempt = self._held(device, task)
            with self._transaction(runner) as session:
                self._advance(session, runner, cohort.TaskFailed(device, seat.number, attempt))
                body = {"task": task, "device": device, "reason": reason, "message": message}
                session.add(EventRow(job=runner.id, at=self.clock(), kind="TaskFailed", body=body))
            self._changed.notify_all()

    def tick(self) -> None:
        """Let time pass: leases run out, deadlines come."""
        with self._changed:
            for runner in list(self._runners.values()):
                if runner.round is not None and (due := runner.round.wakes_at) is not None and due <= self.clock():
                    with self._transaction(runner) as session:
                        effects = self._advance(session, runner, rounds.Tick())
                    self._follow(runner, effects)
            self._changed.notify_all()

    # --- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, *runners: JobRunner) -> Iterator[Session]:
        """All or nothing, in memory too: if the database refuses, the rounds are as they were."""
        before = [(runner, runner.round, runner.previous) for runner in runners]
        try:
            with self.sessions.begin() as session:
                yield session
        except BaseException:
            for runner, known, previous in before:
                runner.round, runner.previous = known, previous
            raise

    def _advance(self, session: Session, runner: JobRunner, event: rounds.Event) -> tuple[rounds.Effect, ...]:
        return runner.advance(session, event, self.clock())

    def _follow(self, runner: JobRunner, effects: tuple[rounds.Effect, ...]) -> None:
        """What a fact led to, after it is recorded."""
        for effect in effects:
            if isinstance(effect, rounds.CloseRound):
                self._work.put(lambda: self._close(runner))
            elif isinstance(effect, rounds.RoundAbandoned):
                self._finish(runner, "failed", effect.reason)

    def _try_task(self, device: str) -> TaskOffer | None:
        now = self.clock()
        with self._transaction(*self._runners.values()) as session:
            row = session.get_one(DeviceRow, device)
            row.seen_at = now
            if row.revoked:
                raise NotAllowed("this device was shut out")
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
        runner = self._runners.get(job)
        if runner is None or runner.round is None:
            raise NotFound(f"there is no task {task!r}")
        if number != runner.round.number:
            raise Refused(f"round {number} is over; the job is in round {runner.round.number}", "round_closed")
        slots = runner.round.slots
        if not 0 <= slot < len(slots) or device not in slots[slot].holders:
            raise NotFound(f"there is no task {task!r}")  # whose it is, is nobody's business
        return runner, slots[slot], attempt

    def _labour(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("the fold worker failed")

    def _fold(self, runner: JobRunner, row: UpdateRow, checked: CheckedUpdate) -> None:
        runner.fold(row, checked, self.files.arrived(row.task))

    def _close(self, runner: JobRunner) -> None:
        """The server's step; everything that counts is folded, because the worker does one thing after the other."""
        with self._lock, self.sessions() as session:
            job = session.get_one(JobRow, runner.id)
            updates = runner.updates(session)
        runner.write_next(job.version)
        self._reached("mid-commit")
        with self._changed, self._transaction(runner) as session:
            job = session.get_one(JobRow, runner.id)
            assert runner.round is not None
            number = runner.round.number
            row = session.get_one(RoundRow, (runner.id, number))
            row.summary = runner.summary(updates)
            self._advance(session, runner, rounds.Committed())
            job.version += 1
            event = {"round": number, "version": job.version, **row.summary}
            session.add(EventRow(job=job.id, at=self.clock(), kind="RoundCommitted", body=event))
            if job.state == "stopped" or number + 1 >= runner.plan.num_rounds:
                job.state = job.state if job.state == "stopped" else "done"
                session.add(EventRow(job=job.id, at=self.clock(), kind="JobState", body={"state": job.state}))
                del self._runners[job.id]
            else:
                runner.open(session, number + 1, self.clock())
            self._changed.notify_all()
        for update in updates:
            self.files.arrived(update.task).unlink(missing_ok=True)
        self.files.version(runner.id, job.version - 2).unlink(missing_ok=True)

    def _finish(self, runner: JobRunner, state: str, message: str) -> None:
        with self.sessions.begin() as session:
            job = session.get_one(JobRow, runner.id)
            if job.state not in FINISHED:
                job.state, job.message = state, message
                session.add(
                    EventRow(job=job.id, at=self.clock(), kind="JobState", body={"state": state, "message": message})
                )
        self._runners.pop(runner.id, None)

    def _recover(self, session: Session, row: JobRow) -> None:
        """A job as it was: the open round, and every body of it folded again."""
        manifest: Manifest = read_manifest(self.files.bundle(row.bundle))
        runner = JobRunner(row, plan_from(row.plan), manifest, self.files, self._reached)
        newest = select(RoundRow).where(RoundRow.job == row.id).order_by(RoundRow.number.desc()).limit(1)
        runner.restore(session, session.scalars(newest).one())
        self._runners[row.id] = runner
        for update in runner.updates(session):
            self._work.put(lambda update=update: self._fold(runner, update, self._check_again(runner, update)))  # type: ignore[misc]
        if runner.round is not None and runner.round.state == "closing":
            self._work.put(lambda: self._close(runner))

    def _check_again(self, runner: JobRunner, row: UpdateRow) -> CheckedUpdate:
        """What is known about a body, from the body itself."""
        assert runner.round is not None
        layer = runner.boundary(runner.round.slots[row.slot]).layer
        decoder = UpdateDecoder(runner.space, layer, Limits(max_value=runner.plan.bounds.max_value))
        with self.files.arrived(row.task).open("rb") as file:
            while chunk := file.read(1 << 20):
                decoder.feed(chunk)
        return decoder.finish()


_ANSWERS = (cohort.AcceptUpdate, cohort.AlreadyAccepted, cohort.RejectUpdate)


def _samples(report: dict[str, Any], most: int) -> int:
    samples = report.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= most:
        raise InputError(f"report.samples: expected a number from 1 to {most}, got {samples!r}")
    return samples
