"""Opening the database: SQLite by default, or PostgreSQL; settings that survive a kill, migrations in order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from coordinator.store.migrations import MIGRATIONS
from coordinator.store.postgresql import MIGRATING, STUCK
from coordinator.store.schema import META, METADATA
from federation.errors import InputError, MissingPackage

Sessions = sessionmaker[Session]
SCHEMA_VERSION = len(MIGRATIONS) + 1


def open_database(url: str, *, migrate: bool = True) -> Sessions:
    """Sessions of a database that has the newest schema; an older one is brought up to date first, or refused."""
    try:
        # A connection is tried before it is used: the server may have been started again since.
        engine = create_engine(url, json_serializer=_to_json, pool_pre_ping=not url.startswith("sqlite"))
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _configure_sqlite)
        elif engine.dialect.name == "postgresql":
            event.listen(engine, "connect", _configure_postgresql)
        try:
            if migrate:
                _migrate(engine)
            else:
                _check_schema(engine)
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


def _configure_postgresql(connection: Any, _: object) -> None:
    """A process that stalls in the middle of a transaction does not hold the others up for ever."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{STUCK}'")
    connection.commit()


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
            connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATING}, hashtext(current_schema()))"))
        if not inspect(connection).has_table("meta"):
            METADATA.create_all(connection)
            _set_version(connection, SCHEMA_VERSION)
            return
        found = _version(connection)
        if found > SCHEMA_VERSION:
            raise InputError(
                f"the database has schema {found}, this program knows up to {SCHEMA_VERSION}; use a newer program"
            )
        for migration in MIGRATIONS[found - 1 :]:
            migration(connection)
        if found < SCHEMA_VERSION:
            _set_version(connection, SCHEMA_VERSION)


def _check_schema(engine: Engine) -> None:
    """Refuse a database that is not a coordinator's of this program, and leave it as it is."""
    with engine.connect() as connection:
        if not inspect(connection).has_table("meta"):
            raise InputError("the database has no tables of a coordinator: expected one that was started on it before")
        if (found := _version(connection)) != SCHEMA_VERSION:
            raise InputError(
                f"the database has schema {found}, this program needs {SCHEMA_VERSION}; start a coordinator of the "
                "same program first"
            )


def _version(connection: Connection) -> int:
    return int(connection.execute(select(META.c.value).where(META.c.key == "schema")).scalar_one())


def _set_version(connection: Connection, version: int) -> None:
    connection.execute(META.delete().where(META.c.key == "schema"))
    connection.execute(META.insert().values(key="schema", value=str(version)))
