"""docs/reference/jobs.md: its job files can be read, its tables have the keys of the program with their defaults."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from embrace.cli.main import app
from federation import job as plan
from federation.algorithms import PUBLISHED
from federation.axes.cover import COVER
from federation.axes.local import LOCAL
from federation.axes.participate import Participation
from federation.axes.serve import SERVE
from federation.axes.sync import SYNC
from federation.axes.weigh import Weigh
from federation.decode import Axis, decode
from federation.job import Plan, parse_plan
from simulation.fleet import FleetTable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "jobs.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
TABLES = {field.name for field in fields(Plan)} & {
    "participate",
    "cover",
    "sync",
    "local",
    "weigh",
    "serve",
    "evaluate",
    "bounds",
    "simulate",
}
CLASSES = {
    "participate": Participation,
    "local": plan.LocalWork,
    "weigh": Weigh,
    "evaluate": plan.Evaluate,
    "bounds": plan.Bounds,
    "simulate": FleetTable,
}


def rows(section: str, header: str = "key") -> dict[str, tuple[str, str]]:
    """First cell -> the other two, of a table below a heading."""
    text = PAGE.split(f"\n### {section}\n", 1)[1].split("\n##", 1)[0]
    table = text.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", table, re.MULTILINE)
    return {name: (default, words) for name, default, words in found}


def default_of(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def documented(cell: str) -> Any:
    """The default that a cell shows."""
    if cell in ("required", "none"):
        return MISSING if cell == "required" else None
    assert cell.startswith("`") and cell.endswith("`"), cell
    return tomllib.loads(f"value = {cell.strip('`')}")["value"]


def same(shown: Any, real: Any) -> bool:
    real = list(real) if isinstance(real, tuple) else real
    return bool(shown == real) and (isinstance(shown, bool) == isinstance(real, bool))


@pytest.mark.parametrize("text", BLOCKS)
def test_every_job_file_is_one(text: str) -> None:
    assert parse_plan(text).bundle == "digits"


def test_there_are_job_files() -> None:
    assert len(BLOCKS) == 3


def test_the_tables_are_those_of_a_job() -> None:
    headings = set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE))
    assert headings == TABLES
    others = {field.name: default_of(field) for field in fields(Plan) if field.name not in TABLES}
    shown = {name: documented(default) for name, (default, _) in rows("The job itself").items()}
    assert shown == others


@pytest.mark.parametrize("table", CLASSES)
def test_every_key_and_its_default(table: str) -> None:
    shown = {name: documented(default) for name, (default, _) in rows(table).items()}
    real = {field.name: default_of(field) for field in fields(CLASSES[table])}
    assert shown.keys() == real.keys()
    assert [name for name in real if name != "rules" and not same(shown[name], real[name])] == []
    told = {name: value for name, value in shown.items() if value is not None}
    assert decode(CLASSES[table], told, defaults=True) == CLASSES[table]()


@pytest.mark.parametrize(("table", "axis"), [("cover", COVER), ("sync", SYNC), ("serve", SERVE)])
def test_every_rule_of_an_axis_and_its_constants(table: str, axis: Axis) -> None:
    shown = rows(table)
    assert [name for name in axis.kinds if f"`{name}`" not in shown["rule"][1]] == []
    real: dict[str, list[Any]] = {}
    for kind in axis.kinds.values():
        for field in fields(kind):
            real.setdefault(field.name, []).append(default_of(field))
    if table == "serve":
        real |= {field.name: [default_of(field)] for field in fields(plan.Serve) if field.name != "rule"}
    assert shown.keys() == {"rule", *real}
    assert documented(shown["rule"][0]) == axis.default
    for name, defaults in real.items():
        cell = shown[name][0]
        if cell == "by rule":  # the words have each of them
            assert len(set(defaults)) > 1 and all(f"`{value}`" in shown[name][1] for value in defaults)
        else:
            assert all(same(documented(cell), value) for value in defaults), name


def test_every_local_rule_and_its_constants() -> None:
    shown = rows("local", "rule")
    assert shown.keys() == LOCAL.kinds.keys()
    for name, kind in LOCAL.kinds.items():
        cells = re.findall(r"`(\w+)(?: = ([^`]+))?`", shown[name][0])
        told = {key: tomllib.loads(f"v = {value}")["v"] if value else MISSING for key, value in cells}
        assert told == {field.name: default_of(field) for field in fields(kind)}, name


def test_the_algorithms_that_are_named() -> None:
    named = re.findall(r'algorithm = "(\w+)"', PAGE)
    assert named and set(named) <= PUBLISHED.keys()


@pytest.mark.parametrize("group", ["job", "device"])
def test_every_command_of_a_group(group: str) -> None:
    known = set(get_command(app).commands[group].commands)  # type: ignore[attr-defined]
    text = PAGE.split("## The commands", 1)[1].split("\n## ", 1)[0]
    shown = set(re.findall(rf"`embrace {group} (\w+)", text)) | ({"resume"} if "`resume`" in text else set())
    assert shown - (set() if group == "job" else {"resume"}) == known
