"""Updates that arrive: where a body goes, whether it counts, and that it is recorded before its device hears so.

A body that comes to this process is checked as it comes. One that its device puts into object storage is recorded when
the device says so, and checked later by the fold worker: until then it does not count, and its round waits for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator import standings
from coordinator.body_check import read_body
from coordinator.credentials import new_id
from coordinator.errors import NotChecked, NotFound, Refused
from coordinator.jobs import CheckUpdate, FoldUpdate, OpenJob, OpenJobState, ReachPoint, UnitOfWork, Units
from coordinator.presence import Presence
from coordinator.store.bodies import Bodies
from coordinator.store.schema import UpdateRecord
from federation import cohort
from federation.errors import EmbraceError, InputError
from federation.round_sums import Reached
from federation.wire import CheckedUpdate, UpdateDecoder, WireError


@dataclass(frozen=True)
class Receiving:
    """Where an update goes while it arrives, and what it has to be."""

    task: str
    path: Path
    decoder: UpdateDecoder
    most: int  # bytes that it can have

    def check_size(self, size: int) -> None:
        if size > self.most:
            raise WireError(f"the body has {size} bytes, and {self.most} are the most that it can have")


@dataclass(frozen=True)
class Arrival:
    """An update that is whole and sound, before it is recorded."""

    device: str
    receiving: Receiving
    checked: CheckedUpdate
    sha256: str
    report: dict[str, Any]  # the device's own words
    own_name: str = ""  # of the body, where other processes may receive the same one

    @property
    def task(self) -> str:
        return self.receiving.task

    @property
    def bytes(self) -> int:
        return self.checked.size

    @property
    def body(self) -> tuple[Path, str, str]:
        return self.receiving.path, self.task, self.own_name or self.sha256


@dataclass(frozen=True)
class Uploaded:
    """An update that lies in object storage, as its device describes it."""

    device: str
    task: str
    own_name: str  # of the body
    sha256: str
    bytes: int
    report: dict[str, Any]


# What is known about a sound update; why it is none (WireError), or not this process's to judge; or that it is lost.
Verdict = CheckedUpdate | InputError | FileNotFoundError


def job_of(task: str) -> str:
    """Name the job of a task."""
    return task.partition("-")[0]


class Arrivals:
    """Receive and record the updates of open jobs. Thread-safe."""

    def __init__(
        self,
        units: Units,
        bodies: Bodies,
        jobs: Mapping[str, OpenJob],
        presence: Presence,
        reached: Reached,
        refresh: Callable[[str], None],
    ) -> None:
        """`refresh` learns what other processes have changed of a job."""
        self._units = units
        self._repository = units.repository
        self._bodies = bodies
        self._jobs = jobs
        self._presence = presence
        self._reached = reached
        self._refresh = refresh

    def receive(self, device: str, task: str) -> Receiving:
        """Prepare for an update: only the device that holds the task may send it."""
        with self._units.lock:
            with self._repository.reading() as session:
                known = self._repository.update(session, task)
            if known is not None and known.device == device:  # its round may be over since
                raise _arrived_already(known.checked)
            self._refresh(job_of(task))
            job, seat, _ = self.held(device, task)
            return self._receiving(task, job, job.state, seat)

    def receive_at_once(self, device: str, task: str) -> Receiving | None:
        """Do the same without lock and database, if the task is plainly under way; `accept_all` decides what counts."""
        if job_of(task) not in self._jobs:
            return None
        try:
            job, seat, attempt = self.held(device, task)
        except (NotFound, Refused):
            return None
        state = job.state  # without the lock the round may have closed since: then the long way says so
        if (
            not seat.is_at_work(device, attempt)
            or not seat.number < len(state.round.slots)
            or state.round.slots[seat.number] is not seat
        ):
            return None
        return self._receiving(task, job, state, seat)

    def _receiving(self, task: str, job: OpenJob, state: OpenJobState, seat: cohort.Seat) -> Receiving:
        decoder, most = job.engine.decoder(seat.member.boundary, state.round.number, state.facts)
        return Receiving(task, self._bodies.arriving(task), decoder, most)

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Exception | None]:
        """Record several updates: they share a transaction, and the wait until their bodies are on the disk."""
        answers: list[Exception | None] = []
        if self._repository.is_shared:
            arrivals = [replace(arrival, own_name=new_id()) for arrival in arrivals]
        try:
            answers += self._bodies.commit_all([arrival.body for arrival in arrivals])
            for _ in arrivals:
                self._reached("after-spool")
            with self._units.begin(*{job_of(arrival.receiving.task) for arrival in arrivals}) as work:
                self._presence.answered(work.session, [arrival.device for arrival in arrivals], work.now)
                answers = [answer or self._record(work, arrival) for answer, arrival in zip(answers, arrivals)]
        except BaseException:
            self._discard(arrivals)
            raise
        self._discard([arrival for arrival, answer in zip(arrivals, answers) if answer is not None])
        return answers

    def _record(self, work: UnitOfWork, arrival: Arrival) -> Exception | None:
        """Record an update; return None, or why it does not count."""
        task = arrival.task
        try:
            job, seat, attempt = self.held(arrival.device, task)
            update = _row(work, job, seat, arrival, checked=True)
        except EmbraceError as error:
            return error
        effects = work.advance(job, cohort.UpdateArrived(arrival.device, seat.number, attempt))
        for effect in effects:
            if isinstance(effect, cohort.AcceptUpdate):
                work.succeeded(job, effect.seat)
            if isinstance(effect, cohort.RejectUpdate):
                return Refused(f"the update of task {task} does not count: {effect.reason}", effect.reason)
            if isinstance(effect, cohort.AlreadyAccepted):  # twice at once
                return _arrived_already(effect.seat.state == "arrived")
        work.add_update(update)
        # In front: if this is the last of a round, it is folded before the round is closed.
        work.outbox[:0] = [ReachPoint("after-record"), FoldUpdate(job, update, arrival.checked)]
        return None

    def _discard(self, arrivals: Sequence[Arrival]) -> None:
        """Remove bodies that are part of no round."""
        for arrival in arrivals:
            arrival.receiving.path.unlink(missing_ok=True)
            with self._units.lock:
                _, task, name = arrival.body
                if not self._counts(task, name):
                    self._bodies.delete(task, name)

    def _counts(self, task: str, name: str) -> bool:
        """Whether a body is part of a round that is open, or of the one before that it goes on from."""
        with self._repository.reading() as session:
            update = self._repository.update(session, task)
        if self._repository.is_shared:  # the body is ours alone: it counts if it is what was recorded
            return update is not None and update.body_name == name
        job = self._jobs.get(job_of(task))
        if update is None or update.body_name != name or job is None:
            return False
        number = job.state.round.number
        return update.round == number or (update.round == number - 1 and job.engine.inherits(number))

    # --- through object storage --------------------------------------------------------------------------------------

    def upload_url(self, device: str, task: str, size: int) -> tuple[str, str]:
        """Return a name for the body of an update, and a URL to which its device can write it."""
        receiving = self.receive_at_once(device, task) or self.receive(device, task)
        receiving.check_size(size)
        name = secrets.token_hex(24)
        url = self._bodies.upload_url(task, name, size)
        if url is None:
            raise NotFound("there is no object storage that devices reach; send the update to this coordinator")
        return name, url

    def check_uploads(self) -> None:
        """Refuse what a device says of an upload where none can upload."""
        if not self._bodies.has_uploads:
            raise Refused("devices upload nothing here; send the update to this coordinator", "no_storage")

    def is_unchecked(self, task: str) -> bool:
        """Whether the seat of a task still waits for a verdict, as far as this process knows."""
        job, parts = self._jobs.get(job_of(task)), task.split("-")
        slots = job.state.round.slots if job is not None and parts[1] == str(job.state.round.number) else ()
        return any(seat.state == "uploaded" for seat in slots[int(parts[2]) : int(parts[2]) + 1])

    def complete_all(self, uploads: Sequence[Uploaded]) -> list[bool | Exception]:
        """Record several updates that lie in object storage; return for each whether it is checked and counts.

        A device repeats itself until that is so, or hears why the update was refused.
        """
        with self._units.begin(*{job_of(upload.task) for upload in uploads}) as work:
            self._presence.answered(work.session, [upload.device for upload in uploads], work.now)
            return [self._hold(work, upload) for upload in uploads]

    def _hold(self, work: UnitOfWork, upload: Uploaded) -> bool | Exception:
        """Record that an update is to be checked, once; return whether it counts by now, or why it does not."""
        task = upload.task
        known = self._repository.update(work.session, task)
        if known is not None and known.device == upload.device and known.checked:
            return True
        try:
            job, seat, attempt = self.held(upload.device, task)
            if known is not None:
                return False
            update = _row(work, job, seat, upload, checked=False)
            self._receiving(task, job, job.state, seat).check_size(upload.bytes)
        except EmbraceError as error:
            return self._refusal(work, task) or error
        for effect in work.advance(job, cohort.UpdateUploaded(upload.device, seat.number, attempt)):
            if isinstance(effect, cohort.HoldUpdate):
                work.add_update(update)
                work.outbox += [ReachPoint("after-complete"), CheckUpdate(job, update)]
            if isinstance(effect, cohort.RejectUpdate):
                late = Refused(f"the update of task {task} does not count: {effect.reason}", effect.reason)
                return self._refusal(work, task) or late
        return False

    def _refusal(self, work: UnitOfWork, task: str) -> WireError | None:
        """Find why an update was found unsound, if it was."""
        why = self._repository.failure_of_task(work.session, job_of(task), task, standings.REFUSED)
        return None if why is None else WireError(why)

    def examine(self, update: UpdateRecord) -> Verdict:
        """Check an update that was uploaded. OSError: it cannot be read now, or (FileNotFoundError) is lost."""
        try:
            job, seat, _ = self.held(update.device, update.task)
            decoder = self._receiving(update.task, job, job.state, seat).decoder
            verdict, sha256 = read_body(self._bodies.take_upload(update), decoder)
            if sha256.hex() != update.sha256:
                raise WireError("the body has another sha256 than its device said")
        except InputError as error:  # its round may be over since
            return error
        self._reached("after-check")
        return verdict

    def settle(self, update: UpdateRecord, verdict: Verdict) -> bool:
        """Let an update that was checked count, or remove it; nothing happens if another process has done so.

        False: it is to be looked at again, because this process did not know of its seat when it looked.
        """
        with self._units.begin(update.job) as work:
            known = self._repository.update(work.session, update.task)
            if known is None or known.checked:
                return True
            judged = isinstance(verdict, (CheckedUpdate, WireError, FileNotFoundError))
            if not judged and self._is_awaited(update):
                return False
            counts = self._decide(work, update, verdict)
            if counts:
                self._repository.mark_checked(work.session, update.task)
            else:
                self._repository.delete_updates(work.session, [update.task])
        if not counts:
            self._bodies.delete_all([update])
        return True

    def _is_awaited(self, update: UpdateRecord) -> bool:
        try:
            _, seat, attempt = self.held(update.device, update.task)
        except (NotFound, Refused):
            return False
        return seat.state == "uploaded" and attempt == len(seat.holders)

    def awaits_checks(self, job: OpenJob) -> bool:
        """Whether a job is open, and its round waits for verdicts."""
        round = job.state.round
        return self._jobs.get(job.id) is job and round.state == "collecting" and round.slots.uploaded > 0

    def _decide(self, work: UnitOfWork, update: UpdateRecord, verdict: Verdict) -> bool:
        """Tell the round of a verdict; return whether the update counts."""
        sound = isinstance(verdict, CheckedUpdate)
        if isinstance(verdict, WireError) and update.job in self._jobs:
            known = self._jobs[update.job]
            told = {"task": update.task, "device": update.device, "reason": standings.REFUSED, "message": str(verdict)}
            work.failed(known, update.device, standings.REFUSED, str(verdict))
            work.note(known, "TaskFailed", told)
        if isinstance(verdict, FileNotFoundError) and update.job in self._jobs:  # its device is not to blame
            lost = {"task": update.task, "device": update.device, "message": str(verdict)}
            work.note(self._jobs[update.job], "UpdateLost", lost)
        try:
            job, seat, attempt = self.held(update.device, update.task)
        except (NotFound, Refused):
            return False
        effects = work.advance(job, cohort.UpdateChecked(update.device, seat.number, attempt, sound))
        accepted = next((effect.seat for effect in effects if isinstance(effect, cohort.AcceptUpdate)), None)
        if accepted is None:
            return False
        assert isinstance(verdict, CheckedUpdate)
        work.succeeded(job, accepted)
        # In front: if this is the last of a round, it is folded before the round is closed.
        work.outbox[:0] = [ReachPoint("after-record"), FoldUpdate(job, replace(update, checked=True), verdict)]
        return True

    def held(self, device: str, task: str) -> tuple[OpenJob, cohort.Seat, int]:
        """Find the job, the seat and the attempt of a task, if it ever was this device's."""
        id, _, rest = task.partition("-")
        try:
            number, slot, attempt = map(int, rest.split("-"))
        except ValueError:
            raise NotFound(f"there is no task {task!r}") from None
        if task != f"{id}-{number}-{slot}-{attempt}":  # one task has one name
            raise NotFound(f"there is no task {task!r}")
        job = self._jobs.get(id)
        if job is None:
            with self._repository.reading() as session:
                state = self._repository.job_state(session, id)
            if state is not None:
                raise Refused(f"job {id} is {state}", "round_closed")
            raise NotFound(f"there is no task {task!r}")
        round = job.state.round
        if number != round.number:
            raise Refused(f"round {number} is over; the job is in round {round.number}", "round_closed")
        if not 0 <= slot < len(round.slots) or device not in round.slots[slot].holders:
            raise NotFound(f"there is no task {task!r}")  # another device's tasks are not this one's to know
        return job, round.slots[slot], attempt


def _row(work: UnitOfWork, job: OpenJob, seat: cohort.Seat, sent: Arrival | Uploaded, *, checked: bool) -> UpdateRecord:
    samples = _samples(sent.report, job.engine.plan.bounds.max_samples)
    return UpdateRecord(
        task=sent.task,
        job=job.id,
        round=job.state.round.number,
        slot=seat.number,
        device=sent.device,
        sha256=sent.sha256,
        bytes=sent.bytes,
        samples=samples,
        weight=job.engine.weight(samples),
        report=sent.report,
        arrived_at=work.now,
        body=sent.own_name,
        checked=checked,
    )


def _arrived_already(checked: bool) -> EmbraceError:
    if checked:
        return Refused("this update has arrived already", "duplicate")
    return NotChecked("this update lies in object storage and is being checked; try again in a moment")


def _samples(report: dict[str, Any], most: int) -> int:
    samples = report.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= most:
        raise InputError(f"report.samples: expected a number from 1 to {most}, got {samples!r}")
    return samples
