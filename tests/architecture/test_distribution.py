"""What `pip install` gives a stranger: names, types, and nothing that is for development only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bench", "coordinator", "edge_runtime", "embrace", "federation", "model_export", "simulation")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOUND = PROJECT["tool"]["setuptools"]["packages"]["find"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_ships_and_is_typed(room: str) -> None:
    assert {room, f"{room}.*"} <= set(FOUND["include"])
    assert (ROOT / room / "py.typed").is_file()


def test_nothing_else_ships() -> None:
    assert {name.removesuffix(".*") for name in FOUND["include"]} == set(ROOMS)


def test_the_contest_with_flower_stays_in_the_clone() -> None:
    assert (ROOT / "bench" / "flower" / "__init__.py").is_file()
    assert FOUND["exclude"] == ["bench.flower"]


def test_the_image_is_built_from_every_room() -> None:
    copied = (ROOT / "Dockerfile").read_text()
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert [room for room in ROOMS if f"COPY {room} {room}\n" not in copied or f"!{room}" not in sent] == []


@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_an_extra_asks_for_this_distribution_by_its_name(extra: str) -> None:
    """The package index has another project under the name `embrace`."""
    wanted = PROJECT["project"]["optional-dependencies"][extra]
    own = [entry for entry in wanted if entry.startswith("embrace")]
    assert all(entry.startswith(f"{PROJECT['project']['name']}[") for entry in own)


def test_no_page_installs_the_other_project() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if "install embrace[" in page.read_text().replace("'", "")] == []
