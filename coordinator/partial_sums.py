"""Partial sums: of processes that share a database any folds updates, a batch at a time, and one merges the sums.

A worker claims recorded updates that are in no sum (`FOR UPDATE SKIP LOCKED`: what another worker has claimed is passed
over), folds them, stores the sum under a name that cannot be guessed, and records in the same transaction the sum and
which updates it holds. Sums are exact integers, so whatever the batches are, the merged ones have the same bits.

A coordinator folds what it has received before it claims it, so that little is left to do when a round closes; if
another worker has claimed some of it by then, the rest is folded anew.

The claim is the transaction. A worker that dies loses it with its connection; from one that stalls the database takes
it after a while (`STUCK`), and what that worker would record later is refused. Either way its updates are claimed
again, and the bytes that it may have stored are removed when the round is over. So no update is in two sums.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from coordinator.body_check import read_body
from coordinator.errors import Superseded
from coordinator.jobs import OpenJob, Units
from coordinator.store import claims
from coordinator.store.bodies import Bodies
from coordinator.store.schema import SumRecord, UpdateRecord
from coordinator.store.sums import read_sums
from federation.algorithm import Facts
from federation.engine import RoundEngine
from federation.errors import InputError
from federation.round_sums import Reached, RoundSums
from federation.rounds import Round
from federation.wire import CheckedUpdate

log = logging.getLogger("embrace.folding")
BATCH = 16  # updates that are worth a sum, which is as large as two of them
MOST = 64  # updates of one sum: a worker that dies loses no more work than this


@dataclass
class Gathered:
    """Updates of a round that a process has received, and their sum, which is not stored yet."""

    number: int
    sums: RoundSums | None  # None: one could not be folded, all are to be folded anew
    known: dict[str, CheckedUpdate] = field(default_factory=dict)  # by task


class PartialSums:
    """Fold the updates of open jobs into partial sums, and merge these."""

    def __init__(
        self,
        units: Units,
        bodies: Bodies,
        refresh: Callable[[str], None],
        tell: Callable[[Session, str], None],
        reached: Reached,
    ) -> None:
        """`refresh` learns what other processes have changed of a job, `tell` lets them hear of one."""
        self._units = units
        self._repository = units.repository
        self._bodies = bodies
        self._refresh = refresh
        self._tell = tell
        self._reached = reached

    def begin(self, job: OpenJob) -> Gathered:
        return Gathered(job.state.round.number, self._empty(job, job.state.round))

    def gather(self, job: OpenJob, gathered: Gathered, update: UpdateRecord, checked: CheckedUpdate) -> None:
        """Fold an update that this process has received, without claiming it."""
        is_new = update.task not in gathered.known
        gathered.known[update.task] = checked
        if is_new and gathered.sums is not None:
            sums, gathered.sums = gathered.sums, None  # if this fails
            self._add(sums, job.state.round, update, checked)
            gathered.sums = sums

    def fold(
        self,
        job: OpenJob,
        known: Mapping[str, CheckedUpdate],
        *,
        only_known: bool = False,
        made: RoundSums | None = None,
    ) -> list[str]:
        """Fold a batch of updates of a job's round that are in no sum yet; return their tasks.

        `known` has what is known about bodies, by task; with `only_known` only these are folded, and `made` is their
        sum.
        """
        if not only_known:
            self._refresh(job.id)  # others may have recorded them
        round, name = job.state.round, secrets.token_hex(24)
        number = round.number
        with self._repository.begin() as session:
            tasks = known.keys() if only_known else None
            claimed = claims.claim_updates(session, job.id, number, MOST, tasks)
            updates = [update for update in claimed if _has_arrived(round, update)]
            if not updates:
                return []
            self._reached("after-claim")
            with claims.KeptClaims(session) as kept:
                sums = made
                if sums is None or len(updates) != len(known) or sums.draws != count_draws(round):
                    sums = self._sum(kept, job, round, updates, known)
                kept.call(self._bodies.keep_sum, job.id, number, name, sums)
            self._reached("after-sum")
            folded = [update.task for update in updates]
            record = SumRecord(name, job.id, number, len(updates), self._units.clock())
            if not claims.add_sum(session, record, folded):
                raise Superseded("another worker has folded some of these updates")
            self._tell(session, job.id)
        self._reached("after-sum-recorded")
        self._bodies.drop_sum(job.id, number, name)
        for update in updates:
            self._bodies.drop(update)
        return folded

    def _sum(
        self,
        kept: claims.KeptClaims,
        job: OpenJob,
        round: Round,
        updates: Sequence[UpdateRecord],
        known: Mapping[str, CheckedUpdate],
    ) -> RoundSums:
        facts = job.state.facts
        if job.state.round.number != round.number:
            raise Superseded(f"round {round.number} of job {job.id} is over")
        sums = self._empty(job, round)

        def fold(update: UpdateRecord) -> None:
            checked = known.get(update.task) or check_again(job.engine, round, facts, update, self._bodies)
            self._add(sums, round, update, checked)

        for update in updates:
            kept.call(fold, update)
        return sums

    def _empty(self, job: OpenJob, round: Round) -> RoundSums:
        return job.engine.sums(round.number, job.state.facts, count_draws(round), self._reached)

    def _add(self, sums: RoundSums, round: Round, update: UpdateRecord, checked: CheckedUpdate) -> None:
        with self._bodies.file(update).open("rb") as body:
            sums.fold(checked, body, update.weight, round.slots[update.slot].count, update.report)

    def merge(self, job: OpenJob, updates: Sequence[UpdateRecord]) -> RoundSums | None:
        """Merge the partial sums of a round that hold its updates; None if some are in no sum yet.

        A sum whose bytes are lost or harmed is given up: its updates are folded again.
        """
        held: dict[str, int] = {}
        for update in updates:
            held[update.sum] = held.get(update.sum, 0) + 1
        if "" in held:
            return None
        number = job.state.round.number
        with self._repository.reading() as session:
            recorded = claims.sums_of(session, job.id, number)
        merged = self._empty(job, job.state.round)
        for name, count in held.items():
            if name not in recorded or recorded[name].updates != count:
                raise InputError(f"partial sum {name} of round {number} is not recorded as that of {count} updates")
            try:
                found = read_sums(self._bodies.sum_file(job.id, number, name), job.engine.space)
                if (found.round, found.draws) != (merged.number, merged.draws):
                    raise InputError(f"partial sum {name} is that of another round")
            except (FileNotFoundError, InputError) as error:
                log.error("job %s: a partial sum of round %s is folded again: %s", job.id, number, error)
                with self._units.begin(job.id) as work:
                    claims.void_sum(work.session, name)
                    work.note(job, "SumLost", {"round": number, "updates": count, "message": str(error)})
                return None
            for track, total in found.totals.items():
                merged.merge(track, total)
        return merged


def count_draws(round: Round) -> int:
    """Count how many times updates of a round can count at most, all together."""
    return sum(seat.count for seat in round.slots)


def check_again(engine: RoundEngine, round: Round, facts: Facts, update: UpdateRecord, bodies: Bodies) -> CheckedUpdate:
    """Find out what is known about a body from the body itself."""
    decoder, _ = engine.decoder(round.slots[update.slot].member.boundary, round.number, facts)
    return read_body(bodies.file(update), decoder)[0]


def _has_arrived(round: Round, update: UpdateRecord) -> bool:
    """Whether this process knows already that another one has recorded an update."""
    return update.slot < len(round.slots) and round.slots[update.slot].state == "arrived"
