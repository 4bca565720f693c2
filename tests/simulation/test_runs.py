"""Runs as they lie on disk: curves over seeds, tables, pictures; compared with figures made by hand."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from federation.errors import DataError
from simulation.run_plots import plot_curves, plot_layers
from simulation.run_table import markdown, summarise
from simulation.runs import Group, group_runs, read_run


def write(folder: Path, rows: list[dict[str, Any]], run: Any = None, ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + ending)
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))
    return folder


def scored(*accuracies: float | None, **more: Any) -> list[dict[str, Any]]:
    return [
        {"round": number, "steps": 10, "bytes_up": 1_000_000, "bytes_down": 2_000_000, "accuracy": value, **more}
        for number, value in enumerate(accuracies)
    ]


def job(name: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "job": {"rounds": 3, "simulate": {"seed": seed, "devices": 4}, **more}, "seeds": [seed]}


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
    assert len(run.rows) == 2 and run.skipped == 0 and run.name == tmp_path.name


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


def three(tmp_path: Path) -> Group:
    values = ([0.10, None, 0.30, 0.60], [0.20, 0.25, 0.20], [0.30, None, 0.70, 0.65])
    runs = [
        read_run(write(tmp_path / f"{seed}", scored(*accuracies, loss=1.0), job("m", seed)))
        for seed, accuracies in enumerate(values)
    ]
    (group,) = group_runs(runs)
    return group


def test_mean_and_band(tmp_path: Path):
    x, y, spread = three(tmp_path).curve("accuracy", "bytes")
    assert x.tolist() == [3e6, 9e6]  # round 1 was scored in one run only, round 3 is missing in one
    assert y.tolist() == pytest.approx([0.2, 0.4])
    assert spread.tolist() == pytest.approx([statistics.stdev([0.1, 0.2, 0.3]), statistics.stdev([0.3, 0.2, 0.7])])
    alone = Group("alone", three(tmp_path).runs[:1]).curve("accuracy", "rounds")
    assert alone[0].tolist() == [1, 3, 4] and alone[2].tolist() == [0, 0, 0]


def test_the_table_by_hand(tmp_path: Path):
    line = summarise(three(tmp_path), target=0.6)
    assert line.final.mean == pytest.approx((0.60 + 0.20 + 0.65) / 3)
    assert line.final.deviation == pytest.approx(statistics.stdev([0.60, 0.20, 0.65]))
    assert line.best.mean == pytest.approx((0.60 + 0.25 + 0.70) / 3)
    assert (line.runs, line.rounds, line.reached) == (3, 4, 2)
    assert (line.rounds_to_target.mean, line.bytes_to_target.mean) == (3.5, 10.5e6)  # 4 and 3 rounds
    assert markdown([line], 0.6).splitlines() == [
        "| run | seeds | rounds | final accuracy % | best % | MB | rounds to 60 % | MB to 60 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| m | 3 | 4 | 48.33 ± 24.66 | 51.67 ± 23.63 | 11.00 ± 1.73 | 3.5 ± 0.7 (2 of 3) | 10.50 ± 2.12 |",
    ]


def test_a_table_of_runs_that_say_little(tmp_path: Path):
    (group,) = group_runs([read_run(write(tmp_path, [{"round": 0, "loss": 1}], {"name": "a|b"}))])
    assert markdown([summarise(group)]).splitlines()[-1] == "| a\\|b | 1 | 1 | – | – | – |"


LAYERS = [
    {"round": 0, "per_layer": {"svcca": {"in": 1.0, "out": 0.8}, "discrepancy": {"in": 1e-6, "out": 1e-2}}},
    {"round": 1},
    {"round": 2, "per_layer": {"svcca": {"in": 0.9, "middle": None}, "interval": {"in": 10, "out": 20}}},
    {"round": 3, "per_layer": None},
]


def test_values_by_layer(tmp_path: Path):
    run = read_run(write(tmp_path, LAYERS))
    assert run.layers("svcca") == ["in", "out", "middle"] and run.layers("interval") == ["in", "out"]
    found = run.by_layer("svcca", ["in", "out"])
    assert found[:, 0].tolist() == [1.0, 0.8] and found[0, 2] == 0.9 and np.isnan(found[1, 1:]).all()
    assert run.values("svcca")[[0, 2]].tolist() == [0.9, 0.9] and np.isnan(run.values("svcca")[[1, 3]]).all()


def test_pictures(tmp_path: Path):
    group = three(tmp_path / "runs")
    layered = read_run(write(tmp_path / "layered", LAYERS))
    many = [Group(f"method {number}", group.runs) for number in range(10)]
    plot_curves([group], "rounds", "accuracy", tmp_path / "one.png", target=0.5)
    plot_curves(many, "bytes", "accuracy", tmp_path / "many.png")
    plot_curves([Group("l", [layered])], "rounds", "discrepancy", tmp_path / "point.png")
    for y in ("discrepancy", "svcca", "interval"):
        plot_layers(layered, y, "rounds", tmp_path / f"{y}.png")
    for picture in tmp_path.glob("*.png"):
        with Image.open(picture) as image:
            assert len(image.convert("RGB").getcolors(1 << 22)) > 20  # something is drawn
    with Image.open(tmp_path / "one.png") as image:
        assert (0x00, 0x72, 0xB2) in {colour for _, colour in image.convert("RGB").getcolors(1 << 22)}


def test_what_cannot_be_drawn(tmp_path: Path):
    run = read_run(write(tmp_path, [{"round": 0, "accuracy": None, "per_layer": {"svcca": {"in": None}}}]))
    with pytest.raises(DataError, match="no run has values of accuracy to draw"):
        plot_curves([Group("x", [run])], "rounds", "accuracy", tmp_path / "x.png")
    with pytest.raises(DataError, match=r"no line has per_layer\.interval to draw; 'embrace simulate --layers-every"):
        plot_layers(run, "interval", "rounds", tmp_path / "x.png")
    with pytest.raises(DataError, match="no finite values"):
        plot_layers(run, "svcca", "rounds", tmp_path / "x.png")
    with pytest.raises(DataError, match="no line has steps, expected it for --x steps"):
        run.progress("steps")
