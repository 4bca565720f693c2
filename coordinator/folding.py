"""The worker that folds updates and closes rounds: one thread, one item after the other.

A single process has the sums of a round in memory: after a restart they are folded again from the bodies, in any order
to the same bits. Where processes share a database, each folds what it has received into partial sums
(partial_sums.py); so does `embrace worker`. The process that looks after the job merges them when its round closes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy.exc import OperationalError

from coordinator.best_versions import BestVersions
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
from coordinator.partial_sums import Gathered, PartialSums, check_again, count_draws
from coordinator.store import claims
from coordinator.store.bodies import Bodies, BodyReader
from coordinator.store.schema import FINISHED, UpdateRecord
from coordinator.store.versions import Versions
from coordinator.uploaded_checks import UploadedChecks
from federation import rounds
from federation.algorithm import Facts
from federation.errors import FULL_DISK, EmbraceError
from federation.layout import MODEL
from federation.round_sums import Reached, RoundSums
from federation.wire import CheckedTrack, CheckedUpdate

log = logging.getLogger("embrace.coordinator")
TRY_AGAIN = 5.0  # seconds after which a round that could not be closed is tried again; longer each time it fails
MOST_WORDS = 500  # characters of an error that a job keeps
BATCH = 32  # updates of which the sum is stored: if the process dies, as many are folded again
PAUSE = 5.0  # seconds without an update, after which a partial sum is made of fewer than a batch
GRACE = 1.0  # seconds that other processes have to fold what they received, when a round closes
PATIENCE = 30.0  # seconds after which it is said that a round waits for them
LONG = 60.0  # seconds after which the keeper of its job folds what they left
NO_WORKER = "this process runs with --workers 0: is there an `embrace worker` on this database?"
Item = CheckUpdate | FoldUpdate | FinishRound | LookAfter | DeleteBodies


@dataclass
class _Folded:
    """What is folded of one round."""

    round: int
    sums: RoundSums
    slots: set[int] = field(default_factory=set)
    updates: dict[str, CheckedUpdate] = field(default_factory=dict)  # by task


@dataclass
class _Awaited:
    """A round that closes when other processes have folded what they received."""

    at: float  # when to look again
    since: float
    told: float  # when it was last said that it waits


class FoldWorker:
    """Fold what was acknowledged, write new versions, try again what could not be written."""

    def __init__(
        self,
        units: Units,
        bodies: Bodies,
        versions: Versions,
        reached: Reached,
        keeps: Callable[[str], bool],
        checks: UploadedChecks,
        partial: PartialSums | None = None,
        *,
        folds: bool = True,
    ) -> None:
        """`keeps`: whether this process looks after a job. Another one may do so from one moment to the next.

        `partial`: where processes share the database. Without `folds` other processes check what is uploaded and make
        the partial sums.
        """
        self._checks = checks
        self._units = units
        self._keeps = keeps
        self._repository = units.repository
        self._bodies = bodies
        self._versions = versions
        self._best = BestVersions(units.repository, versions)
        self._reached = reached
        self._partial = partial
        self._folds = folds
        self._items: queue.Queue[Item | None] = queue.Queue()
        # Used by the worker's thread alone:
        self._folded: dict[OpenJob, _Folded] = {}
        self._received: dict[OpenJob, Gathered] = {}  # to become a partial sum
        self._rests_at = 0.0  # when what was received becomes one, however little it is
        self._awaited: dict[OpenJob, _Awaited] = {}
        self._retries: dict[OpenJob, float] = {}  # rounds to close again, and when
        self._rechecks: dict[OpenJob, float] = {}  # jobs with updates that are not checked, and when to look again
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
        while True:
            try:
                item = self._items.get(timeout=self._seconds_left())
            except queue.Empty:
                self._try(self._do_what_is_due)
                continue
            if item is None:
                return
            self._try(self._do, item)
            self._items.task_done()

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Superseded as error:
            log.info("%s", error)
        except Exception:
            log.exception("the fold worker failed")

    def _do(self, item: Item) -> None:
        match item:
            case CheckUpdate(job):
                self._check_uploaded(job)
            case FoldUpdate(job, update, checked) if self._is_merged(job) and self._folds:
                self._receive(job, update, checked)
            case FoldUpdate(job, update, checked) if self._keeps(job.id) and not self._is_merged(job):
                self._fold(job, update, checked)
            case FoldUpdate(_, update):
                self._bodies.drop(update)
            case FinishRound(job):
                self._finish(job)
            case LookAfter(job, all):
                self._look_after(job, all)
            case DeleteBodies(job, updates):
                if job is not None:
                    for known in (self._folded, self._received, self._awaited):
                        known.pop(job, None)
                self._bodies.delete_all(updates)
                self._bodies.delete_sums(updates)

    def _is_merged(self, job: OpenJob) -> bool:
        """Whether the sums of a job are merged from partial ones; a median is no sum of anything."""
        return self._partial is not None and job.engine.plan.serve.combine == "mean"

    def _look_after(self, job: OpenJob, all: bool) -> None:
        """Fold what other processes have acknowledged, or close the round."""
        round, folded = job.state.round, self._folded.get(job)
        self._check_uploaded(job)
        if round.state == "closing" and job in self._retries:
            return  # its time is set
        if round.state == "closing":
            self._finish(job, all)
        elif self._is_merged(job):
            self._fold_others(job, all)
        elif self._keeps(job.id):
            known = folded.slots if folded is not None and folded.round == round.number else ()
            new = [seat.number for seat in round.counted if seat.number not in known]
            with self._repository.reading() as session:
                updates = list(self._repository.updates_of_slots(session, job.id, round.number, new))
            for update in updates:
                self._fold(job, update)

    def _check_uploaded(self, job: OpenJob) -> None:
        """Check what was uploaded and does not count yet; what cannot be checked now, later."""
        if not self._checks.are_awaited(job):
            return
        if not self._folds:
            self._watch_uploaded(job)
            return
        try:
            self._checks.run(job)
        except OperationalError as error:
            log.warning("job %s: updates could not be checked yet: %s", job.id, error)
        if self._checks.are_awaited(job):  # another process may have died at them
            self._rechecks[job] = self._units.clock() + TRY_AGAIN

    def _watch_uploaded(self, job: OpenJob) -> None:
        """Say if no other process checks what was uploaded, and say it again from time to time."""
        if job in self._rechecks:
            return
        round, now = job.state.round, self._units.clock()
        told_at = PATIENCE + min(seat.since for seat in round.slots if seat.state == "uploaded")
        if now >= told_at:
            log.warning(
                "job %s: round %s waits for %s updates to be checked", job.id, round.number, round.slots.uploaded
            )
            log.warning(NO_WORKER)
        self._rechecks[job] = told_at if now < told_at else now + PATIENCE

    # --- partial sums ------------------------------------------------------------------------------------------------

    def _receive(self, job: OpenJob, update: UpdateRecord, checked: CheckedUpdate | None) -> None:
        """Fold an update that this process has received; a batch of them becomes a partial sum."""
        number = job.state.round.number
        if checked is None or self._partial is None or update.round != number:
            return
        self._rests_at = time.monotonic() + PAUSE
        received = self._received.get(job)
        if received is None or received.number != number:
            received = self._received[job] = self._partial.begin(job)
        self._partial.gather(job, received, update, checked)
        if len(received.known) >= BATCH:
            self._store_received(job)

    def _store_received(self, job: OpenJob) -> None:
        received, left = self._received.pop(job, None), [""]
        while received is not None and received.known and left and self._partial is not None:
            left = self._partial.fold(job, received.known, only_known=True, made=received.sums)
            received.sums = None
            for task in left:
                del received.known[task]

    def _fold_others(self, job: OpenJob, all: bool) -> None:
        """Fold what no process is at work on: at once, or if others should have, when they had time enough.

        What they cannot fold fails here then, too, and counts as an attempt to close the round.
        """
        awaited = self._awaited.get(job)
        waited = awaited is not None and time.monotonic() - awaited.since >= LONG
        may = self._folds or waited or job.state.round.tries > 0
        while all and may and self._partial is not None and self._partial.fold(job, {}):
            pass

    def _seconds_left(self) -> float | None:
        """Count the seconds until something is due that no item says."""
        times = [awaited.at for awaited in self._awaited.values()] + ([self._rests_at] if self._received else [])
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for job in list(self._received) if now >= self._rests_at else ():
            self._store_received(job)
        for job, awaited in list(self._awaited.items()):
            if awaited.at <= now:
                awaited.at = now + GRACE
                self._finish(job, all=True)

    def _merge(self, job: OpenJob, updates: list[UpdateRecord]) -> RoundSums | None:
        """Merge the partial sums of a round; None if one is lost, and its updates are to be folded again."""
        assert self._partial is not None
        sums = self._partial.merge(job, updates)
        if sums is None:
            self._await_sums(job)
        else:
            self._awaited.pop(job, None)
        return sums

    def _await_sums(self, job: OpenJob) -> None:
        """Look again in a while, or when a sum was stored: other processes are at work on some."""
        now = time.monotonic()
        awaited = self._awaited.setdefault(job, _Awaited(now, now, now))
        awaited.at = now + GRACE
        if now - awaited.told >= PATIENCE:
            awaited.told = now
            log.warning("job %s: round %s waits for updates to be folded", job.id, job.state.round.number)
            if not self._folds:
                log.warning(NO_WORKER)

    # --- sums of one process -----------------------------------------------------------------------------------------

    def _fold(self, job: OpenJob, update: UpdateRecord, checked: CheckedUpdate | None = None) -> None:
        """Fold a body, once. If that fails the sums are void: closing the round folds everything again."""
        state = job.state
        if state.round.number != update.round:
            return
        if job not in self._folded or self._folded[job].round != update.round:
            sums = job.engine.sums(update.round, state.facts, count_draws(state.round), self._reached)
            self._folded[job] = _Folded(update.round, sums)
            if self._partial is not None:
                rule = job.engine.plan.serve.combine
                log.info("job %s: a %s is no sum, this process alone folds round %s", job.id, rule, update.round)
        folded = self._folded[job]
        if update.task in folded.updates:
            return
        try:
            checked = checked or check_again(job.engine, state.round, state.facts, update, self._bodies)
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

    # --- the end of a round ------------------------------------------------------------------------------------------

    def _finish(self, job: OpenJob, all: bool = False) -> None:
        """Close a round, if this process looks after its job; `all`: fold also what other processes received."""
        closing = job.state.round
        try:
            self._store_received(job)
            if not self._keeps(job.id):
                self._awaited.pop(job, None)
                return
            self._commit(job, all)
        except Superseded:
            log.warning("job %s: another process closed round %s, or folds it", job.id, closing.number)
            now = time.monotonic()
            self._awaited[job] = _Awaited(now + GRACE, now, now)
        except Exception as error:
            log.exception("job %s: round %s could not be closed", job.id, closing.number)
            self._awaited.pop(job, None)
            state = job.state.round
            is_open = (state.number, state.state) == (closing.number, "closing")  # else it follows a commit
            if is_open and self._keeps(job.id):
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

    def _commit(self, job: OpenJob, all: bool) -> None:
        """Take the server's step, once everything that was acknowledged is folded."""
        state, engine = job.state, job.engine
        number = state.round.number
        if state.round.state != "closing":
            self._awaited.pop(job, None)
            return
        if self._is_merged(job):
            self._fold_others(job, all)
        with self._repository.reading() as session:
            if self._is_merged(job) and claims.count_to_fold(session, job.id, number):
                self._await_sums(job)
                return
            updates = self._repository.updates(session, job.id, [number])
            devices = self._repository.contributors(session, job.id, number)
            done = self._repository.updates(session, job.id, [number - 1]) if engine.inherits(number) else []
        if not updates:
            raise EmbraceError(f"round {number} closed without an update")
        sums = self._merge(job, updates) if self._is_merged(job) else self._fold_all(job, updates)
        if sums is None:
            return
        self._write_version(job, sums, updates, devices)
        members = [state.round.slots[row.slot].member for row in updates]
        regions = [engine.layout(member.boundary, number, state.facts).tracks[MODEL] for member in members]
        told = engine.summary(sums, regions, [(row.samples, row.bytes, row.report) for row in updates])
        answers = [(member.boundary, (row.samples, row.bytes, row.report)) for member, row in zip(members, updates)]
        scores = engine.device_scores(answers)
        facts = engine.next_facts(sums)
        self._reached("mid-commit")
        over = self._record(job, told, facts, scores)
        try:  # what follows can fail without harm
            self._bodies.delete_sums(updates)
            self._bodies.delete_all([*done, *(updates if over or not engine.inherits(number + 1) else [])])
            if self._repository.is_shared or self._bodies.has_uploads:  # what arrived somewhere and was never recorded
                self._bodies.forget(job.id, before=number)
            self._versions.forget(job.id, before=state.version)
        except OSError:
            log.exception("job %s: after version %s", job.id, state.version + 1)

    def _fold_all(self, job: OpenJob, updates: list[UpdateRecord]) -> RoundSums:
        for update in updates:
            self._fold(job, update)
        return self._folded[job].sums

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
            kept = job.engine.plan.serve.combine == "mean"  # an earlier program kept no sums, and says nothing of them
            work.advance(job, rounds.Committed(), summary={**told, "facts": asdict(facts), "sums_kept": kept})
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
            claims.forget_sums(work.session, job.id, before=number + 1)
            work.notify_devices()
            work.outbox += [ReachPoint("after-commit"), EvaluateVersion(job, version)]
        return over

    def _write_version(self, job: OpenJob, sums: RoundSums, updates: list[UpdateRecord], devices: int) -> None:
        """Write the next version, and beside it the sums that it is made of; a robust rule reads all bodies instead."""
        engine, version, bodies = job.engine, job.state.version, []
        place = (job.id, version, engine.space, engine.vector_names)
        with ThreadPoolExecutor(1, "sums") as pool:  # both wait for the disk, or the bucket
            if engine.plan.serve.combine == "mean":
                kept = pool.submit(self._versions.keep_sums, job.id, version + 1, sums, devices)
            else:
                kept = None
                known = self._folded[job].updates
                bodies = [(known[update.task].model, BodyReader(self._bodies.file(update))) for update in updates]
            changes = engine.changes(sums, self._versions.read(*place), devices, bodies)
            self._versions.write_next(*place, changes)
            if kept is not None:
                kept.result()


def _sharing(track: CheckedTrack, last: CheckedTrack) -> CheckedTrack:
    """Share the places of the update before: most devices write the same header, which is kept once."""
    return replace(track, places=last.places) if track.places == last.places else track
