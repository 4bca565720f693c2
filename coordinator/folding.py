"""The worker that folds updates and closes rounds: one thread, one item after the other.

Sums are not in the database: after a restart they are folded again from the bodies, in any order to the same bits.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy.exc import OperationalError

from coordinator.best_versions import BestVersions
from coordinator.body_check import read_body
from coordinator.errors import StoreAway, Superseded
from coordinator.jobs import (
    CheckUpdate,
    DeleteBodies,
    EvaluateVersion,
    FinishRound,
    FoldUpdate,
    ForgetJob,
    LookAfter,
    OpenJob,
    ReachPoint,
    Units,
)
from coordinator.store.bodies import Bodies, BodyReader
from coordinator.store.schema import FINISHED, UpdateRecord
from coordinator.store.versions import Versions
from federation import rounds
from federation.algorithm import Facts
from federation.errors import FULL_DISK, EmbraceError
from federation.round_sums import Reached, RoundSums
from federation.wire import CheckedTrack, CheckedUpdate

log = logging.getLogger("embrace.coordinator")
TRY_AGAIN = 5.0  # seconds after which a round that could not be closed is tried again; longer each time it fails
MOST_WORDS = 500  # characters of an error that a job keeps
Item = CheckUpdate | FoldUpdate | FinishRound | LookAfter | DeleteBodies


@dataclass
class _Folded:
    """What is folded of one round."""

    round: int
    sums: RoundSums
    slots: set[int] = field(default_factory=set)
    updates: dict[str, CheckedUpdate] = field(default_factory=dict)  # by task


class FoldWorker:
    """Fold what was acknowledged, write new versions, try again what could not be written."""

    def __init__(
        self,
        units: Units,
        bodies: Bodies,
        versions: Versions,
        reached: Reached,
        keeps: Callable[[str], bool],
        check: Callable[[UpdateRecord], None],
    ) -> None:
        """`keeps`: whether this process looks after a job. Another one may do so from one moment to the next.

        `check` checks an update that was uploaded, and settles whether it counts.
        """
        self._check = check
        self._units = units
        self._keeps = keeps
        self._repository = units.repository
        self._bodies = bodies
        self._versions = versions
        self._best = BestVersions(units.repository, versions)
        self._reached = reached
        self._items: queue.Queue[Item | None] = queue.Queue()
        self._folded: dict[OpenJob, _Folded] = {}  # used by the worker's thread alone
        self._retries: dict[OpenJob, float] = {}  # rounds to close again, and when
        self._rechecks: dict[OpenJob, float] = {}  # jobs with updates that could not be read, and when to try again
        self._thread = threading.Thread(target=self._run, name="fold", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish everything that waits."""
        self._items.put(None)
        self._thread.join()

    def put(self, item: Item) -> None:
        self._items.put(item)

    def retry(self) -> None:
        """Take up the rounds whose time has come to be closed again."""
        for job in [job for job, at in list(self._retries.items()) if at <= self._units.clock()]:
            del self._retries[job]
            self.put(FinishRound(job))
        for job in [job for job, at in list(self._rechecks.items()) if at <= self._units.clock()]:
            del self._rechecks[job]
            self.put(LookAfter(job))

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._do(item)
            except Exception:
                log.exception("the fold worker failed")
            finally:
                self._items.task_done()

    def _do(self, item: Item) -> None:
        match item:
            case CheckUpdate(job, update):
                self._check_uploaded(job, update)
            case FoldUpdate(job, update, checked):
                self._fold(job, update, checked)
            case FinishRound(job):
                self._finish(job)
            case LookAfter(job):
                self._look_after(job)
            case DeleteBodies(job, updates):
                self._folded.pop(job, None)
                self._bodies.delete_all(updates)

    def _look_after(self, job: OpenJob) -> None:
        """Fold what other processes have acknowledged, or close the round."""
        round, folded = job.state.round, self._folded.get(job)
        if round.state == "closing":
            self._finish(job)
            return
        known = folded.slots if folded is not None and folded.round == round.number else ()
        new = [seat.number for seat in round.counted if seat.number not in known]
        with self._repository.reading() as session:
            updates = list(self._repository.updates_of_slots(session, job.id, round.number, new))
            unchecked = self._repository.unchecked_updates(session, job.id)
        for update in updates:
            self._fold(job, update)
        for update in unchecked:
            self._check_uploaded(job, update)

    def _check_uploaded(self, job: OpenJob, update: UpdateRecord) -> None:
        """Check an update before it counts; if the storage or the database is away, later."""
        try:
            self._check(update)
        except (OSError, OperationalError) as error:
            log.warning("task %s: its update could not be checked yet: %s", update.task, error)
            self._rechecks[job] = self._units.clock() + TRY_AGAIN

    def _fold(self, job: OpenJob, update: UpdateRecord, checked: CheckedUpdate | None = None) -> None:
        """Fold a body, once. If that fails the sums are void: closing the round folds everything again."""
        state = job.state
        if state.round.number != update.round:
            return
        if job not in self._folded or self._folded[job].round != update.round:
            draws = sum(seat.count for seat in state.round.slots)
            self._folded[job] = _Folded(update.round, job.engine.sums(update.round, state.facts, draws, self._reached))
        folded = self._folded[job]
        if update.task in folded.updates:
            return
        try:
            checked = checked or self._check_again(job, update)
            with self._bodies.file(update).open("rb") as body:
                count = state.round.slots[update.slot].count
                folded.sums.fold(checked, body, update.weight, count, update.report)
        except BaseException:
            del self._folded[job]
            raise
        last = next(reversed(folded.updates.values()), checked)
        tracks = {name: _sharing(track, last.tracks[name]) for name, track in checked.tracks.items()}
        folded.updates[update.task] = CheckedUpdate(tracks, checked.size)
        folded.slots.add(update.slot)

    def _check_again(self, job: OpenJob, update: UpdateRecord) -> CheckedUpdate:
        """Find out what is known about a body from the body itself."""
        boundary = job.state.round.slots[update.slot].member.boundary
        decoder, _ = job.engine.decoder(boundary, update.round, job.state.facts)
        return read_body(self._bodies.file(update), decoder)[0]

    def _finish(self, job: OpenJob) -> None:
        closing = job.state.round
        if not self._keeps(job.id):
            return
        try:
            self._commit(job)
        except Superseded:
            log.warning("job %s: another process closed round %s", job.id, closing.number)
        except Exception as error:
            log.exception("job %s: round %s could not be closed", job.id, closing.number)
            if job.state.round is closing:  # what follows a commit is no part of it
                self._put_off(job, error)
        finally:
            self._folded.pop(job, None)

    def _put_off(self, job: OpenJob, error: Exception) -> None:
        """Try again later. A full disk and a store that is away are waited for; a defect ends the job in time."""
        away = isinstance(error, (OperationalError, StoreAway))
        waited_for = away or getattr(error, "errno", None) in FULL_DISK
        self._retries[job] = self._units.clock() + TRY_AGAIN * (1 + job.state.round.tries)
        if waited_for:
            return
        number, message = job.state.round.number, f"{type(error).__name__}: {error}"[:MOST_WORDS]
        with self._units.begin(job.id) as work:
            if job.state.round.number != number or job.state.round.state != "closing":
                return
            tries = job.state.round.tries + 1
            work.note(job, "CloseFailed", {"round": number, "tries": tries, "message": message})
            work.advance(job, rounds.CloseFailed(f"round {number} could not be closed: {message}"))
            if work.state(job).round.state != "closing":
                self._retries.pop(job)

    def _commit(self, job: OpenJob) -> None:
        """Take the server's step; everything that was acknowledged is folded before it."""
        state, engine = job.state, job.engine
        number = state.round.number
        if state.round.state != "closing":
            return
        with self._repository.reading() as session:
            updates = self._repository.updates(session, job.id, [number])
            devices = self._repository.contributors(session, job.id, number)
            done = self._repository.updates(session, job.id, [number - 1]) if engine.inherits(number) else []
        if not updates:
            raise EmbraceError(f"round {number} closed without an update")
        for update in updates:
            self._fold(job, update)
        folded = self._folded[job]
        self._write_version(job, folded, updates, devices)
        regions = [checked.model.region for checked in folded.updates.values()]
        told = engine.summary(folded.sums, regions, [(row.samples, row.bytes, row.report) for row in updates])
        members = [state.round.slots[row.slot].member for row in updates]
        answers = [(member.boundary, (row.samples, row.bytes, row.report)) for member, row in zip(members, updates)]
        scores = engine.device_scores(answers)
        facts = engine.next_facts(folded.sums)
        self._reached("mid-commit")
        over = self._record(job, told, facts, scores)
        try:  # what follows can fail without harm
            self._bodies.delete_all([*done, *(updates if over or not engine.inherits(number + 1) else [])])
            if self._repository.is_shared:  # what other processes received, and never recorded
                self._bodies.forget(job.id, before=number)
            self._versions.forget(job.id, before=state.version)
        except OSError:
            log.exception("job %s: after version %s", job.id, state.version + 1)

    def _record(self, job: OpenJob, told: dict[str, Any], facts: Facts, scores: dict[str, Any] | None) -> bool:
        """Record that a round is committed and open the next; return whether the job is over.

        `scores` are those that devices gave to the version that they received, the one before.
        """
        number, version = job.state.round.number, job.state.version + 1
        why = None
        with self._units.begin(job.id) as work:
            if job.state.round.number != number or job.state.round.state != "closing":
                raise Superseded
            if scores is not None:
                told = {**told, "evaluation": {"version": version - 1, **scores}}
                values = {f"device_{name}": scores.get(name) for name in ("accuracy", "mean_loss")}
                why = self._best.record(work, job.id, version - 1, job.engine.plan.evaluate, values)
            job_state = self._repository.job_state(work.session, job.id)
            work.advance(job, rounds.Committed(), summary={**told, "facts": asdict(facts)})
            work.change(job, version=version, facts=facts)
            work.note(job, "RoundCommitted", {"round": number, "version": version, **told})
            over = job_state in FINISHED or number + 1 >= job.engine.plan.num_rounds or why is not None
            if over:
                ended = {} if why is None or job_state in FINISHED else {"message": why}
                job_state = job_state if job_state in FINISHED else "done"
                self._repository.change_job(work.session, job.id, state=job_state, **ended)
                work.note(job, "JobState", {"state": job_state, **ended})
                work.outbox.append(ForgetJob(job))
            else:
                work.open_round(job, number + 1)
            self._repository.change_job(work.session, job.id, version=version, state=job_state)
            work.notify_devices()
            work.outbox += [ReachPoint("after-commit"), EvaluateVersion(job, version)]
        return over

    def _write_version(self, job: OpenJob, folded: _Folded, updates: list[UpdateRecord], devices: int) -> None:
        engine, version = job.engine, job.state.version
        place = (job.id, version, engine.space, engine.vector_names)
        if engine.plan.serve.combine == "mean":
            self._versions.keep_sums(job.id, version + 1, folded.sums, devices)
        bodies = [(folded.updates[update.task].model, BodyReader(self._bodies.file(update))) for update in updates]
        changes = engine.changes(folded.sums, self._versions.read(*place), devices, bodies)
        self._versions.write_next(*place, changes)


def _sharing(track: CheckedTrack, last: CheckedTrack) -> CheckedTrack:
    """Share the places of the update before: most devices write the same header, which is kept once."""
    return replace(track, places=last.places) if track.places == last.places else track
