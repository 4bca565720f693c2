"""Sessions of pages: what a browser holds in place of the administrator's token.

A session ends when its time is over, when the page signs out, and when the administrator's token is replaced. It
survives a restart of the coordinator. The database has hashes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.credentials import new_token, token_hash
from coordinator.errors import NotAllowed
from coordinator.news import News
from coordinator.store.postgresql import send_news
from coordinator.store.repository import Repository
from coordinator.store.schema import SessionRecord

ADMIN_KEY: Final = "admin_token_hash"  # of the facts about the database
LIFE: Final = 12 * 3600.0  # seconds; using it makes it no longer
MOST_SESSIONS: Final = 100  # at once; the oldest ends


@dataclass(frozen=True)
class Opened:
    """A new session. Its token is returned once."""

    token: str
    expires_at: float


class Sessions:
    """Open, find and end sessions. Those that were used since the process started are found without the database."""

    def __init__(self, repository: Repository, clock: Callable[[], float]) -> None:
        self._repository = repository
        self._clock = clock
        self._known: dict[str, float] = {}  # hash of a token -> when it is over
        self._ended: set[str] = set()  # hashes of those that were ended since the process started

    def open(self) -> Opened:
        """Open a session for a client that has proved to be the administrator."""
        token, now = new_token("session"), self._clock()
        with self._repository.begin() as session:
            admin = self._repository.meta(session, ADMIN_KEY) or ""
            record = SessionRecord(token_hash(token), admin, now, now + LIFE)
            left = self._repository.add_session(session, record, MOST_SESSIONS)
        self._known = {known: until for known, until in self._known.items() if known in left}
        self._known[record.token_hash] = record.expires_at
        return Opened(token, record.expires_at)

    def expires_at(self, hashed: str) -> float | None:
        """Find when a session that was used before is over; None if it is, or was not used before."""
        until = None if hashed in self._ended else self._known.get(hashed)
        return until if until is not None and until > self._clock() else None

    def find(self, token: str) -> str:
        """Find a session in the database; return the hash of its token."""
        hashed = token_hash(token)
        with self._repository.reading() as session:
            found = self._repository.page_session(session, hashed)
            admin = self._repository.meta(session, ADMIN_KEY)
        over = found is None or hashed in self._ended or found.expires_at <= self._clock()
        if found is None or over or found.admin_hash != admin:
            raise NotAllowed("this session is over; sign in again")
        self._known[hashed] = found.expires_at
        return hashed

    def end(self, hashed: str) -> None:
        """End a session, for every request that comes from now on."""
        self._ended.add(hashed)  # first: a look-up that is under way does not bring it back
        with self._repository.begin() as session:
            self._repository.end_session(session, hashed)
            if self._repository.is_shared:
                send_news(session, News(signed_out=(hashed,)).encode())
        self._known.pop(hashed, None)

    def heard(self, news: News) -> None:
        """Learn of sessions that ended in another process."""
        self._ended.update(news.signed_out)
        if news.lost:
            self._known.clear()
