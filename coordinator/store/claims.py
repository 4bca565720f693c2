"""The queries of workers: claim updates, record the partial sums that hold them. In the caller's transaction.

A claim is a lock on rows that ends with the transaction, and with its connection; what is locked is passed over by
others (SKIP LOCKED). SQLite has one process and no such locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, CursorResult, Select, delete, func, insert, select, update
from sqlalchemy.orm import Session

from coordinator.store.schema import SUMS, UPDATES, SumRecord, UpdateRecord

Answer = TypeVar("Answer")
SAYS = 1.0  # seconds after which a process tells the database again that it has not stalled
LONGEST = 1800.0  # seconds after which a call counts as stalled


def count_to_fold(session: Session, job: str, number: int) -> int:
    """Count the updates of a round that are in no partial sum."""
    return session.scalar(select(func.count()).select_from(UPDATES).where(*_to_fold(job, number))) or 0


def claim_updates(
    session: Session, job: str, number: int, most: int, tasks: Collection[str] | None = None
) -> list[UpdateRecord]:
    """Claim updates of a round that are in no partial sum; with `tasks` only these."""
    free = select(UPDATES).where(*_to_fold(job, number))
    return _claim(session, free if tasks is None else free.where(UPDATES.c.task.in_(tasks)), most)


def claim_unchecked(session: Session, job: str, number: int, most: int, besides: Collection[str]) -> list[UpdateRecord]:
    """Claim updates up to a round that are to be checked."""
    free = select(UPDATES).where(UPDATES.c.job == job, UPDATES.c.round <= number, ~UPDATES.c.checked)
    return _claim(session, free.where(UPDATES.c.task.not_in(besides)), most)


class KeptClaims:
    """Call in a thread what may take long, and tell the database meanwhile that this process is at work.

    A process that is stopped tells nothing, nor does one whose call does not end: they lose what they have claimed.
    """

    def __init__(self, session: Session) -> None:
        """`session` is the transaction of the claims."""
        self._session = session
        self._pool = ThreadPoolExecutor(1, "claimed")
        self._said = time.monotonic()

    def __enter__(self) -> KeptClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def call(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function; one that ends at once costs no statement."""
        called, until = self._pool.submit(function, *arguments), time.monotonic() + LONGEST
        while not called.done() and time.monotonic() < until:
            wait([called], max(0.0, self._said + SAYS - time.monotonic()))
            if time.monotonic() - self._said >= SAYS:
                self._session.execute(select(1))
                self._said = time.monotonic()
        return called.result()


def add_sum(session: Session, record: SumRecord, tasks: Collection[str]) -> bool:
    """Record a partial sum of updates that are claimed; False if one of them is in another sum."""
    session.execute(insert(SUMS), vars(record))
    held = update(UPDATES).where(UPDATES.c.task.in_(tasks), UPDATES.c.sum == "").values(sum=record.id)
    return cast("CursorResult[Any]", session.execute(held)).rowcount == len(tasks)


def sums_of(session: Session, job: str, number: int) -> dict[str, SumRecord]:
    """List the partial sums of a round, by id."""
    rows = session.execute(select(SUMS).where(SUMS.c.job == job, SUMS.c.round == number))
    return {row.id: SumRecord(*row) for row in rows}


def void_sum(session: Session, sum: str) -> None:
    """Let the updates of a partial sum be folded again."""
    session.execute(update(UPDATES).where(UPDATES.c.sum == sum).values(sum=""))
    session.execute(delete(SUMS).where(SUMS.c.id == sum))


def forget_sums(session: Session, job: str, before: int) -> None:
    """Remove the rows of partial sums of rounds before one."""
    session.execute(delete(SUMS).where(SUMS.c.job == job, SUMS.c.round < before))


def _to_fold(job: str, number: int) -> tuple[ColumnElement[bool], ...]:
    return UPDATES.c.job == job, UPDATES.c.round == number, UPDATES.c.checked.is_(True), UPDATES.c.sum == ""


def _claim(session: Session, free: Select[Any], most: int) -> list[UpdateRecord]:
    rows = session.execute(free.order_by(UPDATES.c.slot).limit(most).with_for_update(skip_locked=True))
    return [UpdateRecord(*row) for row in rows]
