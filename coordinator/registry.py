"""Who may do what: the administrator, enrolment tokens, devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from coordinator.credentials import matches, new_token, token_hash
from coordinator.errors import NotAllowed
from coordinator.news import News
from coordinator.presence import PRESENCE
from coordinator.sessions import ADMIN_KEY, Sessions
from coordinator.store.postgresql import send_news
from coordinator.store.repository import Repository
from coordinator.store.schema import DeviceRecord
from federation.axes.cover import DeviceProfile
from federation.errors import InputError
from federation.identity import check_name, device_id, free_name

log = logging.getLogger("embrace.registry")
MOST_KNOWN = 65_536
NOT_INVITED = "this enrolment token is unknown, used up or expired"


class Registry:
    """Credentials. A token is returned once, when it is made; what is kept is its hash."""

    def __init__(self, repository: Repository, clock: Callable[[], float]) -> None:
        self._repository = repository
        self._clock = clock
        self._admin = ""  # hash of the administrator's token, once it was read
        self.sessions = Sessions(repository, clock)
        self._known: dict[str, str] = {}  # hash of a token -> its device, of those that came lately

    def set_admin_token(self) -> str | None:
        """Make the administrator's token; None if there is one already."""
        token = new_token("admin")
        try:
            with self._repository.begin() as session:
                self._admin = self._repository.meta(session, ADMIN_KEY) or ""
                if self._admin:
                    return None
                self._repository.add_meta(session, ADMIN_KEY, token_hash(token))
        except IntegrityError:  # another process has made it just now
            return self.set_admin_token()
        self._admin = token_hash(token)
        return token

    def take_admin_token(self, token: str) -> None:
        """Let a token that was given be the administrator's, in all processes, in place of one from before."""
        hashed = token_hash(token)
        try:
            with self._repository.begin() as session:
                before = self._repository.meta(session, ADMIN_KEY)
                if before is None:
                    self._repository.add_meta(session, ADMIN_KEY, hashed)
                elif before != hashed:
                    self._repository.change_meta(session, ADMIN_KEY, hashed)
                    if self._repository.is_shared:
                        send_news(session, News(lost=True).encode())
        except IntegrityError:  # another process has set one just now
            self.take_admin_token(token)
            return
        self._admin = hashed
        if before not in (None, hashed):
            log.warning("the administrator's token is the one that was given; the one from before has ended")

    def is_known_admin(self, token: str) -> bool:
        """Whether this is the administrator's token, by what was read of the database before."""
        return matches(token, self._admin)

    def check_admin(self, token: str) -> None:
        """Refuse every token but the administrator's."""
        with self._repository.reading() as session:
            self._admin = self._repository.meta(session, ADMIN_KEY) or ""
        if not matches(token, self._admin):
            raise NotAllowed("this needs the administrator's token")

    def invite(self, uses: int, seconds: float) -> str:
        """Make a token with which so many devices can enrol for so long."""
        if not 1 <= uses <= 1_000_000 or not 1 <= seconds <= 366 * 86400:
            raise InputError("an enrolment token has 1 to 1000000 uses and lasts from a second to a year")
        token = new_token("enrol")
        with self._repository.begin() as session:
            self._repository.add_enrolment(session, token_hash(token), self._clock() + seconds, uses)
        return token

    def check_invited(self, token: str) -> None:
        """Refuse every token with which no device could enrol now; none of its uses is taken."""
        with self._repository.reading() as session:
            if not self._repository.has_enrolment(session, token_hash(token), self._clock()):
                raise NotAllowed(NOT_INVITED)

    def enrol(self, token: str, name: str, profile: DeviceProfile) -> tuple[str, str]:
        """Enrol a device: return its id, which follows from its name, and its own token, which is not shown again.

        If another device that is not revoked has the name, the new one's gets a number: kitchen-2.
        """
        check_name(name)
        while True:
            with suppress(IntegrityError):  # two of the same name at once: one of them comes again
                return self._enrol(token, name, profile)

    def _enrol(self, token: str, name: str, profile: DeviceProfile) -> tuple[str, str]:
        own, now = new_token("device"), self._clock()
        with self._repository.begin() as session:
            if not self._repository.use_enrolment(session, token_hash(token), now):
                raise NotAllowed(NOT_INVITED)
            device = device_id(name, lambda known: self._repository.device(session, known) is not None)
            free = free_name(name, lambda known: self._repository.is_named(session, known))
            facts = {"enrolled_at": now, "seen_at": now, "here_until": now + PRESENCE}
            record = DeviceRecord(device, free, token_hash(own), False, asdict(profile), **facts)
            self._repository.add_device(session, record)
        self._remember(token_hash(own), device)
        return device, own

    def device_of(self, token: str) -> str:
        """Find the device of a token."""
        hashed = token_hash(token)
        with self._repository.reading() as session:
            device = self._repository.device_of(session, hashed)
        if device is None or device.revoked:
            raise NotAllowed("this needs a device's token; enrol first")
        self._remember(hashed, device.id)
        return device.id

    def _remember(self, hashed: str, device: str) -> None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[hashed] = device

    def known_device(self, hashed: str) -> str | None:
        """Find the device of a token's hash that was looked up before. Whether it was revoked since is not known."""
        return self._known.get(hashed)

    def heard(self, news: News) -> None:
        """Learn of sessions that ended in another process; if news were missed, ask the database about every token."""
        self.sessions.heard(news)
        if news.lost:
            self._known.clear()
            self._admin = ""  # unless it can be read now: its owner does not wait behind made-up tokens
            with suppress(SQLAlchemyError), self._repository.reading() as session:
                self._admin = self._repository.meta(session, ADMIN_KEY) or ""

    def name_of(self, device: str) -> str:
        with self._repository.reading() as session:
            found = self._repository.device(session, device)
        return "" if found is None else found.name

    def set_profile(self, device: str, profile: DeviceProfile) -> None:
        with self._repository.begin() as session:
            self._repository.change_device(session, device, profile=asdict(profile))
