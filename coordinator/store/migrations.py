"""How an older database becomes the newest. Tables are spelled out as they were then: schema.py goes on changing."""

from __future__ import annotations

import json
from collections.abc import Callable

from sqlalchemy import Connection, text

Migration = Callable[[Connection], None]


def seats_in_rows(connection: Connection) -> None:
    """1 to 2: the seats of a round leave its JSON and become rows."""
    connection.execute(
        text(
            "CREATE TABLE seats (job VARCHAR(32) NOT NULL REFERENCES jobs (id), round INTEGER NOT NULL, "
            "number INTEGER NOT NULL, body JSON NOT NULL, PRIMARY KEY (job, round, number))"
        )
    )
    seat = text("INSERT INTO seats (job, round, number, body) VALUES (:job, :round, :number, :body)")
    head = text("UPDATE rounds SET body = :body WHERE job = :job AND number = :number")
    for job, number, body in connection.execute(text("SELECT job, number, body FROM rounds")).all():
        round = json.loads(body) if isinstance(body, str) else body
        for slot in round.pop("slots"):
            values = {"job": job, "round": number, "number": slot["number"], "body": json.dumps(slot)}
            connection.execute(seat, values)
        connection.execute(head, {"job": job, "number": number, "body": json.dumps(round)})


def last_update_of_a_device(connection: Connection) -> None:
    """2 to 3: algorithms with kept state ask for a device's last update before every task."""
    connection.execute(text("CREATE INDEX updates_of_device ON updates (job, device, round)"))


def standings_of_devices(connection: Connection) -> None:
    """3 to 4: how every device has done in a job."""
    connection.execute(
        text(
            "CREATE TABLE standings (job VARCHAR(32) NOT NULL REFERENCES jobs (id), "
            "device VARCHAR(32) NOT NULL REFERENCES devices (id), successes INTEGER NOT NULL, "
            "failures INTEGER NOT NULL, in_a_row INTEGER NOT NULL, benched_until DOUBLE PRECISION, "
            "seconds DOUBLE PRECISION, reason VARCHAR NOT NULL, message VARCHAR NOT NULL, "
            "at DOUBLE PRECISION NOT NULL, PRIMARY KEY (job, device))"
        )
    )
    connection.execute(text("CREATE INDEX ix_standings_device ON standings (device)"))


def excused_failures(connection: Connection) -> None:
    """4 to 5: failures that are excused are counted apart from a device's own."""
    connection.execute(text("ALTER TABLE standings ADD COLUMN excused INTEGER NOT NULL DEFAULT 0"))


def benchmarks_of_devices(connection: Connection) -> None:
    """5 to 6: what training costs on devices."""
    connection.execute(
        text(
            "CREATE TABLE benchmarks (device VARCHAR(32) NOT NULL REFERENCES devices (id), "
            "bundle VARCHAR(64) NOT NULL, batch INTEGER NOT NULL, threads INTEGER NOT NULL, "
            "runtime VARCHAR(200) NOT NULL, body JSON NOT NULL, at DOUBLE PRECISION NOT NULL, "
            "PRIMARY KEY (device, bundle, batch, threads, runtime))"
        )
    )
    connection.execute(text("CREATE INDEX ix_benchmarks_bundle ON benchmarks (bundle)"))


def sessions_of_pages(connection: Connection) -> None:
    """6 to 7: pages that signed in, and the newest update of every device for their table of the fleet."""
    connection.execute(
        text(
            "CREATE TABLE sessions (token_hash VARCHAR(64) NOT NULL PRIMARY KEY, admin_hash VARCHAR(64) NOT NULL, "
            "created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL)"
        )
    )
    connection.execute(text("CREATE INDEX updates_by_device ON updates (device, arrived_at)"))


def long_integers(connection: Connection) -> None:
    """7 to 8: rounds, bytes and samples may be larger than 32 bits, which SQLite's integers always could."""
    if connection.dialect.name == "sqlite":
        return
    columns = {
        "jobs": ("version",),
        "enrolments": ("uses_left",),
        "rounds": ("number",),
        "seats": ("round", "number"),
        "updates": ("round", "slot", "bytes", "samples"),
        "standings": ("successes", "failures", "in_a_row", "excused"),
        "benchmarks": ("batch", "threads"),
        "metrics": ("id", "version"),
        "events": ("id",),
    }
    for table, names in columns.items():
        changes = ", ".join(f"ALTER COLUMN {name} TYPE BIGINT" for name in names)
        connection.execute(text(f"ALTER TABLE {table} {changes}"))


def several_processes(connection: Connection) -> None:
    """8 to 9: what processes that share a database have to see of each other."""
    for table, column in (("seats", "revision"), ("standings", "revision")):
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {column} BIGINT NOT NULL DEFAULT 0"))
    connection.execute(text("ALTER TABLE updates ADD COLUMN body VARCHAR(64) NOT NULL DEFAULT ''"))
    connection.execute(text("ALTER TABLE devices ADD COLUMN here_until DOUBLE PRECISION NOT NULL DEFAULT 0"))
    connection.execute(
        text(
            "CREATE TABLE shared_jobs (job VARCHAR(32) NOT NULL PRIMARY KEY REFERENCES jobs (id), "
            "revision BIGINT NOT NULL, open BOOLEAN NOT NULL, scoring BIGINT NOT NULL)"
        )
    )
    if connection.dialect.name != "sqlite":
        closing = "SELECT job FROM rounds WHERE state = 'closing'"
        is_open = f"state NOT IN ('stopped', 'done', 'failed') OR id IN ({closing})"
        connection.execute(
            text(f"INSERT INTO shared_jobs SELECT id, 0, {is_open}, version FROM jobs WHERE state <> 'deleting'")
        )


def unchecked_updates(connection: Connection) -> None:
    """9 to 10: updates that devices have put into object storage, and that no process has checked yet."""
    connection.execute(text("ALTER TABLE updates ADD COLUMN checked BOOLEAN NOT NULL DEFAULT TRUE"))


def devices_that_come_back(connection: Connection) -> None:
    """10 to 11: devices of a large fleet are told when to come back."""
    connection.execute(text("ALTER TABLE devices ADD COLUMN away_until DOUBLE PRECISION NOT NULL DEFAULT 0"))
    for column in ("here_until", "away_until"):
        connection.execute(text(f"CREATE INDEX ix_devices_{column} ON devices ({column})"))


def partial_sums(connection: Connection) -> None:
    """11 to 12: workers fold the updates of a round into partial sums."""
    connection.execute(text("ALTER TABLE updates ADD COLUMN sum VARCHAR(64) NOT NULL DEFAULT ''"))
    connection.execute(
        text(
            "CREATE TABLE sums (id VARCHAR(64) NOT NULL PRIMARY KEY, job VARCHAR(32) NOT NULL REFERENCES jobs (id), "
            "round BIGINT NOT NULL, updates BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL)"
        )
    )
    connection.execute(text("CREATE INDEX ix_sums_job ON sums (job)"))


def names_of_devices(connection: Connection) -> None:
    """12 to 13: a device that enrols needs a name that no other has."""
    connection.execute(text("CREATE INDEX ix_devices_name ON devices (name)"))


# Each entry brings the schema from its index + 1 to the next version. A new database is made as the newest.
MIGRATIONS: tuple[Migration, ...] = (
    seats_in_rows,
    last_update_of_a_device,
    standings_of_devices,
    excused_failures,
    benchmarks_of_devices,
    sessions_of_pages,
    long_integers,
    several_processes,
    unchecked_updates,
    devices_that_come_back,
    partial_sums,
    names_of_devices,
)
