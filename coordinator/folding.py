"""The worker that folds updates and closes rounds: one thread, one item after the other.

Sums are not in the database: after a restart they are folded again from the bodies, in any order to the same bits.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coordinator.body_check import read_body
from coordinator.jobs import (
    DeleteBodies,
    EvaluateVersion,
    FinishRound,
    FoldUpdate,
    ForgetJob,
    OpenJob,
    ReachPoint,
    Units,
)
from coordinator.store.bodies import Bodies, BodyReader
from coordinator.store.schema import UpdateRecord
from coordinator.store.versions import Versions
from federation import rounds
from federation.algorithm import Facts
from federation.errors import EmbraceError
from federation.round_sums import Reached, RoundSums
from federation.wire import CheckedTrack, CheckedUpdate

log = logging.getLogger("embrace.coordinator")
TRY_AGAIN = 5.0  # seconds after which a round that could not be closed, for want of disk perhaps, is tried again
Item = FoldUpdate | FinishRound | DeleteBodies


@dataclass
class _Folded:
    """What is folded of one round."""

    sums: RoundSums
    updates: dict[str, CheckedUpdate] = field(default_factory=dict)  # by task


class FoldWorker:
    """Fold what was acknowledged, write new versions, try again what could not be written."""

    def __init__(self, units: Units, bodies: Bodies, versions: Versions, reached: Reached) -> None:
        self._units = units
        self._repository = units.repository
        self._bodies = bodies
        self._versions = versions
        self._reached = reached
        self._items: queue.Queue[Item | None] = queue.Queue()
        self._folded: dict[OpenJob, _Folded] = {}  # used by the worker's thread alone
        self._retries: dict[OpenJob, float] = {}  # rounds to close again, and when
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
            case FoldUpdate(job, update, checked):
                self._fold(job, update, checked)
            case FinishRound(job):
                self._finish(job)
            case DeleteBodies(job, updates):
                self._folded.pop(job, None)
                self._bodies.delete_all(updates)

    def _fold(self, job: OpenJob, update: UpdateRecord, checked: CheckedUpdate | None = None) -> None:
        """Fold a body, once. If that fails the sums are void: closing the round folds everything again."""
        state = job.state
        if state.round.number != update.round:
            return
        if job not in self._folded:
            draws = sum(seat.count for seat in state.round.slots)
            self._folded[job] = _Folded(job.engine.sums(update.round, state.facts, draws, self._reached))
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

    def _check_again(self, job: OpenJob, update: UpdateRecord) -> CheckedUpdate:
        """Find out what is known about a body from the body itself."""
        boundary = job.state.round.slots[update.slot].member.boundary
        decoder, _ = job.engine.decoder(boundary, update.round, job.state.facts)
        return read_body(self._bodies.file(update), decoder)[0]

    def _finish(self, job: OpenJob) -> None:
        try:
            self._commit(job)
        except Exception:
            self._retries[job] = self._units.clock() + TRY_AGAIN
            log.exception("job %s: the round could not be closed; it is tried again", job.id)
        finally:
            self._folded.pop(job, None)

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
        facts = engine.next_facts(folded.sums)
        self._reached("mid-commit")
        over = self._record(job, told, facts)
        try:  # what follows can fail without harm
            self._bodies.delete_all([*done, *(updates if over or not engine.inherits(number + 1) else [])])
            self._versions.forget(job.id, before=state.version)
        except OSError:
            log.exception("job %s: after version %s", job.id, state.version + 1)

    def _record(self, job: OpenJob, told: dict[str, Any], facts: Facts) -> bool:
        """Record that a round is committed and open the next; return whether the job is over."""
        number, version = job.state.round.number, job.state.version + 1
        with self._units.begin() as work:
            job_state = self._repository.job_state(work.session, job.id)
            work.advance(job, rounds.Committed(), summary={**told, "facts": asdict(facts)})
            work.change(job, version=version, facts=facts)
            work.note(job, "RoundCommitted", {"round": number, "version": version, **told})
            over = job_state == "stopped" or number + 1 >= job.engine.plan.num_rounds
            if over:
                job_state = job_state if job_state == "stopped" else "done"
                work.note(job, "JobState", {"state": job_state})
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
        bodies = [(folded.updates[update.task].model, BodyReader(self._bodies.file(update))) for update in updates]
        changes = engine.changes(folded.sums, self._versions.read(*place), devices, bodies)
        self._versions.write_next(*place, changes)


def _sharing(track: CheckedTrack, last: CheckedTrack) -> CheckedTrack:
    """Share the places of the update before: most devices write the same header, which is kept once."""
    return replace(track, places=last.places) if track.places == last.places else track
