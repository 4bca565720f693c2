"""The documentation says what is true: its snippet runs, its lists and tables are those of the program."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.main import get_command

from bench.device.zoo_table import HEAD, ZooRow, rows, table
from embrace.cli.main import app
from federation import manifest
from federation.space import Parameter
from model_export.autodiff.registry import known_operators
from model_export.bundle import Choices, export_bundle
from model_export.source import load_source
from model_export.zoo import ZOO

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def between(text: str, start: str, end: str) -> str:
    return text.split(start, 1)[1].split(end, 1)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_shown_exists(page: Path) -> None:
    text = page.read_text()
    shells = "\n".join(re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^(?:\$ )?embrace ([^\n#]*)", shells, re.MULTILINE)
    for line in [*lines, *re.findall(r"`embrace ([^`]*)`", text)]:
        command, rest = _resolve(line.split())
        used = {option.partition("=")[0] for option in rest if re.fullmatch(r"--[a-z][a-z-]+(=.*)?", option)}
        assert used <= {"--help", *(option for parameter in command.params for option in parameter.opts)}, line


def _resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line names, and what follows its name."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands") and re.fullmatch(r"[a-z]+", words[0]):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_target_of_make_exists(page: Path) -> None:
    known = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    assert set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)`", text, re.MULTILINE)) <= {
        pair for name in known for pair in ((name, ""), ("", name))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_have_an_actor(page: Path) -> None:
    assert re.findall(r"(?i)\b(?:whoever|nobody|somebody|everybody|anybody)\b", page.read_text()) == []


def test_the_walk_has_twelve_files_that_exist() -> None:
    text = between((ROOT / "docs" / "architecture.md").read_text(), "<!-- walk", "<!-- end of walk")
    files = re.findall(r"^\d+\. `([\w/.]+)`", text, re.MULTILINE)
    assert len(files) == 12
    assert [file for file in re.findall(r"`([\w/]+\.py)`", text) if not (ROOT / file).is_file()] == []


def test_the_glossary_is_short_and_sorted() -> None:
    terms = re.findall(r"^\| (?!term|---)(.*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(terms) <= 40
    assert terms == sorted(terms)


def test_the_snippet_trains_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_bundle(load_source("digits"), tmp_path / "bundles" / "digits", Choices())
    text = (ROOT / "docs" / "reference" / "bundle.md").read_text()
    program = between(text, "```python\n", "```")
    assert len([line for line in program.splitlines() if line and "import" not in line]) <= 18
    monkeypatch.chdir(tmp_path)
    first: dict[str, object] = {}
    exec(program.replace("range(100)", "range(1)"), first)
    last: dict[str, object] = {}
    exec(program, last)
    assert last["results"]["loss"] < first["results"]["loss"]  # type: ignore[index]


@pytest.mark.parametrize(
    "kind",
    [
        *(manifest.Manifest, manifest.Source, manifest.Loss, manifest.TensorSpec, manifest.Head, manifest.OwnLoss),
        *(manifest.Layer, Parameter, manifest.Boundary, manifest.FileRef, manifest.Preprocessing),
        *(manifest.Measuring, manifest.BatchNorm),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_of_the_manifest_is_explained(kind: type) -> None:
    text = (ROOT / "docs" / "reference" / "bundle.md").read_text()
    section = between(text, f"### {kind.__name__}\n", "\n#")
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    explained = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert explained == {field.name for field in fields(kind)}


def test_the_operators_listed_are_those_with_a_rule() -> None:
    """Operators that exist only between the layout pass and its lowerings are left out."""
    text = between((ROOT / "docs" / "reference" / "operators.md").read_text(), "registry by tests/docs -->", "<!-- end")
    assert re.findall(r"`(\w+)`", text) == [name for name in known_operators() if onnx.defs.has(name)]


def zoo_lines() -> list[str]:
    text = between((ROOT / "docs" / "reference" / "zoo.md").read_text(), "checked by tests/docs -->\n", "\n<!-- end")
    return text.splitlines()


def test_the_table_of_the_zoo_has_every_model_and_tier() -> None:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in zoo_lines()]
    assert tuple(cells[0]) == HEAD
    expected = [(name, tier) for name in ZOO for tier in ("strong", *ZOO[name].tiers)]
    assert [(row[0], row[3]) for row in cells[2:]] == expected
    strong = {row[0]: int(row[5].replace(",", "")) for row in cells[2:] if row[3] == "strong"}
    assert strong == {name: model.count_parameters() for name, model in ZOO.items()}


@pytest.mark.parametrize("name", ["digits", "mnist_2nn", "text_transformer"])
def test_rows_of_the_zoo(name: str) -> None:
    found: list[ZooRow] = list(rows(name))
    assert [row.markdown() for row in found] == [line for line in zoo_lines() if line.startswith(f"| {name} |")]


@pytest.mark.slow
def test_the_whole_table_of_the_zoo() -> None:
    assert zoo_lines() == table().splitlines()


def snippet(page: str, beginning: str) -> str:
    """The Python block of a page that begins so."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(beginning))


def test_the_rule_shown_is_the_one_in_the_source() -> None:
    source = (ROOT / "model_export" / "autodiff" / "rules" / "activation.py").read_text()
    assert snippet("reference/operators.md", '@rule("Softplus")') in source
