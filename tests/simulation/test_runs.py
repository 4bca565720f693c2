"""Runs in folders and in memory: curves over seeds and what notebooks show, compared with figures made by hand."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save as safetensors

from federation.errors import DataError, EmbraceError, InputError
from simulation.runs import COLUMNS, Run, RunGroup, group_runs, read_run
from tests.simulation.written_runs import LAYERS, job, scored, three, write


def test_a_run_adds_up_what_its_rounds_cost(tmp_path: Path):
    run = read_run(write(tmp_path, scored(0.1, None, 0.3), {"job": {"name": "mine"}}))
    assert run.name == "mine" and run.skipped == 0
    assert run.progress("rounds").tolist() == [1, 2, 3]
    assert run.progress("steps").tolist() == [10, 20, 30]
    assert run.progress("bytes").tolist() == [3e6, 6e6, 9e6]
    assert run.values("accuracy")[[0, 2]].tolist() == [0.1, 0.3] and math.isnan(run.values("accuracy")[1])
    assert np.isnan(run.values("loss")).all() and np.isnan(run.values("svcca")).all()


@pytest.mark.parametrize("ending", ['{"round": 3, "accu', "{", '{"round": 3'])
def test_a_last_line_that_is_being_written_is_passed_over(tmp_path: Path, ending: str):
    run = read_run(write(tmp_path, scored(0.1, 0.2), ending=ending))
    assert len(run.rounds) == 2 and run.skipped == 0 and run.name == tmp_path.name


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path):
    assert read_run(write(tmp_path, scored(0.1), ending='{"round": 1, "accuracy": 0.9}')).values("accuracy")[1] == 0.9


def test_a_run_that_was_killed_and_resumed(tmp_path: Path):
    rows = scored(0.1, 0.2, 0.3)
    broken = '{"round": 1, "ac' + json.dumps(rows[1]) + "\n" + json.dumps({**rows[1], "accuracy": 0.25}) + "\n[]\n\n"
    write(tmp_path, [rows[0]], ending=broken + json.dumps(rows[2]) + "\n")
    run = read_run(tmp_path)
    assert run.values("accuracy").tolist() == [0.1, 0.25, 0.3] and run.skipped == 2
    twice = read_run(write(tmp_path, [*rows, {**rows[1], "accuracy": 0.9}]))
    assert twice.values("accuracy").tolist() == [0.1, 0.9, 0.3]


@pytest.mark.parametrize(
    ("text", "run", "message"),
    [
        (None, None, "cannot read .*metrics.jsonl: No such file.*; expected the folder of a run"),
        ("", None, "has no line with a round"),
        ('{"loss": 1}\n{"round": true}\n{"round": -1}\n', None, "has no line with a round"),
        ('{"round": 0}\n', "[]", "expected an object, got list"),
        ('{"round": 0}\n', "{", "is no JSON that can be read"),
    ],
)
def test_what_is_no_run(tmp_path: Path, text: str | None, run: str | None, message: str):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    if run is not None:
        (tmp_path / "run.json").write_text(run)
    with pytest.raises(DataError, match=message):
        read_run(tmp_path)


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path: Path):
    facts = [job("a", 0), job("a", 1), job("b", 0), job("a", 0, rate=0.2), job("a-seed7", 7)]
    runs = [read_run(write(tmp_path / f"run{number}", scored(0.5), run)) for number, run in enumerate(facts)]
    groups = group_runs([*runs, runs[0]])  # the same folder twice is one run
    assert [(group.name, [run.path.name for run in group.runs]) for group in groups] == [
        ("a (run0)", ["run0", "run1", "run4"]),
        ("b", ["run2"]),
        ("a (run3)", ["run3"]),
    ]


def test_folders_without_run_json_are_grouped_by_name(tmp_path: Path):
    runs = [read_run(write(tmp_path / name, scored(0.5))) for name in ("x-seed0", "x_seed=1", "y-seed0")]
    assert [(group.name, len(group.runs)) for group in group_runs(runs)] == [("x", 2), ("y", 1)]


def test_mean_and_band(tmp_path: Path):
    x, y, spread = three(tmp_path).curve("accuracy", "bytes")
    assert x.tolist() == [3e6, 9e6]  # round 1 was scored in one run only, round 3 is missing in one
    assert y.tolist() == pytest.approx([0.2, 0.4])
    assert spread.tolist() == pytest.approx([statistics.stdev([0.1, 0.2, 0.3]), statistics.stdev([0.3, 0.2, 0.7])])
    alone = RunGroup("alone", three(tmp_path).runs[:1]).curve("accuracy", "rounds")
    assert alone[0].tolist() == [1, 3, 4] and alone[2].tolist() == [0, 0, 0]


def test_values_by_layer(tmp_path: Path):
    run = read_run(write(tmp_path, LAYERS))
    assert run.layers("svcca") == ["in", "out", "middle"] and run.layers("interval") == ["in", "out"]
    found = run.by_layer("svcca", ["in", "out"])
    assert found[:, 0].tolist() == [1.0, 0.8] and found[0, 2] == 0.9 and np.isnan(found[1, 1:]).all()
    assert run.values("svcca")[[0, 2]].tolist() == [0.9, 0.9] and np.isnan(run.values("svcca")[[1, 3]]).all()


WEIGHTS = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}


def in_memory(*accuracies: float | None) -> Run:
    return Run("mine", scored(*accuracies, loss=0.5, devices=4), {"engine": "torch"}, weights_file=safetensors(WEIGHTS))


def test_what_a_run_came_to():
    run = in_memory(0.2, 0.9, 0.7, None)
    assert (run.accuracy, run.best_accuracy, run.loss) == (0.7, 0.9, 0.5)
    assert run.place_of(0.5) == 1 and run.place_of(0.95) is None
    assert repr(run) == "Run('mine', 4 rounds, accuracy 70.0%)"
    nothing = Run("none", [])
    assert (nothing.accuracy, nothing.best_accuracy, nothing.loss) == (None, None, None)
    assert repr(nothing) == "Run('none', 0 rounds)" and nothing.table() == []


def test_a_run_is_shown_as_a_table():
    run = in_memory(0.2, None, 0.7, None)
    assert run.table()[0] == ["1", "20.0%", "0.5000", "4", "–", "1.00", "–"]
    assert [cells[0] for cells in run.table()] == ["1", "3", "4"], "the rounds that were scored, and the last"
    shown = run._repr_html_()
    assert all(f"<th>{column}</th>" in shown for column in COLUMNS) and shown.count("<tr>") == 4
    assert "&lt;b&gt;" in Run("<b>", [])._repr_html_()
    assert len(in_memory(*[0.5] * 1000).table()) <= 21


def test_a_run_in_memory_is_saved_and_read_again(tmp_path: Path):
    run = in_memory(0.2, 0.7)
    read = read_run(run.save(tmp_path / "new" / "run"))
    assert (read.name, read.rounds, read.about["engine"]) == ("mine", run.rounds, "torch")
    assert read.weights.keys() == WEIGHTS.keys()
    assert all(np.array_equal(read.weights[name], value) for name, value in WEIGHTS.items())
    memory = read.in_memory()
    assert memory.path is None and np.array_equal(memory.weights["b"], WEIGHTS["b"])
    with pytest.raises(InputError, match="not empty"):
        run.save(tmp_path / "new")


def test_a_run_without_weights(tmp_path: Path):
    with pytest.raises(DataError, match="has no weights yet"):
        _ = read_run(write(tmp_path, scored(0.5))).weights
    with pytest.raises(DataError, match="none has no weights"):
        _ = Run("none", []).weights


def test_pandas_takes_the_records(monkeypatch):
    pandas = pytest.importorskip("pandas")
    frame = Run("layered", LAYERS).to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.index) == [0, 1, 2, 3]
    assert frame["per_layer.svcca.in"][0] == 1.0


def test_pandas_is_asked_for_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(EmbraceError, match="pip install pandas"):
        in_memory(0.5).to_pandas()
