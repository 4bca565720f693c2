"""Check updates that devices have put into object storage, before they count. Of several processes each checks others.

What a process checks it has claimed in the database, so that no other does the same work. The claim is over before the
verdict is recorded; if another process comes in between, both find the same, and one verdict counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from coordinator.arrivals import Arrivals, Verdict
from coordinator.jobs import OpenJob
from coordinator.store import claims
from coordinator.store.repository import Repository
from coordinator.store.schema import UpdateRecord

log = logging.getLogger("embrace.folding")
MOST = 16  # updates that are claimed at once


class UploadedChecks:
    """Check what is unchecked of open jobs."""

    def __init__(self, repository: Repository, arrivals: Arrivals, refresh: Callable[[str], None]) -> None:
        """`refresh` learns what other processes have changed of a job."""
        self._repository = repository
        self._arrivals = arrivals
        self._refresh = refresh

    def run(self, job: OpenJob) -> None:
        """Check and settle all that waits of a job; what cannot be read now is left."""
        unread: set[str] = set()
        while verdicts := self._examine(job, unread):
            for update, verdict in verdicts:
                if isinstance(verdict, FileNotFoundError):
                    log.warning("task %s: its update is lost, and its seat is free again: %s", update.task, verdict)
                elif isinstance(verdict, OSError):
                    log.warning("task %s: its update could not be checked yet: %s", update.task, verdict)
                    unread.add(update.task)
                    continue
                if not self._arrivals.settle(update, verdict):
                    unread.add(update.task)

    def are_awaited(self, job: OpenJob) -> bool:
        """Whether a job is open and has something to check."""
        return self._arrivals.awaits_checks(job)

    def _examine(self, job: OpenJob, besides: set[str]) -> list[tuple[UpdateRecord, Verdict | OSError]]:
        """Check updates without recording anything."""
        self._refresh(job.id)  # others may have recorded them
        found: list[tuple[UpdateRecord, Verdict | OSError]] = []
        with self._repository.begin() as session:
            claimed = claims.claim_unchecked(session, job.id, job.state.round.number, MOST, besides)
            with claims.KeptClaims(session) as kept:
                for update in claimed:
                    try:
                        found.append((update, kept.call(self._arrivals.examine, update)))
                    except OSError as error:
                        found.append((update, error))
        return found
