"""Opening a database: new, old, too new, and a migration that breaks off."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, select, text

from coordinator.store import database
from coordinator.store.database import Sessions, open_database, sqlite_url
from coordinator.store.schema import MetaRow
from federation.errors import InputError


def engine_of(sessions: Sessions):
    return sessions.kw["bind"]


def version_of(sessions: Sessions) -> str:
    with sessions() as session:
        return session.scalars(select(MetaRow.value).where(MetaRow.key == "schema")).one()


def columns(sessions: Sessions) -> set[str]:
    with engine_of(sessions).connect() as connection:
        return {column["name"] for column in inspect(connection).get_columns("jobs")}


@pytest.fixture
def url(tmp_path: Path):
    url = sqlite_url(tmp_path)
    first = open_database(url)
    assert version_of(first) == "1"
    engine_of(first).dispose()
    return url


def test_what_is_committed_is_on_the_disk(url: str) -> None:
    sessions = open_database(url)
    with engine_of(sessions).connect() as connection:
        found = {name: connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")}
        assert found == {"journal_mode": "wal", "synchronous": 2}  # 2 is FULL
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    engine_of(sessions).dispose()


def test_a_newer_database_is_not_touched(url: str) -> None:
    sessions = open_database(url)
    with sessions.begin() as session:
        session.get_one(MetaRow, "schema").value = "99"
    engine_of(sessions).dispose()
    with pytest.raises(InputError, match=r"schema 99.*up to 1.*newer program"):
        open_database(url)


def add_column(name: str):
    return lambda connection: connection.execute(text(f"ALTER TABLE jobs ADD COLUMN {name} TEXT"))


def breaks(connection: Connection) -> None:
    raise RuntimeError("kill -9")


def test_migrations_run_once_each_and_in_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, migrations in enumerate(([add_column("a")], [add_column("a"), add_column("b"), add_column("c")])):
        monkeypatch.setattr(database, "MIGRATIONS", tuple(migrations))
        monkeypatch.setattr(database, "SCHEMA_VERSION", len(migrations) + 1)
        for _ in range(2):
            sessions = open_database(url)
            assert version_of(sessions) == str(len(migrations) + 1)
            assert {"a", "b", "c"} & columns(sessions) == ({"a"} if number == 0 else {"a", "b", "c"})
            engine_of(sessions).dispose()


def test_a_migration_that_breaks_off_has_not_happened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MIGRATIONS", (add_column("a"), breaks))
    monkeypatch.setattr(database, "SCHEMA_VERSION", 3)
    with pytest.raises(RuntimeError):
        open_database(url)
    monkeypatch.setattr(database, "MIGRATIONS", (add_column("a"), add_column("b")))
    sessions = open_database(url)
    assert {"a", "b"} <= columns(sessions) and version_of(sessions) == "3"
    engine_of(sessions).dispose()


def test_a_database_that_was_half_made_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_set_version", lambda connection, version: breaks(connection))
    with pytest.raises(RuntimeError):
        open_database(sqlite_url(tmp_path))
    monkeypatch.undo()
    sessions = open_database(sqlite_url(tmp_path))
    assert version_of(sessions) == "1"
    engine_of(sessions).dispose()
