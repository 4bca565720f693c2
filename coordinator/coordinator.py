"""The use cases: devices wait for tasks and send updates, the administrator creates and steers jobs. No HTTP here."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from coordinator import standings
from coordinator.arrivals import Arrivals, job_of
from coordinator.benchmarks import Benchmarks
from coordinator.best_versions import BestVersions
from coordinator.credentials import new_id
from coordinator.deletion import Deletion
from coordinator.errors import NotAllowed, NotFound, Refused
from coordinator.evaluation import EvaluationLimits, Evaluations
from coordinator.folding import FoldWorker
from coordinator.jobs import (
    AdmitJob,
    CheckUpdate,
    DeleteBodies,
    Effect,
    EvaluateVersion,
    FinishRound,
    FoldUpdate,
    ForgetJob,
    KeepBest,
    LookAfter,
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
from coordinator.news import News
from coordinator.notifier import Notifier
from coordinator.overview import Overview
from coordinator.pacing import ComeBack, Pacing
from coordinator.partial_sums import PartialSums
from coordinator.presence import PRESENCE, OwnPresence, Presence, SharedPresence
from coordinator.reports import Reports
from coordinator.retention import LEAST_VERSIONS, Keep, Retention
from coordinator.served_versions import ServedVersions
from coordinator.sharing import Sharing
from coordinator.store.blobs import Blobs
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.repository import Repository
from coordinator.store.schema import DELETING, FINISHED, JobRecord, UpdateRecord
from coordinator.store.versions import Versions
from coordinator.uploaded_checks import UploadedChecks
from federation import cohort, rounds
from federation.axes.cover import DeviceProfile
from federation.engine import RoundEngine
from federation.errors import EmbraceError, InputError
from federation.job import Plan, plan_from, plan_to
from federation.messages import TaskOffer, encode_task
from federation.pace import Pace
from federation.round_sums import Reached

log = logging.getLogger("embrace.coordinator")
MOST_REFUSED = 3  # bodies of a task that are no update, after which its seat is free
CLEANS = 60.0  # seconds after which a process looks again which of its copies others have deleted
REMIND = 15.0  # seconds after which a round that is closing is looked at again, whatever became of its worker
OUTAGE = 5.0  # seconds without a process at work, after which this is held against no device


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
        keep: Keep | None = None,
        pace: Pace | None = None,
        workers: int = 1,
    ) -> None:
        """Without `workers`, other processes fold what this one receives, if they share its database."""
        limits, keep = limits or EvaluationLimits(), keep or Keep()
        folder = limits.evaluation_data
        self.repository = repository
        self.clock = clock
        self.notifier = Notifier()  # notifies when there may be something to do for devices that had nothing
        self.watchers = Notifier()  # notifies when there may be news for clients that watch
        self.presence: Presence = SharedPresence(repository) if repository.is_shared else OwnPresence(repository)
        self.shut_out: set[str] = set()  # devices that were revoked since the process started
        self.leaving = False
        self._ticked = clock()
        self._cleaned = clock()
        self._reminded = clock()
        self._reached = reached
        self._blobs = blobs
        self._bodies = Bodies(blobs)
        self._versions = Versions(blobs, more=keep.keep_versions - LEAST_VERSIONS)
        self._bundles = Bundles(blobs)
        self._jobs: dict[str, OpenJob] = {}
        self._pacing = Pacing(pace or Pace(), self.presence, self._jobs)
        self._units = Units(repository, clock, self._handle, self.watchers.notify)
        self._sharing: Sharing | None = None  # with other processes
        if repository.is_shared:
            self._sharing = Sharing(self._units, self._jobs, self._engine_of, self._heard, self._forgotten)
            self._units.shared = self._sharing
        self.tell_registry: Callable[[News], None] = lambda news: None
        arrivals = Arrivals(self._units, self._bodies, self._jobs, self.presence, reached, self._refresh)
        checks = UploadedChecks(repository, arrivals, self._refresh)
        partial = None
        if self._sharing is not None:
            partial = PartialSums(self._units, self._bodies, self._refresh, self._sharing.tell_of, reached)
        self._folding = FoldWorker(
            self._units, self._bodies, self._versions, reached, self._keeps, checks, partial, folds=workers > 0
        )
        self._data = EvaluationData(blobs, None if folder is None else Path(folder))
        self._best = BestVersions(repository, self._versions)
        self._evaluations = Evaluations(
            self._units, self._bundles, self._best, self._versions, self._data, limits, self._end_early
        )
        self._deletion = Deletion(self._units, blobs, self._data, self._bundles, reached)
        reports = Reports(
            repository, self._jobs, self._evaluations, self._best, self._units, self.presence, self._pacing
        )
        served = self._served = ServedVersions(reports, self._bundles, self._versions)
        self.prune = Retention(repository, blobs, keep, clock).run_in_turn
        self.benchmarks = Benchmarks(self._units, self._bundles)
        self.overview = Overview(repository, reports, self._versions, self._bundles, self._data)
        # What these parts do, the API finds here.
        self._held = arrivals.held
        self.receive = arrivals.receive
        self.receive_at_once = arrivals.receive_at_once
        self.accept_all = arrivals.accept_all
        self.upload_url = arrivals.upload_url
        self.complete_all = arrivals.complete_all
        self.check_uploads = arrivals.check_uploads
        self.is_unchecked = arrivals.is_unchecked
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
        self.weights_url = served.weights_url
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
        if self._sharing is not None:
            self._join(self._sharing)
            return
        needed: list[UpdateRecord] = []
        with self._units.begin() as work:
            self.presence.recall(work.session, work.now)
            outage = work.now - min(work.now, self.repository.last_sign_of_life(work.session) or work.now)
            for record in self.repository.unfinished_jobs(work.session):
                try:
                    needed += self._restore(work, record, outage)
                except InputError as error:  # the others go on
                    log.error("job %s cannot be continued: %s", record.id, error)
                    message = f"it cannot be continued: {error}"
                    self.repository.change_job(work.session, record.id, state="failed", message=message)
            stale = [row.task for row in self.repository.unchecked_updates(work.session) if row not in needed]
            self.repository.delete_updates(work.session, stale)  # of jobs that are over
            records = self.repository.jobs(work.session)
            for record in records:  # before anything is committed that would be scored anyway
                self._evaluations.resume(work.session, record)
            best = {record.id: self._best.of(work.session, record) for record in records}
            work.outbox += [KeepBest(job, found.version if found else None) for job, found in best.items()]
        self._bodies.keep_only(needed)
        self._data.clean()
        for record in records:
            self._versions.forget(record.id, before=record.version - 1)

    def _restore(self, work: UnitOfWork, record: JobRecord, outage: float) -> list[UpdateRecord]:
        """Open a job as it was and have every body of its round folded again; return the updates that it needs."""
        job = restore_job(self.repository, work.session, record, self._engine_of(record))
        round = job.state.round
        needed = needed_updates(self.repository, work.session, job)
        work.outbox.append(AdmitJob(job))
        unchecked = self.repository.unchecked_updates(work.session, job.id)
        work.outbox += [CheckUpdate(job, update) for update in unchecked]
        work.outbox += [FoldUpdate(job, update) for update in needed if update.round == round.number]
        if round.state == "closing":
            work.outbox.append(FinishRound(job))
        elif record.state != "paused":  # no device could be answered while the process was down
            work.advance(job, rounds.Resumed(outage))
        return [*needed, *unchecked]

    def _engine_of(self, record: JobRecord) -> RoundEngine:
        return RoundEngine(plan_from(record.plan), self._bundles.manifest(record.bundle))

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
        if self._sharing is not None:
            self._sharing.stop()
        self._blobs.close()
        self.repository.close()

    def tick(self) -> None:
        """Let time pass: leases run out, deadlines come, what could not be written is tried again."""
        if self._sharing is not None:
            self._keep_jobs(self._sharing)
        self._folding.retry()
        before, self._ticked = self._ticked, self.clock()
        ends = (known.benched_until for job in list(self._jobs.values()) for known in job.state.standings.values())
        if any(until is not None and before < until <= self._ticked for until in ends):
            self.notifier.notify()
        kept = [job for job in list(self._jobs.values()) if self._keeps(job.id)]
        for job in kept:
            try:
                self._pass_time(job, self.clock())
            except Exception:
                log.exception("job %s: time could not pass", job.id)
        if abs(self._ticked - self._reminded) >= REMIND:
            self._reminded = self._ticked
            for job in [job for job in kept if job.state.round.state == "closing"]:
                self._folding.put(LookAfter(job, True))

    def _pass_time(self, job: OpenJob, now: float) -> None:
        with self._units.lock:
            paused_at = job.state.paused_at
            if job.state.round.is_due(now if paused_at is None else paused_at):
                with self._units.begin(job.id, now=now) as work:
                    work.advance(job, rounds.Tick())

    def _handle(self, effect: Effect) -> None:
        """Do what follows a commit."""
        match effect:
            case AdmitJob(job):
                self._jobs[job.id] = job
                if self._sharing is not None:
                    self._sharing.keep(job.id)
            case ForgetJob(job):
                self._jobs.pop(job.id, None)
            case CheckUpdate() | FoldUpdate() | FinishRound() | DeleteBodies():
                self._folding.put(effect)
            case EvaluateVersion(job, version):
                self._evaluations.request(job.id, job.bundle, version, job.engine.plan.evaluate)
            case KeepBest(job_id, version):
                self._versions.forget_best(job_id, besides=version)
            case ShutOut(device):
                self.shut_out.add(device)
                self.presence.left(device)
            case MissedOffer(device):
                self.presence.left(device)
            case NotifyDevices():
                self.notifier.notify()
            case ReachPoint(name):
                self._reached(name)

    # --- other processes on the same database ------------------------------------------------------------------------

    def _join(self, sharing: Sharing) -> None:
        """Begin to answer requests beside the processes that may be at work, and look after jobs without a keeper."""
        with self._units.begin() as work:
            signs = (self.repository.is_alive(work.session, work.now), self.repository.last_sign_of_life(work.session))
            outage = work.now - min(work.now, max((at for at in signs if at is not None), default=work.now))
            for job, why in sharing.broken.items():
                message = f"it cannot be continued: {why}"
                self.repository.change_job(work.session, job, state="failed", message=message)
                self.repository.change_shared_job(work.session, job, open=False)
            for open_job in self._jobs.values() if outage >= OUTAGE else ():
                if open_job.state.paused_at is None and open_job.state.round.state != "closing":
                    work.advance(open_job, rounds.Resumed(outage))
        sharing.start()
        self._keep_jobs(sharing)

    def _keep_jobs(self, sharing: Sharing) -> None:
        """Go on with the jobs that no process looks after, and remove what is left of those that are over."""
        try:
            new, over = sharing.find_jobs_to_keep()
            for job in new:
                self._take_up(sharing, job)
            for job in over:
                self._bodies.forget(job, before=sys.maxsize)
                with self._units.begin(job) as work:
                    unchecked = self.repository.unchecked_updates(work.session, job)
                    self.repository.delete_updates(work.session, [row.task for row in unchecked])
                    self.repository.delete_shared_job(work.session, job)
            if self._ticked - self._cleaned >= CLEANS:
                self._cleaned = self._ticked
                self._blobs.drop_deleted()
        except (SQLAlchemyError, OSError) as error:  # the database or the blobs are away
            log.warning("jobs without a keeper could not be taken: %s", error)

    def _take_up(self, sharing: Sharing, id: str) -> None:
        """Go on with a job where its last keeper ended."""
        sharing.refresh(id)
        with self.repository.reading() as session:
            record = self.repository.job(session, id)
            if record is not None:
                self._evaluations.resume(session, record)
                best = self._best.of(session, record)
                self._versions.forget_best(id, besides=best.version if best else None)
                self._versions.forget(id, before=record.version - 1)
        if (job := self._jobs.get(id)) is not None:
            self._folding.put(LookAfter(job, all=True))

    def _keeps(self, job: str) -> bool:
        """Return whether this process looks after a job."""
        return self._sharing is None or self._sharing.keeps(job)

    def _refresh(self, job: str) -> None:
        if self._sharing is not None:
            self._sharing.refresh(job)

    def _heard(self, news: News) -> None:
        """Do what follows something that another process has recorded."""
        self.shut_out.update(news.shut_out)
        self.tell_registry(news)
        for id, job in list(self._jobs.items()):
            if news.lost or id in news.jobs or (id in news.summed and job.state.round.state == "closing"):
                self._folding.put(LookAfter(job))
        if news.devices or news.lost:
            self.notifier.notify()
        self.watchers.notify()

    def _forgotten(self, job: OpenJob) -> None:
        """Let go of the sums of a job that another process has ended."""
        self._folding.put(DeleteBodies(job, ()))

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

    def next_tasks(self, devices: Sequence[str]) -> list[TaskOffer | ComeBack | Exception | None]:
        """Offer several devices a task each, in one transaction; without one they wait, or are told to come back.

        A device that comes before its time does not heed it: it waits, so that it does not ask again at once.
        """
        if self.leaving:
            return [None] * len(devices)
        with self._units.begin() as work:
            # A fleet that waits does not write all the time.
            shut_out = self.repository.see(work.session, devices, work.now, every=PRESENCE / 8)
            known = [device for device in devices if device not in shut_out]
            early = self.presence.came(work.session, known, work.now)
            seekers: dict[str, Mapping[str, cohort.Member]] = {}
            for job in self._jobs.values():
                with _alone(job):
                    self._draw_cohort(work, job, known)
                    seekers[job.id] = self._seekers(work, job, known)
            offers = {device: self._offer(work, device, seekers) for device in known}
            if served := [device for device, offer in offers.items() if offer is not None]:
                self.presence.took(work.session, served)
            idle = [device for device, offer in offers.items() if offer is None and device not in early]
            away = {device: ComeBack(seconds) for device, seconds in self._pacing.steer(work, idle).items()}
            refused = NotAllowed("this device was shut out")
            return [refused if device in shut_out else away.get(device, offers[device]) for device in devices]

    def _draw_cohort(self, work: UnitOfWork, job: OpenJob, came: Sequence[str]) -> None:
        """Begin a round that waits for its devices, if they are there.

        They are counted first: of a fleet that gathers, only the devices that `came` now are looked at.
        """
        state = work.state(job)
        if state.paused_at is not None or state.round.state != "selecting":
            return
        here = set(self.presence.here(work.session, work.now)) - self.shut_out
        resting = here & state.benched(work.now)
        self._note_fitness(work, job, here.intersection(came) - resting)
        unfit = work.state(job).unfit.keys()
        away = self._pacing.count_away(work.session, work.state(job), work.now)
        rests = away.resting + len(resting)
        missing = job.engine.missing_to_begin(len(here - resting - unfit), rests, away.awaited)
        # Rather those that are only slow than too few.
        if missing and (slow := {device for device in resting if state.only_rests(device)}):
            resting -= slow
            rests = away.resting + len(resting)
            missing = job.engine.missing_to_begin(len(here - resting - unfit), rests, away.awaited)
        fit = here - resting
        drawn = cohort.Cohort(missing=missing) if missing else self._draw(work, job, fit, rests, away.awaited)
        work.advance(job, rounds.DevicesAvailable(cohort=drawn))

    def _draw(self, work: UnitOfWork, job: OpenJob, fit: Collection[str], resting: int, away: int) -> cohort.Cohort:
        """Draw a cohort, and note the devices that the job cannot use."""
        state = work.state(job)
        profiles, unreadable = self.repository.profiles(work.session, fit)
        seconds = {id: known.seconds for id, known in state.standings.items() if known.seconds is not None}
        drawn = job.engine.assign(
            state.round.number, profiles, state.previous, seconds=seconds, resting=resting, away=away
        )
        work.note_unfit(job, {**dict(drawn.unfit), **unreadable})
        return drawn

    def _seekers(self, work: UnitOfWork, job: OpenJob, devices: Sequence[str]) -> Mapping[str, cohort.Member]:
        """Find the devices without a seat that could take one that has become free; benched ones get none."""
        state = work.state(job)
        if state.paused_at is not None or state.round.state != "collecting":
            return {}
        seated = state.round.seat_of
        idle = [device for device in devices if seated(device) is None and not state.why_benched(device, work.now)]
        return {member.device: member for member in self._note_fitness(work, job, idle)} if idle else {}

    def _offer(
        self, work: UnitOfWork, device: str, seekers: Mapping[str, Mapping[str, cohort.Member]]
    ) -> TaskOffer | None:
        """Offer a task of the first job that has one for a device."""
        for job in self._jobs.values():
            with _alone(job):
                offer = self._offer_of(work, job, device, seekers.get(job.id, {}).get(device))
                if offer is not None:
                    return offer
        return None

    def _offer_of(self, work: UnitOfWork, job: OpenJob, device: str, seeker: cohort.Member | None) -> TaskOffer | None:
        state = work.state(job)
        if state.paused_at is not None or state.round.state != "collecting":
            return None
        seat = state.round.seat_of(device)
        if seat is None and seeker is not None:
            work.advance(job, rounds.DevicesAvailable((seeker,)))
            seat = work.state(job).round.seat_of(device)
        if seat is None or seat.answered:
            return None
        effects = work.advance(job, cohort.LeaseTaken(device, seat.number))
        granted = next((effect.seat for effect in effects if isinstance(effect, cohort.GrantLease)), None)
        if granted is None:
            return None
        task = f"{job.id}-{state.round.number}-{granted.number}-{len(granted.holders)}"
        return TaskOffer(task, job.id, job.bundle, state.version, granted.until, encode_task(work.task(job, granted)))

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
        with self._units.begin(job_of(task)) as work:
            job, seat, attempt = self._held(device, task)
            self.presence.answered(work.session, [device], work.now)
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
        with suppress(NotFound, Refused), self._units.begin(job_of(task)) as work:
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

        A renewal is recorded only where other processes have to see it: after a restart every lease begins anew.
        """
        answers: list[float | Exception] = []
        with ExitStack() as stack:
            stack.enter_context(self._units.lock)
            now = self.clock()  # once: what is due by then has to happen in a unit of work
            work = None
            if self._sharing is not None:
                work = stack.enter_context(self._units.begin(*{job_of(task) for _, task in beats}, now=now))
            for device, task in beats:
                try:
                    answers.append(self._renew(work, device, task, now))
                except EmbraceError as error:
                    answers.append(error)
        return answers

    def _renew(self, work: UnitOfWork | None, device: str, task: str, now: float) -> float:
        job, seat, attempt = self._held(device, task)
        renewed = cohort.LeaseRenewed(device, seat.number, attempt)
        if work is not None:
            effects = work.advance(job, renewed)
        else:
            self._pass_time(job, now)
            now = now if job.state.paused_at is None else job.state.paused_at
            round, effects = rounds.advance(job.state.round, renewed, now)
        for effect in effects:
            if isinstance(effect, cohort.RefuseLease):
                raise Refused(f"task {task} is no longer this device's: {effect.reason}", effect.reason)
        if work is None:
            job.state = replace(job.state, round=round)
        return job.state.round.lease

    def lease_of(self, job: str) -> float | None:
        """Find the seconds for which a device may be silent at a task of a job."""
        known = self._jobs.get(job)
        return None if known is None else known.state.round.lease

    def inherited(self, device: str, task: str) -> Path:
        """Find the body that the holder of a task goes on with."""
        with self._units.lock, self.repository.reading() as session:
            self._refresh(job_of(task))
            job, seat, _ = self._held(device, task)
            found = find_inherited(self.repository, session, job, seat.number)
        if found is None:
            raise NotFound(f"task {task!r} inherits nothing")
        return self._bodies.file(found[0])


@contextmanager
def _alone(job: OpenJob) -> Iterator[None]:
    """Let trouble with one job stay its own: it is logged, and devices get the tasks of others."""
    try:
        yield
    except SQLAlchemyError:  # the transaction is over
        raise
    except Exception:
        log.exception("job %s: no task could be offered", job.id)
