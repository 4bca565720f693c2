"""What PostgreSQL has beyond tables: turns, news between processes, and locks that end with their holder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

log = logging.getLogger("embrace.store")
# Numbers of our locks in a database that others may use, too.
MIGRATING: Final = 1163018578
_TURN: Final = 1163018579
_KEEPING: Final = 1163018580
_EVENTS: Final = 1163018581
_CHANNEL: Final = "'embrace_' || md5(current_schema())"  # a database may have several coordinators' schemas
STALLED: Final = "10s"  # after which a process that does nothing loses its locks
STUCK: Final = "30s"  # ... and one that does nothing in the middle of a transaction loses that
LISTENS: Final = 1.0  # seconds until a listener looks whether its connection is there still
AGAIN: Final = 0.5  # seconds until it tries to connect again
MOST_NEWS: Final = 7900  # bytes of one message


def take_turn(session: Session) -> None:
    """Wait until no other process is in a transaction that has taken a turn."""
    session.execute(text(f"SELECT pg_advisory_xact_lock({_TURN}, hashtext(current_schema()))"))


def number_events(session: Session) -> None:
    """Wait until the events of other processes that have a number already are recorded."""
    session.execute(text(f"SELECT pg_advisory_xact_lock({_EVENTS}, hashtext(current_schema()))"))


def send_news(session: Session, news: str) -> None:
    """Tell all processes something once the transaction is recorded."""
    session.execute(text(f"SELECT pg_notify({_CHANNEL}, :news)"), {"news": news})


class Listener:
    """Hear what other processes tell, in a thread. What is told while the connection is lost is not heard."""

    def __init__(self, engine: Engine, heard: Callable[[Sequence[str]], None], begins: Callable[[], None]) -> None:
        """`begins` is called each time that listening begins: until then anything may have happened."""
        self._engine = engine
        self._heard = heard
        self._begins = begins
        self._driver_error: type[Exception] = engine.dialect.import_dbapi().Error
        self._ended = threading.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)

    def start(self) -> None:
        """Listen; return once it does, or as soon as the database does not answer."""
        self._thread.start()
        self._listening.wait(LISTENS)

    def stop(self) -> None:
        self._ended.set()
        with suppress(SQLAlchemyError), Session(self._engine) as session, session.begin():
            send_news(session, "")  # which wakes it
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    try:
                        self._listen(connection)
                    finally:
                        connection.invalidate()  # closed, not given back
            except (SQLAlchemyError, self._driver_error) as error:
                log.warning("news of other processes are not heard: %s", error)
            except Exception:  # of what is done with the news
                log.exception("news of other processes are not heard")
            self._ended.wait(AGAIN)

    def _listen(self, connection: Connection) -> None:
        channel = connection.execute(text(f"SELECT {_CHANNEL}")).scalar_one()
        connection.execute(text(f'LISTEN "{channel}"'))
        driver: Any = connection.connection.dbapi_connection
        self._begins()
        self._listening.set()
        while not self._ended.is_set():
            told = [note.payload for note in driver.notifies(timeout=LISTENS, stop_after=1)]
            told += [note.payload for note in driver.notifies(timeout=0)]
            if told := [news for news in told if news]:
                self._heard(told)
            else:
                connection.execute(text("SELECT 1"))


class Locks:
    """Locks of this process by name. They end with their connection, which ends with the process, or if it stalls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._mutex = threading.Lock()
        self._held: frozenset[str] = frozenset()

    def holds(self, name: str) -> bool:
        """Whether this process held a lock when it last looked; what it writes is checked again then."""
        return name in self._held

    def take(self, names: Iterable[str]) -> set[str]:
        """Take those that no other process holds; return the new ones."""
        return self._ask_for(lambda held: held | set(names))

    def take_only(self, names: Iterable[str]) -> set[str]:
        """Do the same, and let go of all others."""
        return self._ask_for(lambda held: frozenset(names))

    def _ask_for(self, wanted: Callable[[frozenset[str]], frozenset[str]]) -> set[str]:
        with self._mutex:
            try:
                self._connect()
                return self._take(wanted(self._held))
            except SQLAlchemyError:
                self._drop()
                raise

    def _connect(self) -> None:
        """Connect, if that was not done or the connection was lost, and the locks with it."""
        if self._connection is not None:
            try:
                self._connection.execute(text("SELECT 1"))
                return
            except SQLAlchemyError:
                self._drop()
        self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._connection.execute(text(f"SET idle_session_timeout = '{STALLED}'"))

    def _take(self, names: frozenset[str]) -> set[str]:
        new = {name for name in names - self._held if self._ask("pg_try_advisory_lock", name)}
        for name in self._held - names:
            self._ask("pg_advisory_unlock", name)
        self._held = self._held & names | new
        return new

    def _ask(self, function: str, name: str) -> bool:
        assert self._connection is not None
        key = f"{_KEEPING}, hashtext(current_schema() || ' ' || :name)"
        return bool(self._connection.execute(text(f"SELECT {function}({key})"), {"name": name}).scalar_one())

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.invalidate()
                self._connection.close()
        self._connection = None
        self._held = frozenset()

    def close(self) -> None:
        """Let go of all, at once: another process may take them when this returns."""
        with self._mutex:
            if self._connection is not None:
                with suppress(SQLAlchemyError):
                    self._connection.execute(text("SELECT pg_advisory_unlock_all()"))
            self._drop()
