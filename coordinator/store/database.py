"""Opening the database: SQLite by default, or PostgreSQL; settings that survive a kill, migrations in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from coordinator.store.migrations import MIGRATIONS
from coordinator.store.schema import META, METADATA
from federation.errors import InputError, MissingPackage

Sessions = sessionmaker[Session]
SCHEMA_VERSION = len(MIGRATIONS) + 1
WAIT_FOR_PREDECESSOR: Final = "10s"  # for the end of a coordinator that was killed
_MIGRATING, _SERVING = 1163018578, 1163018579  # numbers of our locks in a database that others may use, too


def open_database(url: str) -> Sessions:
    """Sessions of a database that has the newest schema; an older one is brought up to date first."""
    try:
        # A connection is tried before it is used: the server may have been started again since.
        engine = create_engine(url, json_serializer=_to_json, pool_pre_ping=not url.startswith("sqlite"))
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _configure_sqlite)
        try:
            _migrate(engine)
        except BaseException:
            engine.dispose()
            raise
    except ModuleNotFoundError as error:
        if error.name == "psycopg":
            raise MissingPackage("psycopg", "scale") from None
        raise InputError(f"cannot open the database: {error}") from None
    except SQLAlchemyError as error:  # no URL, no server, no database
        why = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise InputError(f"cannot open the database: {why}") from None
    return sessionmaker(engine, expire_on_commit=False)


def sqlite_url(directory: Path) -> str:
    return f"sqlite:///{directory / 'coordinator.db'}"


def _configure_sqlite(connection: Any, _: object) -> None:
    """Readers do not wait for a writer; what is committed is on the disk; a busy database is waited for."""
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


@contextmanager
def sole_coordinator(sessions: Sessions, take_over: Callable[[], None]) -> Iterator[None]:
    """Keep other coordinators off a PostgreSQL database while the block runs: each has the state of rounds in memory.

    `take_over` is called once the lock is held. If its connection is lost, so is the lock; what another coordinator
    takes over then, this one can write no more. One with SQLite is alone by the lock of its directory.
    """
    engine: Engine = sessions.kw["bind"]
    if engine.dialect.name != "postgresql":
        yield
        return
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"SET lock_timeout = '{WAIT_FOR_PREDECESSOR}'"))
        try:
            connection.execute(text(f"SELECT pg_advisory_lock({_SERVING}, hashtext(current_schema()))"))
        except OperationalError:
            raise InputError("the database is in use: another coordinator runs on it; end that one first") from None
        take_over()
        try:
            yield
        finally:
            connection.invalidate()  # closed, not returned: the lock ends with it


def _to_json(value: Any) -> str:
    """Write JSON that every database takes: numbers that are none become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _migrate(engine: Engine) -> None:
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":  # whose driver would record every change of a table by itself
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:  # one after the other: two processes may start at once
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATING}, hashtext(current_schema()))"))
        if not inspect(connection).has_table("meta"):
            METADATA.create_all(connection)
            _set_version(connection, SCHEMA_VERSION)
            return
        found = int(connection.execute(select(META.c.value).where(META.c.key == "schema")).scalar_one())
        if found > SCHEMA_VERSION:
            raise InputError(
                f"the database has schema {found}, this program knows up to {SCHEMA_VERSION}; use a newer program"
            )
        for migration in MIGRATIONS[found - 1 :]:
            migration(connection)
        if found < SCHEMA_VERSION:
            _set_version(connection, SCHEMA_VERSION)


def _set_version(connection: Connection, version: int) -> None:
    connection.execute(META.delete().where(META.c.key == "schema"))
    connection.execute(META.insert().values(key="schema", value=str(version)))
