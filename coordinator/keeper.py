"""Jobs as they run: created, recovered after a restart, closed round by round.

One lock guards all state; nothing slow happens while it is held. Bodies are folded, and versions written, by one worker
thread.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.aggregate import first_state, forget_versions
from coordinator.body_check import read_body
from coordinator.credentials import new_id
from coordinator.errors import NotFound, Refused
from coordinator.evaluation import Evaluation, Evaluations
from coordinator.job_runner import JobRunner
from coordinator.notifier import Notifier
from coordinator.store.database import Sessions
from coordinator.store.files import Files
from coordinator.store.schema import DeviceRow, EventRow, JobRow, MetricRow, RoundRow, UpdateRow
from coordinator.views import FINISHED, Views
from edge_runtime.bundle_files import check_bundle, read_manifest
from edge_runtime.files import publish
from federation import rounds
from federation.decode import decode
from federation.errors import EmbraceError
from federation.job import Evaluate, Plan, plan_from, plan_to
from federation.manifest import Manifest
from federation.round_sums import Reached
from federation.wire import CheckedUpdate

log = logging.getLogger("embrace.coordinator")
AT_THE_DISK = 8  # threads that wait for it
TRY_AGAIN = 5.0  # seconds after which a round that could not be closed, for want of disk perhaps, is tried again


class JobKeeper(Views):
    """What happens to jobs. Thread-safe."""

    def __init__(
        self,
        files: Files,
        sessions: Sessions,
        *,
        clock: Callable[[], float] = time.time,
        reached: Reached = lambda point: None,
    ) -> None:
        super().__init__(files, sessions)
        self.clock = clock
        self._reached = reached
        self._lock = threading.RLock()
        self.notifier = Notifier()  # notifies when there may be something to do for devices that had nothing
        self._then: list[Callable[[], None]] = []  # once the transaction that is open is recorded
        self._runners: dict[str, JobRunner] = {}
        self.shut_out: set[str] = set()  # devices that were revoked since the process started
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._labour, name="fold", daemon=True)
        self._disk = ThreadPoolExecutor(AT_THE_DISK, "disk")
        self.leaving = False
        self._evaluations = Evaluations(self._scored)

    def start(self) -> None:
        """Take up what was going on when the process ended, and go on."""
        self.files.forget_arriving()
        self._worker.start()
        closing = select(RoundRow.job).where(RoundRow.state == "closing")  # brought to its end, even if it was stopped
        with self._lock, self._transaction() as session:
            alive = [session.scalar(select(func.max(at))) for at in (EventRow.at, DeviceRow.seen_at)]
            outage = max(0.0, self.clock() - max((at for at in alive if at is not None), default=self.clock()))
            for row in session.scalars(select(JobRow).where(JobRow.state.not_in(FINISHED) | JobRow.id.in_(closing))):
                self._recover(session, row, outage)
            self._evaluate_again(session)  # before anything is committed that would be scored anyway
            needed = {self._body(update) for runner in self._runners.values() for update in runner.needed(session)}
            versions = session.execute(select(JobRow.id, JobRow.version)).all()
        for path in self.files.spooled() - needed:  # never acknowledged, so the device sends it again; or done with
            path.unlink(missing_ok=True)
        for job, version in versions:
            forget_versions(self.files, job, before=version - 1)

    def release(self) -> None:
        """Send everybody home who waits for a task: the process is about to end. Updates still arrive."""
        self.leaving = True
        self.notifier.notify()

    def stop(self) -> None:
        """Finish what is being folded, then rest."""
        self.release()
        self._work.put(None)
        self._worker.join()
        self._disk.shutdown()
        self._evaluations.close()

    def create_job(self, plan: Plan, bundle: str) -> str:
        """A job on a bundle that is here already."""
        directory = self.files.bundle(bundle)
        manifest = read_manifest(directory)
        check_bundle(directory, manifest)
        job, now = new_id(), self.clock()
        first = self.files.version(job, 0)
        first.parent.mkdir(parents=True)
        try:
            draft = first.with_suffix(".draft")
            shutil.copyfile(directory / manifest.weights.name, draft)
            publish(draft, first)
            first_state(self.files, job, plan.choices.first_vectors(manifest.space.size))
            self._record_job(job, plan, bundle, manifest, now)
        except BaseException:
            shutil.rmtree(first.parents[1], ignore_errors=True)
            raise
        return job

    def _record_job(self, job: str, plan: Plan, bundle: str, manifest: Manifest, now: float) -> None:
        with self._lock, self._transaction() as session:
            row = JobRow(
                id=job,
                name=plan.name or manifest.name,
                bundle=bundle,
                plan=plan_to(plan),
                state="running",
                version=0,
                created_at=now,
            )
            session.add(row)
            session.flush()
            runner = JobRunner(row, plan, manifest, self.files, self._reached)
            runner.open(session, 0, now)
            runner.note("JobCreated", {"name": row.name}, now)
            runner.save(session)
            self._then.append(lambda: self._runners.update({job: runner}))
        self.notifier.notify()

    def is_over(self, job: str) -> bool:
        """Also its last version is scored, if that is wanted."""
        if not super().is_over(job):
            return False
        with self._lock:  # behind whatever the end of the job led to
            return not self._evaluations.unfinished(job)

    def set_state(self, job: str, state: str) -> None:
        """running, paused or stopped."""
        with self._lock, self._transaction(*self._runners.values()) as session:
            row = session.get(JobRow, job)
            if row is None:
                raise NotFound(f"there is no job {job!r}")
            if row.state in FINISHED:
                raise Refused(f"job {job} is {row.state}", "finished")
            if row.state == state:
                return
            runner, now = self._runners[job], self.clock()
            row.state = state
            runner.note("JobState", {"state": state}, now)
            paused, runner.paused_at = runner.paused_at, now if state == "paused" else None
            if paused is not None:
                self._advance(session, runner, rounds.Resumed(max(0.0, now - paused)))
            if state == "stopped":
                self._advance(session, runner, rounds.Stop())
            self._then.append(self.notifier.notify)

    def tick(self) -> None:
        """Let time pass: leases run out, deadlines come, what could not be written is tried again. Never fails."""
        with self._lock:
            for runner in list(self._runners.values()):
                try:
                    if runner.close_at is not None and runner.close_at <= self.clock():
                        self._put_close(runner)
                    due = runner.round.wakes_at if runner.round else None
                    if due is not None and due <= self._now(runner):
                        with self._transaction(runner) as session:
                            self._advance(session, runner, rounds.Tick())
                except Exception:
                    log.exception("job %s: time could not pass", runner.id)

    @contextmanager
    def _transaction(self, *runners: JobRunner) -> Iterator[Session]:
        """All or nothing, in memory too: if the database refuses, the rounds are as they were."""
        before = [(runner, runner.mark()) for runner in runners]
        try:
            with self.sessions.begin() as session:
                yield session
                for runner in runners:
                    runner.save(session)
        except BaseException:
            for runner, mark in before:
                runner.back_to(mark)
            self._then.clear()
            raise
        then, self._then = self._then, []
        for follow in then:
            follow()

    def _now(self, runner: JobRunner) -> float:
        """For a paused job time stands still: the pause is held against nobody."""
        return self.clock() if runner.paused_at is None else runner.paused_at

    def _advance(self, session: Session, runner: JobRunner, event: rounds.Event) -> tuple[rounds.Effect, ...]:
        """Apply a fact; what it leads to follows once the transaction is recorded."""
        before = runner.round
        effects = runner.advance(session, event, self._now(runner))
        for effect in effects:
            if isinstance(effect, rounds.CloseRound):
                self._then.append(lambda: self._put_close(runner))
            elif isinstance(effect, rounds.RoundAbandoned):
                self._finish(session, runner, effect.reason)
        # Seats are offered or free now. While devices are missing to begin, asking again leads to nothing.
        assert before is not None and runner.round is not None
        freed = any(isinstance(effect, rounds.WaitForDevices) for effect in effects)
        if runner.round.state == "collecting" and (freed or before.state == "selecting"):
            self._then.append(self.notifier.notify)
        return effects

    def _labour(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("the fold worker failed")

    def _fold(self, runner: JobRunner, row: UpdateRow, checked: CheckedUpdate | None = None) -> None:
        """Fold a body, once. If that fails the sums are void: closing the round folds everything again."""
        if runner.round is None or runner.round.number != row.round or row.task in runner.summing.folded:
            return
        try:
            slots = runner.round.slots
            runner.summing.fold(
                row,
                checked or self._check_again(runner, row),
                self._body(row),
                slots[row.slot].count,
                sum(seat.count for seat in slots),
            )
        except BaseException:
            runner.summing.forget()
            raise

    def _body(self, row: UpdateRow) -> Path:
        return self.files.arrived(row.task, row.sha256)

    def _put_close(self, runner: JobRunner) -> None:
        runner.close_at = None
        self._work.put(lambda: self._close(runner))

    def _close(self, runner: JobRunner) -> None:
        try:
            self._commit(runner)
        except Exception:
            runner.summing.forget()
            runner.close_at = self.clock() + TRY_AGAIN
            log.exception("job %s: the round could not be closed; it is tried again", runner.id)

    def _commit(self, runner: JobRunner) -> None:
        """The server's step; everything that was acknowledged is folded before it."""
        with self._lock, self.sessions() as session:
            job = session.get_one(JobRow, runner.id)
            if runner.round is None or runner.round.state != "closing":
                return
            updates, devices = runner.updates(session), runner.contributors(session)
            done = runner.updates(session, before=1) if runner.engine.inherits(runner.round.number) else []
        for update in updates:
            self._fold(runner, update)
        if not updates:
            raise EmbraceError(f"round {runner.round.number} closed without an update")
        runner.summing.write_next(job.version, updates, devices)
        told, facts = runner.summing.summary(updates), runner.summing.next_facts()
        self._reached("mid-commit")
        with self._lock, self._transaction(runner) as session:
            job = session.get_one(JobRow, runner.id)
            assert runner.round is not None
            number = runner.round.number
            row = session.get_one(RoundRow, (runner.id, number))
            row.summary = {**told, "facts": asdict(facts)}
            self._advance(session, runner, rounds.Committed())
            job.version += 1
            event = {"round": number, "version": job.version, **told}
            runner.note("RoundCommitted", event, self.clock())
            if job.state == "stopped" or number + 1 >= runner.plan.num_rounds:
                job.state = job.state if job.state == "stopped" else "done"
                runner.note("JobState", {"state": job.state}, self.clock())
                self._then.append(lambda: self._forget(runner))
            else:
                runner.open(session, number + 1, self._now(runner))
                self._then.append(partial(runner.summing.go_on, facts))
            self._then.append(self.notifier.notify)
            self._then.append(partial(self._reached, "after-commit"))
            self._then.append(partial(self._evaluate, job, job.version, runner.plan.evaluate))
        try:  # what follows can fail without harm
            done += updates if job.state in FINISHED or not runner.engine.inherits(number + 1) else []
            _remove([self._body(update) for update in done])
            forget_versions(self.files, runner.id, before=job.version - 1)
        except OSError:
            log.exception("job %s: after version %s", runner.id, job.version)

    def _evaluate(self, job: JobRow, version: int, wanted: Evaluate) -> None:
        """Have a version scored; it gets a second name, because versions do not stay for ever."""
        if wanted.data is None or version % wanted.every:
            return
        own = self.files.unscored(job.id, version)
        try:
            if not own.exists():
                own.hardlink_to(self.files.version(job.id, version))
        except OSError:  # it is tried again after a restart, if the version is still there then
            log.exception("job %s: version %s cannot be scored", job.id, version)
            return
        bundle = self.files.bundle(job.bundle)
        self._evaluations.put(Evaluation(job.id, version, bundle, own, wanted.data, wanted.statistics))

    def _evaluate_again(self, session: Session) -> None:
        """What should have been scored when the process ended, and was not: it waited, or not even that."""
        for job in session.scalars(select(JobRow)):
            wanted = decode(Evaluate, job.plan.get("evaluate", {}), "evaluate", defaults=True)
            scored = select(EventRow.id).where(EventRow.job == job.id, EventRow.kind == "Evaluated")
            for version in self.files.versions(job.id) if wanted.data is not None else ():
                if session.scalar(scored.where(EventRow.body["version"].as_integer() == version).limit(1)):
                    self.files.unscored(job.id, version).unlink(missing_ok=True)
                elif 1 <= version <= job.version:  # what lies beyond was never committed
                    self._evaluate(job, version, wanted)

    def _scored(self, request: Evaluation, found: dict[str, Any]) -> None:
        now = self.clock()
        with self.sessions.begin() as session:
            for name in ("mean_loss", "accuracy"):
                if found.get(name) is not None:
                    session.add(
                        MetricRow(job=request.job, version=request.version, name=name, value=found[name], at=now)
                    )
            body = {"version": request.version, **found}
            session.add(EventRow(job=request.job, at=now, kind="Evaluated", body=body))

    def _finish(self, session: Session, runner: JobRunner, why: str) -> None:
        """A job without a round to go on with: failed, unless it was stopped."""
        job = session.get_one(JobRow, runner.id)
        if job.state not in FINISHED:
            job.state, job.message = "failed", why
            runner.note("JobState", {"state": "failed", "message": why}, self.clock())
        bodies = [self._body(update) for update in runner.needed(session)]
        self._then.append(lambda: self._forget(runner))
        self._then.append(lambda: self._work.put(lambda: _remove(bodies)))  # behind what is being folded

    def _forget(self, runner: JobRunner) -> None:
        self._runners.pop(runner.id, None)

    def _recover(self, session: Session, row: JobRow, outage: float) -> None:
        """A job as it was: the open round, and every body of it folded again."""
        manifest: Manifest = read_manifest(self.files.bundle(row.bundle))
        runner = JobRunner(row, plan_from(row.plan), manifest, self.files, self._reached)
        newest = select(RoundRow).where(RoundRow.job == row.id).order_by(RoundRow.number.desc()).limit(1)
        runner.restore(session, session.scalars(newest).one())
        self._runners[row.id] = runner
        if row.state == "paused":
            told = select(func.max(EventRow.at)).where(EventRow.job == row.id, EventRow.kind == "JobState")
            runner.paused_at = session.scalar(told)
        else:  # nobody could answer while the process was down
            self._advance(session, runner, rounds.Resumed(outage))
            runner.save(session)
        for update in runner.updates(session):
            self._work.put(lambda update=update: self._fold(runner, update))  # type: ignore[misc]
        if runner.round is not None and runner.round.state == "closing":
            self._put_close(runner)

    def _check_again(self, runner: JobRunner, row: UpdateRow) -> CheckedUpdate:
        """What is known about a body, from the body itself."""
        assert runner.round is not None
        decoder, _ = runner.summing.decoder(runner.round.slots[row.slot].member.boundary, row.round)
        return read_body(self._body(row), decoder)[0]


def _remove(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
