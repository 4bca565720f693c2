"""`embrace plot`: its words and its refusals; what it draws and computes is tested in tests/simulation/test_runs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = []
    for seed in (0, 1):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"name": "fedavg", "job": {"seed": seed}}))
        layers = {"svcca": {"stem": 1.0, "classifier": 0.5}}
        rows = [{"round": n, "accuracy": 0.5 + 0.1 * n + 0.02 * seed, "per_layer": layers} for n in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    return folders


def test_a_picture_and_a_table(embrace, runs: list[Path], tmp_path: Path):
    answer = embrace("plot", *runs, "--out", tmp_path / "a.png", "--table", "--target", 0.6)
    assert answer.code == 0 and (tmp_path / "a.png").stat().st_size > 5000
    assert answer.out.splitlines()[2] == "| fedavg | 2 | 3 | 71.00 ± 1.41 | 71.00 ± 1.41 | – | 2.0 ± 0.0 | – |"
    (line,) = embrace("plot", *runs, "--json").json
    assert line["final"]["mean"] == pytest.approx(0.71) and line["reached"] == 0


def test_layers_of_one_run_and_of_several(embrace, runs: list[Path], tmp_path: Path):
    for name, some in (("one", runs[:1]), ("two", runs)):
        assert embrace("plot", *some, "--y", "svcca", "--out", tmp_path / f"{name}.png").code == 0
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "two.png").read_bytes()


def test_lines_that_cannot_be_read_are_mentioned(embrace, runs: list[Path]):
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    answer = embrace("plot", *runs, "--table")
    assert answer.code == 0 and answer.err == f"note: {runs[0]}: lines of metrics.jsonl that could not be read: 1\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to do: expected --out FILE.png, --table or --json"),
        (("--table", "--x", "days"), "--x days: expected one of rounds, steps, bytes"),
        (("--table", "--y", "joy"), "--y joy: expected one of accuracy, loss"),
        (("--out", "no/such/x.png"), "expected a file in a directory that exists"),
        (("--x", "bytes", "--out", "x.png"), "no line has bytes_up or bytes_down"),
    ],
)
def test_refusals(embrace, runs: list[Path], options: tuple[str, ...], message: str):
    answer = embrace("plot", *runs, *options)
    assert answer.code == 2 and message in answer.error


def test_no_run(embrace, tmp_path: Path):
    assert "expected the folder of a run" in embrace("plot", tmp_path, "--table").error
