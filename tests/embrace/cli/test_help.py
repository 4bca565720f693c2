"""`--help`: every command is listed, and its text is shown as it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from embrace.cli.main import COMMANDS, app
from tests.embrace.cli.conftest import Embrace


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a command, with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


FOUND = dict(walk(get_command(app)))


def test_every_file_of_a_command_is_listed() -> None:
    folder = Path(__file__).resolve().parents[3] / "embrace" / "cli"
    shared = {"__init__", "lazy", "main", "show", "watch"}
    files = {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()}
    assert {entry.module.rpartition(".")[2] for entry in COMMANDS.values()} == files - shared


def test_the_list_has_every_command_and_what_it_does(embrace: Embrace) -> None:
    shown = " ".join(embrace("--help").out.split())
    assert [name for name, entry in COMMANDS.items() if f"{name} {entry.help}" not in shown] == []


@pytest.mark.parametrize("path", FOUND, ids=" ".join)
def test_brackets_are_not_taken_for_markup(path: tuple[str, ...], embrace: Embrace) -> None:
    command = FOUND[path]
    texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    written = re.findall(r"\[[^]]+\]", " ".join(" ".join(texts).split()))
    answer = embrace(*path, "--help")
    assert answer.code == 0
    assert [text for text in written if text not in " ".join(answer.out.split())] == []


def test_a_table_of_a_job_file_is_named_with_its_brackets(embrace: Embrace) -> None:
    assert "its table [simulate] describes the fleet" in embrace("simulate", "--help").out


def test_a_mistyped_command_is_answered_with_the_nearest_one(embrace: Embrace) -> None:
    answer = embrace("exprt")
    assert answer.code == 2 and "Did you mean 'export'?" in answer.err
