"""Worlds and servers that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.coordinator.harness import Site, World, place_bundle, serving


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
