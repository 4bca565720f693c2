"""Coordinators on one PostgreSQL database: one at a time, and one that another has taken over from writes no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coordinator.errors import Superseded
from coordinator.store import database
from coordinator.store.database import open_database, sole_coordinator
from coordinator.store.repository import Repository
from federation.axes.cover import DeviceProfile
from federation.errors import InputError
from tests.coordinator.databases import about_postgresql, database_url, query
from tests.coordinator.harness import Offer, World, body_of, end_process, put_update, start_server
from tests.waiting import PATIENCE, wait_until

pytestmark = about_postgresql
# The connection that holds the lock of a coordinator is cut, as a network would do it.
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()
AND objid::bigint = hashtext(current_schema())::bigint & 4294967295
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Repository, Repository]]:
    first, second = (Repository(open_database(database_url(tmp_path))) for _ in range(2))
    yield first, second
    first.close()
    second.close()


def test_a_second_coordinator_is_refused(two: tuple[Repository, Repository], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "WAIT_FOR_PREDECESSOR", "10ms")
    first, second = (sole_coordinator(repository.sessions, repository.take_over) for repository in two)
    with first, pytest.raises(InputError, match="another coordinator runs on it"), second:
        pass
    with sole_coordinator(two[1].sessions, two[1].take_over), two[1].begin() as session:
        two[1].add_meta(session, "a", "b")


def test_one_that_was_taken_over_from_writes_no_more(two: tuple[Repository, Repository]) -> None:
    first, second = two
    first.take_over()
    with first.begin() as session:
        first.add_meta(session, "before", "x")
    second.take_over()
    with pytest.raises(Superseded), first.begin() as session:
        first.add_meta(session, "after", "x")
    with pytest.raises(Superseded):
        first.check_epoch()
    with second.begin() as session:
        assert (second.meta(session, "before"), second.meta(session, "after")) == ("x", None)


def test_a_stalled_coordinator_ends_and_the_other_finishes_the_round(tmp_path: Path) -> None:
    """One update of two was acknowledged by the first; the second process has it, and takes the rest."""
    world = World(tmp_path)
    world.now = time.time()
    invited = world.registry.invite(2, 600)
    tokens = [world.registry.enrol(invited, name, DeviceProfile(tier="strong"))[1] for name in "ab"]
    job = world.job(num_rounds=1, participate={"min_available": 2, "quorum": 1.0})
    world.end()
    clients = [httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE) for token in tokens]
    first, url = start_server(tmp_path)
    try:
        for client in clients:
            client.base_url = url
        clients[0].post("/v1/tasks/next?wait=0")
        offers = [Offer(client.post("/v1/tasks/next?wait=30").json()) for client in reversed(clients)][::-1]
        assert put_update(clients[0], offers[0], body_of(world.manifest, offers[0])).status_code == 201
        assert query(tmp_path, CUT) == [(True,)]
        second, other = start_server(tmp_path)
        try:
            assert first.wait(PATIENCE) == 0, "it saw that another one has taken over"
            clients[1].base_url = other
            assert put_update(clients[1], offers[1], body_of(world.manifest, offers[1])).status_code == 201
            wait_until(lambda: query(tmp_path, "SELECT version FROM jobs WHERE id = :job", job=job) == [(1,)])
        finally:
            end_process(second)
    finally:
        end_process(first)
        for client in clients:
            client.close()
