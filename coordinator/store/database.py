"""Opening the database: SQLite by default, settings that survive a kill, migrations in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from coordinator.store.migrations import MIGRATIONS
from coordinator.store.schema import META, METADATA
from federation.errors import InputError

Sessions = sessionmaker[Session]
SCHEMA_VERSION = len(MIGRATIONS) + 1


def open_database(url: str) -> Sessions:
    """Sessions of a database that has the newest schema; an older one is brought up to date first."""
    try:
        engine = create_engine(url)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _configure_sqlite)
        _migrate(engine)
    except (SQLAlchemyError, ModuleNotFoundError) as error:  # no URL, no driver, no server, no database
        why = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise InputError(f"cannot open the database: {why}") from None
    return sessionmaker(engine, expire_on_commit=False)


def sqlite_url(directory: Path) -> str:
    return f"sqlite:///{directory / 'coordinator.db'}"


def _configure_sqlite(connection: Any, _: object) -> None:
    """Readers do not wait for a writer; what is committed is on the disk; a busy database is waited for."""
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _migrate(engine: Engine) -> None:
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":  # whose driver would record every change of a table by itself
            connection.exec_driver_sql("BEGIN IMMEDIATE")
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
