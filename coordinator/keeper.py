"""Jobs as they run: created, recovered after a restart, closed round by round.

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
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import rounds
from coordinator.credentials import new_id
from coordinator.errors import NotFound, Refused
from coordinator.evaluation import Evaluation, Evaluations
from coordinator.job_runner import JobRunner, Reached
from coordinator.plan import Plan, plan_from, plan_to
from coordinator.store.database import Sessions
from coordinator.store.files import Files, publish
from coordinator.store.schema import EventRow, JobRow, MetricRow, RoundRow, UpdateRow
from coordinator.views import FINISHED, Views
from federation.bundle_files import check_bundle
from federation.manifest import Manifest, read_manifest
from federation.wire import CheckedUpdate, Limits, UpdateDecoder

log = logging.getLogger("embrace.coordinator")
PRESENCE = 60.0  # seconds after which a device that was not heard of counts as gone


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
        self.clock, self._reached = clock, reached
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._runners: dict[str, JobRunner] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._labour, name="fold", daemon=True)
        self._stopping = False
        self._evaluations = Evaluations(self._scored)

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
        self._evaluations.close()

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

    def tick(self) -> None:
        """Let time pass: leases run out, deadlines come."""
        with self._changed:
            for runner in list(self._runners.values()):
                if runner.round is not None and (due := runner.round.wakes_at) is not None and due <= self.clock():
                    with self._transaction(runner) as session:
                        effects = self._advance(session, runner, rounds.Tick())
                    self._follow(runner, effects)
            self._changed.notify_all()

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
        self._evaluate(runner, job)
        for update in updates:
            self.files.arrived(update.task).unlink(missing_ok=True)
        self.files.version(runner.id, job.version - 2).unlink(missing_ok=True)

    def _evaluate(self, runner: JobRunner, job: JobRow) -> None:
        """Have the new version scored; it gets a second name, because versions do not stay for ever."""
        wanted = runner.plan.evaluate
        if wanted.data is not None and job.version % wanted.every == 0:
            version = self.files.version(job.id, job.version)
            own = version.with_suffix(".evaluated")
            own.unlink(missing_ok=True)
            own.hardlink_to(version)
            request = Evaluation(job.id, job.version, self.files.bundle(job.bundle), own, wanted.data)
            self._evaluations.put(request)

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
