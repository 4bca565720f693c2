"""Who may do what: the administrator, enrolment tokens, devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from coordinator.credentials import matches, new_token, token_hash
from coordinator.errors import NotAllowed
from coordinator.store.database import Sessions
from coordinator.store.schema import DeviceRow, EnrolmentRow, MetaRow
from federation.axes.cover import DeviceProfile
from federation.errors import InputError
from federation.identity import device_id

ADMIN_KEY = "admin_token_hash"
MOST_KNOWN = 65_536


class Registry:
    """Credentials. A token is returned once, when it is made; what is kept is its hash."""

    def __init__(self, sessions: Sessions, clock: Callable[[], float]) -> None:
        self.sessions = sessions
        self.clock = clock
        self._known: dict[str, str] = {}  # hash of a token -> its device, of those who came lately

    def set_admin_token(self) -> str | None:
        """Make the administrator's token; None if there is one already."""
        with self.sessions.begin() as session:
            if session.get(MetaRow, ADMIN_KEY):
                return None
            token = new_token("admin")
            session.add(MetaRow(key=ADMIN_KEY, value=token_hash(token)))
            return token

    def check_admin(self, token: str) -> None:
        with self.sessions() as session:
            if not matches(token, session.get_one(MetaRow, ADMIN_KEY).value):
                raise NotAllowed("this needs the administrator's token")

    def invite(self, uses: int, seconds: float) -> str:
        """A token with which so many devices can enrol for so long."""
        if not 1 <= uses <= 1_000_000 or not 1 <= seconds <= 366 * 86400:
            raise InputError("an enrolment token has 1 to 1000000 uses and lasts from a second to a year")
        token = new_token("enrol")
        with self.sessions.begin() as session:
            session.add(EnrolmentRow(token_hash=token_hash(token), expires_at=self.clock() + seconds, uses_left=uses))
        return token

    def enrol(self, token: str, name: str, profile: DeviceProfile) -> tuple[str, str]:
        """A new device: its id, which follows from its name, and its own token, which nobody sees again."""
        while True:
            with suppress(IntegrityError):  # two of the same name at once: one of them comes again
                return self._enrol(token, name, profile)

    def _enrol(self, token: str, name: str, profile: DeviceProfile) -> tuple[str, str]:
        with self.sessions.begin() as session:
            known, left = EnrolmentRow.token_hash == token_hash(token), EnrolmentRow.uses_left
            usable = update(EnrolmentRow).where(known, left > 0, EnrolmentRow.expires_at > self.clock())
            # One statement: of two who come at once with the last use, one gets it.
            if not session.connection().execute(usable.values(uses_left=left - 1)).rowcount:
                raise NotAllowed("this enrolment token is unknown, used up or expired")
            own, now = new_token("device"), self.clock()
            device = device_id(name, lambda known: session.get(DeviceRow, known) is not None)
            session.add(
                DeviceRow(
                    id=device,
                    name=name,
                    token_hash=token_hash(own),
                    profile=asdict(profile),
                    enrolled_at=now,
                    seen_at=now,
                )
            )
        self._remember(token_hash(own), device)
        return device, own

    def device_of(self, token: str) -> str:
        """Whose token this is."""
        with self.sessions() as session:
            row = session.scalar(select(DeviceRow).where(DeviceRow.token_hash == token_hash(token)))
            if row is None or row.revoked:
                raise NotAllowed("this needs a device's token; enrol first")
        self._remember(row.token_hash, row.id)
        return row.id

    def _remember(self, hashed: str, device: str) -> None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[hashed] = device

    def known_device(self, hashed: str) -> str | None:
        """The same for the hash of a token that was looked up before. Whether it was revoked since is not known."""
        return self._known.get(hashed)

    def set_profile(self, device: str, profile: DeviceProfile) -> None:
        with self.sessions.begin() as session:
            session.get_one(DeviceRow, device).profile = asdict(profile)
