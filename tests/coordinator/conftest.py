"""Worlds and servers that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from federation.job import plan_from
from tests.coordinator.harness import Offer, Site, World, place_bundle, serving


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: object) -> World:
        made.append(World(tmp_path / f"world{len(made)}", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.end()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One server for a module; its bundle is the small one."""
    with serving(tmp_path_factory.mktemp("site")) as found:
        found.bundle, found.manifest = place_bundle(found.directory)  # type: ignore[attr-defined]
        yield found


@pytest.fixture
def held(site: Site) -> Iterator[tuple[httpx.Client, Offer]]:
    """A device that holds a task, of a job that no other test has."""
    service = site.server.coordinator
    for row in service.devices():
        if not row["revoked"]:
            service.revoke(row["id"])
    job = service.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    with site.http(site.enrol()[1]) as client:
        yield client, Offer(client.post("/v1/tasks/next?wait=5").json())
    site.settle()
    if service.job(job)["state"] == "running":
        service.set_state(job, "stopped")
