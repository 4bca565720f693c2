"""Opening a database: new, old, too new, and a migration that breaks off."""

from __future__ import annotations

import json
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, inspect, select, text

from coordinator.store import database
from coordinator.store.database import SCHEMA_VERSION, Sessions, open_database, sqlite_url
from coordinator.store.migrations import MIGRATIONS
from coordinator.store.repository import Repository
from coordinator.store.schema import META, JobRecord
from edge_runtime.bundle_files import read_manifest
from federation.errors import InputError
from tests.coordinator.databases import about_postgresql, about_sqlite, database_url
from tests.coordinator.harness import Files, World


def engine_of(sessions: Sessions):
    return sessions.kw["bind"]


def version_of(sessions: Sessions) -> str:
    with sessions() as session:
        return session.scalars(select(META.c.value).where(META.c.key == "schema")).one()


def columns(sessions: Sessions) -> set[str]:
    with engine_of(sessions).connect() as connection:
        return {column["name"] for column in inspect(connection).get_columns("jobs")}


@pytest.fixture
def url(tmp_path: Path):
    url = database_url(tmp_path)
    first = open_database(url)
    assert version_of(first) == str(SCHEMA_VERSION)
    engine_of(first).dispose()
    return url


@about_sqlite
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
        session.execute(META.update().where(META.c.key == "schema").values(value="99"))
    engine_of(sessions).dispose()
    with pytest.raises(InputError, match=rf"schema 99.*up to {SCHEMA_VERSION}.*newer program"):
        open_database(url)


@about_postgresql
def test_two_processes_that_start_at_once_make_one_database(tmp_path: Path) -> None:
    url = database_url(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for sessions in pool.map(open_database, [url] * 4):
            assert version_of(sessions) == str(SCHEMA_VERSION)
            engine_of(sessions).dispose()


def test_numbers_that_are_none_and_integers_of_64_bits_can_be_kept(url: str) -> None:
    repository = Repository(open_database(url))
    body = {"loss": float("nan"), "deep": [{"x": float("inf")}, 1.5], "text": "a\0b"}
    with repository.begin() as session:
        repository.add_job(session, JobRecord("j", "a\0b", "", {}, "done", version=2**40, created_at=0.0))
        repository.add_events(session, [{"job": "j", "at": 0.0, "kind": "k", "body": body}])
    with repository.reading() as session:
        (event,) = repository.events(session, "j", 0, 10)
        assert event.body == {"loss": None, "deep": [{"x": None}, 1.5], "text": "a\0b"}
        found = repository.job(session, "j")
        assert found is not None and (found.version, found.name) == (2**40, "a\ufffdb")
        assert repository.job(session, "j\0") is None
        assert repository.events(session, "j", 2**62, 10) == []
    repository.close()


def add_column(name: str):
    return lambda connection: connection.execute(text(f"ALTER TABLE jobs ADD COLUMN {name} TEXT"))


def breaks(connection: Connection) -> None:
    raise RuntimeError("kill -9")


def test_migrations_run_once_each_and_in_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, migrations in enumerate(([add_column("a")], [add_column("a"), add_column("b"), add_column("c")])):
        newest = SCHEMA_VERSION + len(migrations)
        monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, *migrations))
        monkeypatch.setattr(database, "SCHEMA_VERSION", newest)
        for _ in range(2):
            sessions = open_database(url)
            assert version_of(sessions) == str(newest)
            assert {"a", "b", "c"} & columns(sessions) == ({"a"} if number == 0 else {"a", "b", "c"})
            engine_of(sessions).dispose()


def test_a_migration_that_breaks_off_has_not_happened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, add_column("a"), breaks))
    monkeypatch.setattr(database, "SCHEMA_VERSION", SCHEMA_VERSION + 2)
    with pytest.raises(RuntimeError):
        open_database(url)
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, add_column("a"), add_column("b")))
    sessions = open_database(url)
    assert {"a", "b"} <= columns(sessions) and version_of(sessions) == str(SCHEMA_VERSION + 2)
    engine_of(sessions).dispose()


def test_a_database_that_was_half_made_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_set_version", lambda connection, version: breaks(connection))
    with pytest.raises(RuntimeError):
        open_database(database_url(tmp_path))
    monkeypatch.undo()
    sessions = open_database(database_url(tmp_path))
    assert version_of(sessions) == str(SCHEMA_VERSION)
    engine_of(sessions).dispose()


def test_a_round_of_the_first_schema_goes_on(tmp_path: Path) -> None:
    """The seats of a round were part of its JSON: a directory from then is taken over in the middle of a round."""
    world = World(tmp_path)
    devices = world.fleet("strong", "strong")
    job = world.job(num_rounds=1, participate={"min_available": 2})
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    before = world.state(job)["round"]
    world.end()
    engine = create_engine(database_url(tmp_path))
    with engine.begin() as connection:
        body = text("UPDATE rounds SET body = :body")
        connection.execute(body, {"body": json.dumps(before["body"])})
        connection.execute(text("DROP TABLE seats"))
        connection.execute(text("DROP TABLE standings"))
        connection.execute(text("DROP TABLE benchmarks"))
        connection.execute(text("DROP INDEX updates_of_device"))
        connection.execute(text("DROP INDEX updates_by_device"))
        connection.execute(text("DROP TABLE sessions"))
        connection.execute(text("DROP TABLE shared_jobs"))
        for task, sha256, name in connection.execute(text("SELECT task, sha256, body FROM updates WHERE body <> ''")):
            (tmp_path / "spool" / f"{task}.{name}.body").rename(tmp_path / "spool" / f"{task}.{sha256}.body")
        connection.execute(text("DROP TABLE sums"))
        for column in ("body", "checked", "sum"):
            connection.execute(text(f"ALTER TABLE updates DROP COLUMN {column}"))
        connection.execute(text("DROP INDEX ix_devices_name"))
        for column in ("here_until", "away_until"):
            connection.execute(text(f"DROP INDEX ix_devices_{column}"))
            connection.execute(text(f"ALTER TABLE devices DROP COLUMN {column}"))
        connection.execute(text("UPDATE meta SET value = '1' WHERE key = 'schema'"))
    engine.dispose()
    world.begin()
    try:
        assert version_of(world.sessions) == str(SCHEMA_VERSION)
        assert world.state(job)["round"]["body"]["slots"] == before["body"]["slots"]
        world.send(devices[1], offers[devices[1]])
        world.settle()
        assert world.state(job)["version"] == 1
    finally:
        world.end()


SCHEMA_2 = Path(__file__).parent / "schema2"  # written by the program of then; `expected` is what it led to there


class Found(World):
    """A directory that another program left behind."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.reached = root, 1_000_000.0, lambda point: None
        self.files = Files(root)
        (bundle,) = (root / "bundles").iterdir()
        self.bundle, self.manifest = bundle.name, read_manifest(bundle)
        self.begin()


def shape(path: Path) -> dict[str, tuple[set[str], set[str]]]:
    """The columns and the indexes of every table."""
    engine = create_engine(sqlite_url(path))
    with engine.connect() as connection:
        known = inspect(connection)
        found = {
            table: (
                {column["name"] for column in known.get_columns(table)},
                {str(index["name"]) for index in known.get_indexes(table)},
            )
            for table in known.get_table_names()
        }
    engine.dispose()
    return found


@about_sqlite
def test_an_old_database_becomes_what_a_new_one_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "coordinator.db")) as old:
        old.executescript((SCHEMA_2 / "coordinator.sql").read_text())
    engine_of(open_database(sqlite_url(tmp_path))).dispose()
    (tmp_path / "new").mkdir()
    engine_of(open_database(sqlite_url(tmp_path / "new"))).dispose()
    assert shape(tmp_path) == shape(tmp_path / "new")


@about_sqlite
def test_a_job_of_the_second_schema_goes_on(tmp_path: Path) -> None:
    """In the middle of the second of three rounds, one body of three in the spool; rounds had no facts then."""
    root = Path(shutil.copytree(SCHEMA_2, tmp_path / "served"))
    with closing(sqlite3.connect(root / "coordinator.db")) as old:
        old.executescript((root / "coordinator.sql").read_text())
    world = Found(root)
    try:
        assert version_of(world.sessions) == str(SCHEMA_VERSION)
        with engine_of(world.sessions).connect() as connection:
            assert "updates_of_device" in {index["name"] for index in inspect(connection).get_indexes("updates")}
        (job,) = world.coordinator.jobs()
        names = {row["name"]: row["id"] for row in world.coordinator.devices()}
        samples = {names[name]: number for number, name in enumerate("abc", 1)}
        while world.state(job["id"])["state"] == "running":
            offers = world.offers(list(samples))
            assert offers
            for device, offer in offers.items():
                world.send(device, offer, samples=samples[device])
            world.settle()
        assert world.state(job["id"])["version"] == 3
        assert world.files.version(job["id"], 3).read_bytes() == (root / "expected.safetensors").read_bytes()
    finally:
        world.end()


@about_sqlite
def test_a_device_is_found_by_its_name_in_an_index(url: str) -> None:
    """Otherwise every device that enrols reads the whole fleet."""
    sessions = open_database(url)
    with engine_of(sessions).connect() as connection:
        asked = "SELECT id FROM devices WHERE name = 'd' AND revoked IS 0 LIMIT 1"
        steps = [row[3] for row in connection.execute(text(f"EXPLAIN QUERY PLAN {asked}"))]
    assert steps == ["SEARCH devices USING INDEX ix_devices_name (name=?)"]
    engine_of(sessions).dispose()


@about_sqlite
def test_the_last_update_of_a_device_is_found_by_an_index(url: str) -> None:
    sessions = open_database(url)
    with engine_of(sessions).connect() as connection:
        asked = "SELECT task FROM updates WHERE job = 'j' AND device = 'd' AND round < 9 ORDER BY round DESC LIMIT 1"
        steps = [row[3] for row in connection.execute(text(f"EXPLAIN QUERY PLAN {asked}"))]
    assert steps == ["SEARCH updates USING INDEX updates_of_device (job=? AND device=? AND round<?)"]
    engine_of(sessions).dispose()
