"""The use cases of devices: wait for a task, send an update, give up. No HTTP here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.errors import NotAllowed, NotFound, Refused
from coordinator.job_runner import JobRunner
from coordinator.keeper import JobKeeper
from coordinator.store.schema import DeviceRow, JobRow, UpdateRow
from edge_runtime.files import flush_folder, rename_flushed
from federation import cohort, rounds
from federation.axes.cover import DeviceProfile
from federation.decode import decode
from federation.errors import EmbraceError, InputError
from federation.identity import task_seed
from federation.messages import TaskOffer, encode_task
from federation.wire import CheckedUpdate, UpdateDecoder

log = logging.getLogger("embrace.coordinator")
PRESENCE = 60.0  # seconds after which a device that was not heard of counts as gone


@dataclass(frozen=True)
class Receiving:
    """Where an update goes while it arrives, and what it has to be."""

    task: str
    path: Path
    decoder: UpdateDecoder
    most: int  # bytes that it can have


@dataclass(frozen=True)
class Arrival:
    """An update that is whole and sound, before it is recorded."""

    device: str
    receiving: Receiving
    checked: CheckedUpdate
    sha256: str
    report: dict[str, Any]  # the device's own words


class Coordinator(JobKeeper):
    """Everything the API can do."""

    def revoke(self, device: str) -> None:
        """Shut a device out; what it holds is free for another."""
        with self._lock, self._transaction(*self._runners.values()) as session:
            row = session.get(DeviceRow, device)
            if row is None:
                raise NotFound(f"there is no device {device!r}")
            row.revoked = True
            self._then.append(lambda: self.shut_out.add(device))
            for runner in self._runners.values():
                self._advance(session, runner, rounds.DevicesLeft((device,)))
            self._then.append(self.notifier.notify)

    def next_task(self, device: str) -> TaskOffer | None:
        """A task for a device, if there is one; the notifier says when to ask again."""
        return _only(self.next_tasks([device]))

    def next_tasks(self, devices: Sequence[str]) -> list[TaskOffer | Exception | None]:
        """The same for several at once, in one transaction."""
        with self._lock:
            if self.leaving:
                return [None] * len(devices)
            with self._transaction(*self._runners.values()) as session:
                return self._try_tasks(session, devices)

    def unfit(self, device: str) -> str:
        """Why none of the jobs that run can use a device; nothing if one can, or if there is none."""
        running = [runner for runner in list(self._runners.values()) if runner.paused_at is None]
        found = {runner.id: runner.unfit.get(device) for runner in running}
        return "; ".join(f"job {job}: {why}" for job, why in found.items()) if all(found.values()) else ""

    def devices(self) -> list[dict[str, Any]]:
        return [{**row, "unfit": "" if row["revoked"] else self.unfit(row["id"])} for row in super().devices()]

    def job(self, job: str) -> dict[str, Any]:
        runner = self._runners.get(job)
        return {**super().job(job), "unfit": dict(runner.unfit) if runner else {}}

    def receive(self, device: str, task: str) -> Receiving:
        """Prepare for an update: only the device that holds the task may send it."""
        with self._lock:
            with self.sessions() as session:
                known = session.get(UpdateRow, task)
            if known is not None and known.device == device:  # its round may be over since
                raise Refused("this update has arrived already", "duplicate")
            runner, seat, _ = self._held(device, task)
            return self._receiving(task, runner, seat)

    def receive_at_once(self, device: str, task: str) -> Receiving | None:
        """The same without lock and database, if the task is plainly under way. Whether it counts, `accept` decides."""
        if task.partition("-")[0] not in self._runners:
            return None
        try:
            runner, seat, attempt = self._held(device, task)
        except (NotFound, Refused):
            return None
        mine = seat.state == "leased" and attempt == len(seat.holders) and seat.member.device == device
        return self._receiving(task, runner, seat) if mine else None

    def _receiving(self, task: str, runner: JobRunner, seat: cohort.Seat) -> Receiving:
        assert runner.round is not None
        decoder, most = runner.summing.decoder(seat.member.boundary, runner.round.number)
        return Receiving(task, self.files.arriving(task), decoder, most)

    def accept(
        self, device: str, receiving: Receiving, checked: CheckedUpdate, sha256: str, report: dict[str, Any]
    ) -> None:
        """Record an update that is whole and sound. When this returns, it is never lost."""
        _only(self.accept_all([Arrival(device, receiving, checked, sha256, report)]))

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Exception | None]:
        """Several at once: they share a transaction, and the wait until their names are on the disk."""
        answers: list[Exception | None] = [None] * len(arrivals)
        try:
            answers = list(self._disk.map(self._name, arrivals))
            flush_folder(self._body_of(arrivals[0]).parent)
            for _ in arrivals:
                self._reached("after-spool")
            with self._lock, self._transaction(*self._runners.values()) as session:
                for number, arrival in enumerate(arrivals):
                    answers[number] = answers[number] or self._record(session, arrival)
        except BaseException:
            self._discard(arrivals)
            raise
        self._discard([arrival for arrival, answer in zip(arrivals, answers) if answer is not None])
        return answers

    def _name(self, arrival: Arrival) -> Exception | None:
        """Several are named at once: a disk that has to be waited for is waited for once."""
        try:
            rename_flushed(arrival.receiving.path, self._body_of(arrival))
        except OSError as error:
            return error
        return None

    def _body_of(self, arrival: Arrival) -> Path:
        return self.files.arrived(arrival.receiving.task, arrival.sha256)

    def _discard(self, arrivals: Sequence[Arrival]) -> None:
        """Remove bodies that are part of no round."""
        for arrival in arrivals:
            arrival.receiving.path.unlink(missing_ok=True)
            with self._lock:
                if not self._counts(arrival.receiving.task, arrival.sha256):
                    self._body_of(arrival).unlink(missing_ok=True)

    def _record(self, session: Session, arrival: Arrival) -> Exception | None:
        """None, or why it does not count."""
        task, checked = arrival.receiving.task, arrival.checked
        try:
            runner, seat, attempt = self._held(arrival.device, task)
            samples = _samples(arrival.report, runner.plan.bounds.max_samples)
        except EmbraceError as error:
            return error
        assert runner.round is not None
        number = runner.round.number
        effects = self._advance(session, runner, cohort.UpdateArrived(arrival.device, seat.number, attempt))
        answer = next(e for e in effects if isinstance(e, _ANSWERS))
        if isinstance(answer, cohort.RejectUpdate):
            return Refused(f"the update of task {task} does not count: {answer.reason}", answer.reason)
        if isinstance(answer, cohort.AlreadyAccepted):  # twice at once
            return Refused("this update has arrived already", "duplicate")
        row = UpdateRow(
            task=task,
            job=runner.id,
            round=number,
            slot=seat.number,
            device=arrival.device,
            sha256=arrival.sha256,
            bytes=checked.size,
            samples=samples,
            weight=runner.plan.weigh.weight(samples),
            report=arrival.report,
            arrived_at=self.clock(),
        )
        session.add(row)
        fold = partial(self._fold, runner, row, checked)  # before the round is closed, if this is the last
        self._then[:0] = [partial(self._reached, "after-record"), partial(self._work.put, fold)]
        return None

    def _counts(self, task: str, sha256: str) -> bool:
        """Whether this body is part of a round that is open, or of the one before that it goes on from."""
        runner = self._runners.get(task.partition("-")[0])
        with self.sessions() as session:
            row = session.get(UpdateRow, task)
        if row is None or row.sha256 != sha256 or runner is None or runner.round is None:
            return False
        rounds_ago = runner.round.number - row.round
        return rounds_ago == 0 or (rounds_ago == 1 and runner.hands_on(runner.round.number))

    def inherited(self, device: str, task: str) -> Path:
        """The body that the holder of a task goes on with."""
        with self._lock:
            runner, seat, _ = self._held(device, task)
            with self.sessions() as session:
                found = runner.inherit(session, seat.number)
                row = session.get(UpdateRow, found.task) if found else None
        if row is None:
            raise NotFound(f"task {task!r} inherits nothing")
        return self._body(row)

    def fail_task(self, device: str, task: str, reason: str, message: str) -> None:
        """A device gives up; its slot is free for another."""
        with self._lock:
            runner, seat, attempt = self._held(device, task)
            with self._transaction(runner) as session:
                self._advance(session, runner, cohort.TaskFailed(device, seat.number, attempt))
                body = {"task": task, "device": device, "reason": reason, "message": message}
                runner.note("TaskFailed", body, self.clock())

    def _try_tasks(self, session: Session, devices: Sequence[str]) -> list[TaskOffer | Exception | None]:
        shut_out = self._see(session, devices)
        facts = select(JobRow.id, JobRow.bundle, JobRow.version).where(JobRow.state == "running")
        running = {id: (bundle, version) for id, bundle, version in session.execute(facts)}
        jobs = {runner: running[runner.id] for runner in self._runners.values() if runner.id in running}
        for runner in jobs:
            if runner.round is not None and runner.round.state == "selecting":
                profiles = self._present(session)
                drawn = runner.assign(profiles, profiles)
                runner.know_unfit(dict(drawn.unfit), self.clock())
                self._advance(session, runner, rounds.DevicesAvailable(cohort=drawn))
        refused = NotAllowed("this device was shut out")
        return [refused if device in shut_out else self._offer(session, jobs, device) for device in devices]

    def _see(self, session: Session, devices: Sequence[str]) -> set[str]:
        """They were heard of. Those of them who were shut out."""
        now = self.clock()
        facts = select(DeviceRow.id, DeviceRow.revoked, DeviceRow.seen_at).where(DeviceRow.id.in_(devices))
        known = session.execute(facts).all()
        # A fleet that waits does not write all the time.
        late = [id for id, revoked, seen_at in known if not revoked and not now - PRESENCE / 8 < seen_at <= now]
        if late:
            session.execute(update(DeviceRow).where(DeviceRow.id.in_(late)).values(seen_at=now))
        return {id for id, revoked, _ in known if revoked}

    def _offer(self, session: Session, jobs: Mapping[JobRunner, tuple[str, int]], device: str) -> TaskOffer | None:
        """From the first job that has something for it; `jobs` has the bundle and the version of each."""
        for runner, (bundle, version) in jobs.items():
            assert runner.round is not None
            if runner.round.state == "collecting" and runner.round.seat_of(device) is None:
                self._seek(session, runner, device)
            seat = runner.round.seat_of(device)
            if runner.round.state == "collecting" and seat is not None and seat.state != "arrived":
                effects = self._advance(session, runner, cohort.LeaseTaken(device, seat.number))
                granted = next((e.seat for e in effects if isinstance(e, cohort.GrantLease)), None)
                if granted:
                    work = encode_task(runner.task(session, granted, task_seed(runner.plan.seed, device)))
                    return TaskOffer(runner.task_id(granted), runner.id, bundle, version, granted.until, work)
        return None

    def _seek(self, session: Session, runner: JobRunner, device: str) -> None:
        """A seat that has become free, for a device without one."""
        assert runner.round is not None
        profile = decode(DeviceProfile, session.get_one(DeviceRow, device).profile, "profile", defaults=True)
        member, why = None, None
        try:
            member = cohort.member_of(device, profile, runner.plan.cover, runner.manifest, runner.plan.local.batch)
        except EmbraceError as error:
            why = str(error)
        if why != runner.unfit.get(device):  # the same again, from many who wait, costs nothing
            others = {id: known for id, known in runner.unfit.items() if id != device}
            runner.know_unfit(others if why is None else {**others, device: why}, self.clock())
        if member is not None:
            self._advance(session, runner, rounds.DevicesAvailable((member,)))

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


_T = TypeVar("_T")
_ANSWERS = (cohort.AcceptUpdate, cohort.AlreadyAccepted, cohort.RejectUpdate)


def _samples(report: dict[str, Any], most: int) -> int:
    samples = report.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= most:
        raise InputError(f"report.samples: expected a number from 1 to {most}, got {samples!r}")
    return samples


def _only(answers: Sequence[_T | Exception]) -> _T:
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer
