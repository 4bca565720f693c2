"""The use cases: devices wait for tasks and send updates, the administrator creates and steers jobs. No HTTP here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from coordinator import standings
from coordinator.benchmarks import Benchmarks
from coordinator.best_versions import BestVersions
from coordinator.credentials import new_id
from coordinator.deletion import Deletion
from coordinator.errors import NotAllowed, NotFound, Refused, Superseded
from coordinator.evaluation import EvaluationLimits, Evaluations
from coordinator.folding import FoldWorker
from coordinator.jobs import (
    AdmitJob,
    DeleteBodies,
    Effect,
    EvaluateVersion,
    FinishRound,
    FoldUpdate,
    ForgetJob,
    KeepBest,
    MissedOffer,
    NotifyDevices,
    OpenJob,
    OpenJobState,
    ReachPoint,
    ShutOut,
    UnitOfWork,
    Units,
    find_inherited,
    needed_updates,
    restore_job,
)
from coordinator.notifier import Notifier
from coordinator.overview import Overview
from coordinator.presence import Presence
from coordinator.reports import Reports
from coordinator.served_versions import ServedVersions
from coordinator.store.blobs import Blobs
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.repository import Repository
from coordinator.store.schema import DELETING, FINISHED, JobRecord, UpdateRecord
from coordinator.store.versions import Versions
from federation import cohort, rounds
from federation.axes.cover import DeviceProfile
from federation.engine import RoundEngine
from federation.errors import EmbraceError, InputError
from federation.job import Plan, plan_from, plan_to
from federation.messages import TaskOffer, encode_task
from federation.round_sums import Reached
from federation.wire import CheckedUpdate, UpdateDecoder

log = logging.getLogger("embrace.coordinator")
MOST_REFUSED = 3  # bodies of a task that are no update, after which its seat is free
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

    @property
    def body(self) -> tuple[Path, str, str]:
        return self.receiving.path, self.receiving.task, self.sha256


class Coordinator:
    """Everything that the API can do. Thread-safe."""

    def __init__(
        self,
        repository: Repository,
        blobs: Blobs,
        *,
        clock: Callable[[], float] = time.time,
        reached: Reached = lambda point: None,
        limits: EvaluationLimits | None = None,
    ) -> None:
        limits = limits or EvaluationLimits()
        folder = limits.evaluation_data
        self.repository = repository
        self.clock = clock
        self.notifier = Notifier()  # notifies when there may be something to do for devices that had nothing
        self.watchers = Notifier()  # notifies when there may be news for clients that watch
        self.presence = Presence()
        self.shut_out: set[str] = set()  # devices that were revoked since the process started
        self.leaving = False
        self._ticked = clock()
        self._reached = reached
        self._blobs = blobs
        self._bodies = Bodies(blobs)
        self._versions = Versions(blobs)
        self._bundles = Bundles(blobs)
        self._jobs: dict[str, OpenJob] = {}
        self._units = Units(repository, clock, self._handle, self.watchers.notify)
        self._folding = FoldWorker(self._units, self._bodies, self._versions, reached)
        self._data = EvaluationData(blobs, None if folder is None else Path(folder))
        self._best = BestVersions(repository, self._versions)
        self._evaluations = Evaluations(
            self._units, self._bundles, self._best, self._versions, self._data, limits, self._end_early
        )
        self._deletion = Deletion(self._units, blobs, self._data, self._bundles, reached)
        reports = Reports(repository, self._jobs, self._evaluations, self._best, self._units, self.presence, PRESENCE)
        served = self._served = ServedVersions(reports, self._bundles, self._versions)
        self.benchmarks = Benchmarks(self._units, self._bundles)
        self.overview = Overview(repository, reports, self._versions, self._bundles, self._data)
        # What these parts do, the API finds here.
        self.jobs = reports.jobs
        self.job = reports.job
        self.job_state = reports.job_state
        self.is_over = reports.is_over
        self.rounds = reports.rounds
        self.round_rows = reports.round_rows
        self.metrics = reports.metrics
        self.events = reports.events
        self.timings = reports.timings
        self.devices = reports.devices
        self.device = reports.device
        self.figures = reports.figures
        self.unfit = reports.unfit
        self.waiting = reports.waiting
        self.census = reports.census
        self.check_database = reports.check_database
        self.version_file = served.version_file
        self.known_version = served.known_version
        self.part = served.part
        self.bundle_file = self._bundles.file
        self.graph = self._bundles.graph
        self.draft_file = self._bundles.draft_file
        self.file_arrived = self._bundles.arrived
        self.complete_bundle = self._bundles.complete
        self.most_evaluation_data = limits.evaluation_bytes
        self.evaluation_data = self._data.known
        self.arriving_data = self._data.arriving
        self.keep_data = self._data.commit

    # --- the process -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take up what was going on when the process ended, and go on."""
        self._folding.start()
        self._deletion.finish_all()
        needed: list[UpdateRecord] = []
        with self._units.begin() as work:
            outage = work.now - min(work.now, self.repository.last_sign_of_life(work.session) or work.now)
            for record in self.repository.unfinished_jobs(work.session):
                try:
                    needed += self._restore(work, record, outage)
                except InputError as error:  # the others go on
                    log.error("job %s cannot be continued: %s", record.id, error)
                    message = f"it cannot be continued: {error}"
                    self.repository.change_job(work.session, record.id, state="failed", message=message)
            self._evaluations.resume(work.session)  # before anything is committed that would be scored anyway
            records = self.repository.jobs(work.session)
            best = {record.id: self._best.of(work.session, record) for record in records}
            work.outbox += [KeepBest(job, found.version if found else None) for job, found in best.items()]
        self._bodies.keep_only(needed)
        self._data.clean()
        for record in records:
            self._versions.forget(record.id, before=record.version - 1)

    def _restore(self, work: UnitOfWork, record: JobRecord, outage: float) -> list[UpdateRecord]:
        """Open a job as it was and have every body of its round folded again; return the updates that it needs."""
        engine = RoundEngine(plan_from(record.plan), self._bundles.manifest(record.bundle))
        job = restore_job(self.repository, work.session, record, engine)
        round = job.state.round
        needed = needed_updates(self.repository, work.session, job)
        work.outbox.append(AdmitJob(job))
        work.outbox += [FoldUpdate(job, update) for update in needed if update.round == round.number]
        if round.state == "closing":
            work.outbox.append(FinishRound(job))
        elif record.state != "paused":  # no device could be answered while the process was down
            work.advance(job, rounds.Resumed(outage))
        return needed

    def release(self) -> None:
        """Answer every device that waits for a task: the process is about to end. Updates still arrive."""
        self.leaving = True
        self.notifier.notify()
        self.watchers.notify()

    def stop(self) -> None:
        """Finish what is being folded and scored, then rest."""
        self.release()
        self._folding.stop()
        self._evaluations.close()
        self._blobs.close()
        self.repository.close()

    def tick(self) -> None:
        """Let time pass: leases run out, deadlines come, what could not be written is tried again.

        Fails only if another coordinator has taken over.
        """
        with suppress(SQLAlchemyError):  # the database is away
            self.repository.check_epoch()
        self._folding.retry()
        before, self._ticked = self._ticked, self.clock()
        ends = (known.benched_until for job in list(self._jobs.values()) for known in job.state.standings.values())
        if any(until is not None and before < until <= self._ticked for until in ends):
            self.notifier.notify()
        for job in list(self._jobs.values()):
            try:
                self._pass_time(job, self.clock())
            except Exception:
                log.exception("job %s: time could not pass", job.id)

    def _pass_time(self, job: OpenJob, now: float) -> None:
        with self._units.lock:
            paused_at = job.state.paused_at
            if job.state.round.is_due(now if paused_at is None else paused_at):
                with self._units.begin(now) as work:
                    work.advance(job, rounds.Tick())

    def _handle(self, effect: Effect) -> None:
        """Do what follows a commit."""
        match effect:
            case AdmitJob(job):
                self._jobs[job.id] = job
            case ForgetJob(job):
                self._jobs.pop(job.id, None)
            case FoldUpdate() | FinishRound() | DeleteBodies():
                self._folding.put(effect)
            case EvaluateVersion(job, version):
                self._evaluations.request(job.id, job.bundle, version, job.engine.plan.evaluate)
            case KeepBest(job_id, version):
                self._versions.forget_best(job_id, besides=version)
            case ShutOut(device):
                self.shut_out.add(device)
            case MissedOffer(device):
                self.presence.left(device)
            case NotifyDevices():
                self.notifier.notify()
            case ReachPoint(name):
                self._reached(name)

    # --- the administrator -------------------------------------------------------------------------------------------

    def create_job(self, plan: Plan, bundle: str) -> str:
        """Create a job on a bundle and evaluation data that are here already."""
        manifest = self._bundles.checked(bundle)
        self._data.check(plan.evaluate.data, manifest)
        plan.local.check_parts(manifest)
        engine, id = RoundEngine(plan, manifest), new_id()
        try:
            self._versions.create(id, self._bundles.file(bundle, manifest.weights.name), engine.first_vectors())
            with self._units.begin() as work:
                self._check_still_here(plan, bundle)
                name = plan.name or manifest.name
                record = JobRecord(id, name, bundle, plan_to(plan), "running", version=0, created_at=work.now)
                job = OpenJob(id, bundle, engine, OpenJobState(0, engine.open(0, work.now), engine.first_facts))
                self.repository.add_job(work.session, record)
                self.repository.add_round(work.session, id, job.state.round)
                work.note(job, "JobCreated", {"name": name})
                work.outbox.append(AdmitJob(job))
                work.notify_devices()
        except BaseException:
            self._versions.delete(id)
            raise
        return id

    def _check_still_here(self, plan: Plan, bundle: str) -> None:
        """Refuse a job whose bundle or data went with another job since they were looked at."""
        if not self._bundles.directory(bundle).is_dir():
            raise InputError("the bundle went with a job that was deleted; send it again")
        if plan.evaluate.data is not None:
            self._data.find(plan.evaluate.data)

    def delete_job(self, job: str, *, force: bool = False) -> dict[str, Any]:
        """Remove a job that is over, and what only it used; `force` stops it first. Return what became free."""
        with self._units.begin() as work:
            record = self.repository.job(work.session, job)
            if record is None:
                raise NotFound(f"there is no job {job!r}")
            if force and record.state not in (*FINISHED, DELETING):
                self._change_state(work, self._jobs[job], "stopped")
            elif record.state not in (*FINISHED, DELETING):
                raise Refused(f"job {job} is {record.state}; stop it first, or delete it with --force", "running")
        with self._units.begin() as work:
            if job in self._jobs:  # the fold worker has its bodies
                raise Refused(f"the last round of job {job} is closing; try again in a moment", "closing")
            self.repository.change_job(work.session, job, state=DELETING)
        self._reached("before-delete")
        freed = self._deletion.finish(record)
        self._served.forget(job)
        return freed

    def set_state(self, job: str, state: str) -> dict[str, Any]:
        """Let a job run, pause or stop; return its state before and after, and how far its open round was."""
        with self._units.begin() as work:
            found = self.repository.job(work.session, job)
            if found is None:
                raise NotFound(f"there is no job {job!r}")
            if found.state in (*FINISHED, DELETING):
                raise Refused(f"job {job} is {found.state}", "finished")
            round = self._jobs[job].state.round
            if found.state != state:
                self._change_state(work, self._jobs[job], state)
        return {
            "id": job,
            "name": found.name,
            "before": found.state,
            "state": state,
            "version": found.version,
            "round": round.number,
            "under_way": sum(seat.state == "leased" for seat in round.slots),
            "arrived": len(round.counted),
            "closing": round.state == "closing",
        }

    def _change_state(self, work: UnitOfWork, job: OpenJob, state: str, why: str = "") -> None:
        """Let a job have another state. If it is over then, its open round is given up; one that is closing ends."""
        self.repository.change_job(work.session, job.id, state=state, message=why)
        work.note(job, "JobState", {"state": state, **({"message": why} if why else {})})
        paused_at = job.state.paused_at
        work.change(job, paused_at=work.now if state == "paused" else None)
        if paused_at is not None:
            work.advance(job, rounds.Resumed(max(0.0, work.now - paused_at)))
        if state in FINISHED:
            work.advance(job, rounds.Stop(why) if why else rounds.Stop())
        work.notify_devices()

    def _end_early(self, work: UnitOfWork, job: str, why: str) -> None:
        """End a job because of its scores; nothing happens if it is over."""
        if job in self._jobs and self.repository.job_state(work.session, job) not in FINISHED:
            self._change_state(work, self._jobs[job], "done", why)

    def revoke(self, device: str, **changes: Any) -> dict[str, Any]:
        """Shut a device out; the seats that it holds are free for others. Return how many these are.

        `changes` are other facts about it.
        """
        with self._units.begin() as work:
            found = self.repository.device(work.session, device)
            if found is None:
                raise NotFound(f"there is no device {device!r}")
            held = [job.state.round.seat_of(device) for job in self._jobs.values()]
            self.repository.change_device(work.session, device, revoked=True, **changes)
            work.outbox.append(ShutOut(device))
            for job in self._jobs.values():
                work.advance(job, rounds.DevicesLeft((device,)))
            work.notify_devices()
        freed = sum(seat is not None and seat.state == "leased" for seat in held)
        return {"id": device, "name": found.name, "before": found.revoked, "freed": freed}

    def forget(self, device: str) -> None:
        """Shut a device out at its own wish, and remove what it said about itself."""
        self.revoke(device, name=f"forgotten {device}", profile=asdict(DeviceProfile()))
        self.benchmarks.forget(device)

    def running_jobs(self) -> list[OpenJob]:
        """List the jobs that give out tasks now."""
        with self._units.lock:
            return [job for job in self._jobs.values() if job.state.paused_at is None]

    # --- devices: tasks ----------------------------------------------------------------------------------------------

    def next_tasks(self, devices: Sequence[str]) -> list[TaskOffer | Exception | None]:
        """Offer several devices a task each, in one transaction."""
        if self.leaving:
            return [None] * len(devices)
        with self._units.begin() as work:
            # A fleet that waits does not write all the time.
            shut_out = self.repository.see(work.session, devices, work.now, every=PRESENCE / 8)
            self.presence.came(devices, work.now)
            for job in self._jobs.values():
                with _alone(job):
                    self._draw_cohort(work, job, devices)
            refused = NotAllowed("this device was shut out")
            return [refused if device in shut_out else self._offer(work, device) for device in devices]

    def _draw_cohort(self, work: UnitOfWork, job: OpenJob, came: Sequence[str]) -> None:
        """Begin a round that waits for its devices, if they are there.

        They are counted first: of a fleet that gathers, only the devices that `came` now are looked at.
        """
        state = work.state(job)
        if state.paused_at is not None or state.round.state != "selecting":
            return
        present = self.repository.present(work.session, work.now - PRESENCE)
        here = set(self.presence.among(present, work.now))
        resting = here & state.benched(work.now)
        self._note_fitness(work, job, here.intersection(came) - resting)
        unfit = work.state(job).unfit.keys()
        missing = job.engine.missing_to_begin(len(here - resting - unfit), len(resting))
        if missing and (
            slow := {device for device in resting if state.only_rests(device)}
        ):  # rather these than too few
            resting -= slow
            missing = job.engine.missing_to_begin(len(here - resting - unfit), len(resting))
        fit = here - resting
        drawn = cohort.Cohort(missing=missing) if missing else self._draw(work, job, fit, len(resting))
        work.advance(job, rounds.DevicesAvailable(cohort=drawn))

    def _draw(self, work: UnitOfWork, job: OpenJob, fit: Collection[str], resting: int) -> cohort.Cohort:
        """Draw a cohort, and note the devices that the job cannot use."""
        state = work.state(job)
        profiles, unreadable = self.repository.profiles(work.session, fit)
        seconds = {id: known.seconds for id, known in state.standings.items() if known.seconds is not None}
        drawn = job.engine.assign(state.round.number, profiles, state.previous, seconds=seconds, resting=resting)
        work.note_unfit(job, {**dict(drawn.unfit), **unreadable})
        return drawn

    def _offer(self, work: UnitOfWork, device: str) -> TaskOffer | None:
        """Offer a task of the first job that has one for a device."""
        for job in self._jobs.values():
            with _alone(job):
                offer = self._offer_of(work, job, device)
                if offer is not None:
                    return offer
        return None

    def _offer_of(self, work: UnitOfWork, job: OpenJob, device: str) -> TaskOffer | None:
        state = work.state(job)
        if state.paused_at is not None or state.round.state != "collecting":
            return None
        seat = state.round.seat_of(device)
        if seat is None:
            self._seek(work, job, device)
            seat = work.state(job).round.seat_of(device)
        if seat is None or seat.state == "arrived":
            return None
        effects = work.advance(job, cohort.LeaseTaken(device, seat.number))
        granted = next((effect.seat for effect in effects if isinstance(effect, cohort.GrantLease)), None)
        if granted is None:
            return None
        self.presence.took(device)
        task = f"{job.id}-{state.round.number}-{granted.number}-{len(granted.holders)}"
        return TaskOffer(task, job.id, job.bundle, state.version, granted.until, encode_task(work.task(job, granted)))

    def _seek(self, work: UnitOfWork, job: OpenJob, device: str) -> None:
        """Offer a device without a seat one that has become free, unless it is benched."""
        if work.state(job).why_benched(device, work.now):
            return
        members = self._note_fitness(work, job, [device])
        if members:
            work.advance(job, rounds.DevicesAvailable(tuple(members)))

    def _note_fitness(self, work: UnitOfWork, job: OpenJob, devices: Collection[str]) -> list[cohort.Member]:
        """List the devices that a job can use, and note those that it cannot."""
        state = work.state(job)
        profiles, unreadable = self.repository.profiles(work.session, devices)
        members, whys = [], {**dict.fromkeys(profiles, ""), **unreadable}
        for device, profile in profiles.items():
            known = state.standings.get(device)
            try:
                members.append(job.engine.member(device, profile, known.seconds if known else None))
            except EmbraceError as error:
                whys[device] = str(error)
        if any(why != state.unfit.get(device, "") for device, why in whys.items()):
            unfit = {**state.unfit, **whys}
            work.note_unfit(job, {device: why for device, why in unfit.items() if why})
        return members

    def fail_task(self, device: str, task: str, reason: str, message: str) -> None:
        """Free the seat of a device that gives up."""
        with self._units.begin() as work:
            job, seat, attempt = self._held(device, task)
            self.presence.came([device], work.now)
            if not self._return(work, job, seat, cohort.TaskReturned(device, seat.number, attempt)):
                return
            if reason != standings.REFUSED or not work.state(job).refused.get(task):  # else it was counted then
                work.failed(job, device, reason, message)
            work.note(job, "TaskFailed", {"task": task, "device": device, "reason": reason, "message": message})

    def _return(self, work: UnitOfWork, job: OpenJob, seat: cohort.Seat, fact: cohort.TaskReturned) -> bool:
        """Free a seat; whether that changed anything."""
        work.advance(job, fact)
        return seat.state == "leased" and work.state(job).round.slots[seat.number].state == "failed"

    def refuse_update(self, device: str, task: str, why: str) -> None:
        """Count a task whose body is no update against its device; a good one may follow, until a few were refused.

        The first is counted and told, and the one that ends the lease is told: more bodies make no more events.
        """
        with suppress(NotFound, Refused), self._units.begin() as work:
            job, seat, attempt = self._held(device, task)
            if not seat.is_at_work(device, attempt):
                return
            known = work.state(job).refused
            times = known.get(task, 0) + 1
            work.change(job, refused={**known, task: times})
            if times == 1:
                work.failed(job, device, standings.REFUSED, why)
            fact = cohort.TaskReturned(device, seat.number, attempt)
            if times == 1 or (times >= MOST_REFUSED and self._return(work, job, seat, fact)):
                body = {"task": task, "device": device, "reason": standings.REFUSED, "message": why}
                work.note(job, "TaskFailed", body)

    def heartbeats(self, beats: Sequence[tuple[str, str]]) -> list[float | Exception]:
        """Renew the leases of devices at work, (device, task) each; return the seconds until each runs out.

        A renewal is not recorded: after a restart every lease begins anew.
        """
        answers: list[float | Exception] = []
        with self._units.lock:
            now = self.clock()  # once: what is due by then has to happen in a unit of work
            for device, task in beats:
                try:
                    answers.append(self._renew(device, task, now))
                except EmbraceError as error:
                    answers.append(error)
        return answers

    def _renew(self, device: str, task: str, now: float) -> float:
        job, seat, attempt = self._held(device, task)
        self._pass_time(job, now)
        now = now if job.state.paused_at is None else job.state.paused_at
        round, effects = rounds.advance(job.state.round, cohort.LeaseRenewed(device, seat.number, attempt), now)
        for effect in effects:
            if isinstance(effect, cohort.RefuseLease):
                raise Refused(f"task {task} is no longer this device's: {effect.reason}", effect.reason)
        job.state = replace(job.state, round=round)
        return round.lease

    def lease_of(self, job: str) -> float | None:
        """Find the seconds for which a device may be silent at a task of a job."""
        known = self._jobs.get(job)
        return None if known is None else known.state.round.lease

    def inherited(self, device: str, task: str) -> Path:
        """Find the body that the holder of a task goes on with."""
        with self._units.lock, self.repository.reading() as session:
            job, seat, _ = self._held(device, task)
            found = find_inherited(self.repository, session, job, seat.number)
        if found is None:
            raise NotFound(f"task {task!r} inherits nothing")
        return self._bodies.file(found[0])

    # --- devices: updates --------------------------------------------------------------------------------------------

    def receive(self, device: str, task: str) -> Receiving:
        """Prepare for an update: only the device that holds the task may send it."""
        with self._units.lock:
            with self.repository.reading() as session:
                known = self.repository.update(session, task)
            if known is not None and known.device == device:  # its round may be over since
                raise Refused("this update has arrived already", "duplicate")
            job, seat, _ = self._held(device, task)
            return self._receiving(task, job, job.state, seat)

    def receive_at_once(self, device: str, task: str) -> Receiving | None:
        """Do the same without lock and database, if the task is plainly under way; `accept_all` decides what counts."""
        if task.partition("-")[0] not in self._jobs:
            return None
        try:
            job, seat, attempt = self._held(device, task)
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
        try:
            answers += self._bodies.commit_all([arrival.body for arrival in arrivals])
            for _ in arrivals:
                self._reached("after-spool")
            with self._units.begin() as work:
                self.presence.came([arrival.device for arrival in arrivals], work.now)
                answers = [answer or self._record(work, arrival) for answer, arrival in zip(answers, arrivals)]
        except Superseded:  # the same body may have gone to the other coordinator since
            raise
        except BaseException:
            self._discard(arrivals)
            raise
        self._discard([arrival for arrival, answer in zip(arrivals, answers) if answer is not None])
        return answers

    def _record(self, work: UnitOfWork, arrival: Arrival) -> Exception | None:
        """Record an update; return None, or why it does not count."""
        task = arrival.receiving.task
        try:
            job, seat, attempt = self._held(arrival.device, task)
            samples = _samples(arrival.report, job.engine.plan.bounds.max_samples)
        except EmbraceError as error:
            return error
        number = job.state.round.number
        effects = work.advance(job, cohort.UpdateArrived(arrival.device, seat.number, attempt))
        for effect in effects:
            if isinstance(effect, cohort.AcceptUpdate):
                work.succeeded(job, effect.seat)
            if isinstance(effect, cohort.RejectUpdate):
                return Refused(f"the update of task {task} does not count: {effect.reason}", effect.reason)
            if isinstance(effect, cohort.AlreadyAccepted):  # twice at once
                return Refused("this update has arrived already", "duplicate")
        update = UpdateRecord(
            task=task,
            job=job.id,
            round=number,
            slot=seat.number,
            device=arrival.device,
            sha256=arrival.sha256,
            bytes=arrival.checked.size,
            samples=samples,
            weight=job.engine.weight(samples),
            report=arrival.report,
            arrived_at=work.now,
        )
        work.add_update(update)
        # In front: if this is the last of a round, it is folded before the round is closed.
        work.outbox[:0] = [ReachPoint("after-record"), FoldUpdate(job, update, arrival.checked)]
        return None

    def _discard(self, arrivals: Sequence[Arrival]) -> None:
        """Remove bodies that are part of no round."""
        for arrival in arrivals:
            arrival.receiving.path.unlink(missing_ok=True)
            with self._units.lock:
                if not self._counts(arrival.receiving.task, arrival.sha256):
                    self._bodies.delete(arrival.receiving.task, arrival.sha256)

    def _counts(self, task: str, sha256: str) -> bool:
        """Whether a body is part of a round that is open, or of the one before that it goes on from."""
        job = self._jobs.get(task.partition("-")[0])
        with self.repository.reading() as session:
            update = self.repository.update(session, task)
        if update is None or update.sha256 != sha256 or job is None:
            return False
        number = job.state.round.number
        return update.round == number or (update.round == number - 1 and job.engine.inherits(number))

    def _held(self, device: str, task: str) -> tuple[OpenJob, cohort.Seat, int]:
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
            with self.repository.reading() as session:
                state = self.repository.job_state(session, id)
            if state is not None:
                raise Refused(f"job {id} is {state}", "round_closed")
            raise NotFound(f"there is no task {task!r}")
        round = job.state.round
        if number != round.number:
            raise Refused(f"round {number} is over; the job is in round {round.number}", "round_closed")
        if not 0 <= slot < len(round.slots) or device not in round.slots[slot].holders:
            raise NotFound(f"there is no task {task!r}")  # another device's tasks are not this one's to know
        return job, round.slots[slot], attempt


@contextmanager
def _alone(job: OpenJob) -> Iterator[None]:
    """Let trouble with one job stay its own: it is logged, and devices get the tasks of others."""
    try:
        yield
    except SQLAlchemyError:  # the transaction is over
        raise
    except Exception:
        log.exception("job %s: no task could be offered", job.id)


def _samples(report: dict[str, Any], most: int) -> int:
    samples = report.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= most:
        raise InputError(f"report.samples: expected a number from 1 to {most}, got {samples!r}")
    return samples
