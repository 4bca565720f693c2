"""`embrace inspect`: figures, tables, a picture, and no need for anything heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
Embrace = Callable[..., Any]


def test_json(embrace: Embrace, digits: Path) -> None:
    answer = embrace("inspect", digits, "--json")
    assert (answer.code, answer.err) == (0, "")
    facts = answer.json
    assert [layer["name"] for layer in facts["layers"]] == ["conv1", "conv2", "conv3", "dense", "classifier"]
    assert facts["layers"][0] | {"graph_bytes": 0} == {
        "name": "conv1",
        "input": [1, 8, 8],
        "output": [8, 8, 8],
        "parameters": 72 + 16,
        "statistics": 16,
        "activations": 512,
        "macs": 8 * 64 * 9,
        "graph_bytes": 0,
    }
    dense = facts["boundaries"][3]
    assert (dense["name"], dense["tiers"], dense["engines"]) == ("dense", ["weak"], ["portable"])
    assert (dense["parameters"], dense["activations"]) == (128 * 32 + 32 + 32 * 10 + 10, 32 * 42)
    assert dense["memory"] == {
        "parameters": 4 * 4458,
        "gradients": 4 * 4458,
        "optimiser": 4 * 4458,
        "activations": 8 * 32 * 42,
        "total": 12 * 4458 + 8 * 32 * 42,
    }


def test_another_batch_changes_activations_and_capacity_only(embrace: Embrace, digits: Path) -> None:
    small, large = (embrace("inspect", digits, "--batch", n, "--json").json for n in (1, 64))
    for a, b in zip(small["boundaries"], large["boundaries"], strict=True):
        assert b["activations"] == 64 * a["activations"]
        assert b["memory"]["parameters"] == a["memory"]["parameters"]
    assert small["layers"] == large["layers"]


def test_tables(embrace: Embrace, digits: Path) -> None:
    out = embrace("inspect", digits).out
    for text in ("digits (zoo digits)", "16×4×4", "73,728", "predicted memory", "moderate", "10.75 kB"):
        assert text in out


def test_a_picture(embrace: Embrace, digits: Path, tmp_path: Path) -> None:
    picture = tmp_path / "digits.png"
    answer = embrace("inspect", digits, "--plot", picture)
    assert answer.code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}" in answer.out


def test_a_picture_that_cannot_be_written(embrace: Embrace, digits: Path, tmp_path: Path) -> None:
    answer = embrace("inspect", digits, "--plot", tmp_path / "nowhere" / "x.png")
    assert answer.code == 2
    assert "cannot draw" in answer.error


def test_no_bundle(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("inspect", tmp_path)
    assert answer.code == 2
    assert f"{tmp_path} is not a bundle: it has no manifest.json" in answer.error


def test_a_newer_manifest(embrace: Embrace, copied: Path) -> None:
    file = copied / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    answer = embrace("inspect", copied)
    assert answer.code == 2
    assert "manifest version 2 is not supported; this program reads version 1" in answer.error


def test_it_runs_where_nothing_heavy_is_installed(digits: Path) -> None:
    """As on a device: importing torch, onnx, onnxruntime or matplotlib fails here."""
    program = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxruntime', 'matplotlib', 'sklearn'): sys.modules[name] = None\n"
        "from embrace.cli.main import main\nmain(['inspect', sys.argv[1], '--json'])"
    )
    command = [sys.executable, "-c", program, str(digits)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "digits"
