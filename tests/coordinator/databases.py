"""The databases of coordinators in tests: SQLite in their directories, or for each a schema of one PostgreSQL server.

`python -m tests.coordinator.on_postgresql` starts that server and runs tests on it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, insert, select, text

from coordinator.store.database import open_database, sqlite_url
from coordinator.store.schema import METADATA

SERVER = os.environ.get("EMBRACE_TEST_POSTGRESQL", "")  # a URL
about_sqlite = pytest.mark.skipif(bool(SERVER), reason="is about SQLite")
about_postgresql = pytest.mark.skipif(not SERVER, reason="is about PostgreSQL: make test-scale")


def database_url(directory: Path) -> str:
    """The URL of a directory's database, which need not be there yet."""
    if not SERVER:
        return sqlite_url(directory)
    name = "coordinator_" + hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:24]
    engine = create_engine(SERVER)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {name}"))
    engine.dispose()
    return f"{SERVER}&options=-csearch_path%3D{name}&application_name={name}"


def query(directory: Path, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """Ask the database of a coordinator that may be at work."""
    engine = create_engine(database_url(directory))
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(statement), values)]
    engine.dispose()
    return found


def copy_database(directory: Path, to: Path) -> None:
    """Copy the database with a directory; a file was copied with the others."""
    if not SERVER:
        return
    source, target = (open_database(database_url(place)).kw["bind"] for place in (directory, to))
    with source.connect() as old, target.begin() as new:
        for table in METADATA.sorted_tables:
            new.execute(table.delete())
            rows = [dict(row._mapping) for row in old.execute(select(table))]
            if rows:
                new.execute(insert(table), rows)
        for table in ("events", "metrics"):
            _continue_numbers(new, table)
    source.dispose()
    target.dispose()


def _continue_numbers(connection: Connection, table: str) -> None:
    newest = f"SELECT coalesce(max(id), 0) + 1 FROM {table}"
    connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), ({newest}), false)"))
