"""Tables of the papers at the smallest scale: whether they run, go on, and say what they should."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from bench.papers import TABLES
from bench.papers.central import accuracy, train
from bench.papers.editions import CHANGES, EDITION, edition_of, missed
from bench.papers.logs import Logs
from bench.papers.measures import best_accuracy, final_accuracy, mebibytes_per_worker_to, rounds_to, swing
from bench.papers.page import PAGE, RESULTS, filled
from bench.papers.picture import draw
from bench.papers.report import judged, markdown, means, read_report, report, was_run
from bench.papers.runner import Workplace, reproduce
from bench.papers.table import Claim, Column, PaperRow, Setting, Table, above
from federation.errors import EmbraceError, InputError
from federation.job import plan_from
from model_export.zoo import zoo_model
from simulation.datasets import load_dataset
from simulation.partitioners import make_partitioner
from simulation.runs import WEIGHTS, Run

JOB = {
    "algorithm": "fedavg",
    "num_rounds": 3,
    "participate": {"count": 4},
    "local": {"steps": 5, "batch": 16, "rate": "0.1"},
    "simulate": {"devices": 8, "samples": 400, "test_samples": 200},
}


def run_of(tmp_path, accuracies, up=10.0):
    rows = [
        {"round": number, "accuracy": value, "bytes_up": up, "bytes_down": up, "devices": 2, "seconds": 1.0}
        for number, value in enumerate(accuracies)
    ]
    return Run("run", rows, path=tmp_path)


def test_measures_of_a_run(tmp_path):
    run = run_of(tmp_path, [0.1, 0.5, 0.96, 0.9, 0.93], up=1 << 20)
    assert best_accuracy(run) == pytest.approx(96)
    assert final_accuracy(run) == pytest.approx(93)
    assert swing(run) == pytest.approx((6 + 3) / 2)
    assert rounds_to(0.95)(run) == 3 and rounds_to(0.97)(run) is None
    assert mebibytes_per_worker_to(0.95)(run) == pytest.approx(3)  # three rounds of one up and one down, two workers


def one_row_table(rates=(), job=JOB, **other):
    rows = [PaperRow("here", "digits", job, {"accuracy %": 80.45}, **other), PaperRow("there", "digits", job, **other)]
    setting = Setting("in words", rows, rates, 0.5)
    columns = (Column("accuracy %", final_accuracy), Column("cost %", lambda run: 10.0, relative=True))
    return Table(
        "one",
        "a paper",
        "a claim",
        {"short": lambda: setting},
        columns,
        (
            Claim("rows that are equal are equal", lambda found: found["here"] == found["there"]),
            Claim("nobody is there", above("accuracy %", ["nobody"], ["here"])),
        ),
    )


def test_rows_with_equal_jobs_share_their_runs_and_what_is_done_is_not_done_again(tmp_path):
    found = reproduce(one_row_table(), "short", 2, Workplace(tmp_path))
    folders = sorted(path.name for path in tmp_path.glob("fedavg-*"))
    assert len(folders) == 2 and [name[-5:] for name in folders].count("seed1") == 1
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    again = reproduce(one_row_table(), "short", 2, Workplace(tmp_path))
    assert means(again) == means(found)
    data = report(found)
    assert [claim["verdict"] for claim in data["claims"]] == ["held", "not tested at this scale"]
    assert data["rows"][0]["figures"]["cost %"]["mean"] == 100
    assert json.loads(json.dumps(data)) == data
    text = markdown(data, found.table.columns)
    assert "80.45" in text and "**held**" in text
    assert {path: path.read_text().count("\n") for path in before} == dict.fromkeys(before, 3)
    assert draw(found, tmp_path, "picture") == [tmp_path / "picture.png"]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_some_rows_are_run_alone_and_the_report_says_what_is_missing(tmp_path):
    other = {**JOB, "num_rounds": 2}
    rows = [PaperRow("first", "digits", JOB), PaperRow("second", "digits", other)]
    table = replace(one_row_table(), settings={"short": lambda: Setting("in words", rows)}, claims=())
    found = reproduce(table, "short", 1, Workplace(tmp_path), only=["second"])
    assert [len(result.runs) for result in found.rows] == [0, 1]
    text = markdown(report(found), table.columns)
    assert "**1 of 2 rows were run**" in text and "| second |" in text and "| first |" not in text
    assert report(found)["rows"][1]["figures"]["cost %"]["mean"] is None  # a share of the first row's
    draw(found, tmp_path, "picture")
    folder = reproduce(table, "short", 1, Workplace(tmp_path), only=["first"]).rows[0].runs[0].path
    assert [len(result.runs) for result in reproduce(table, "short", 1, Workplace(tmp_path)).rows] == [1, 1]
    (folder / WEIGHTS).unlink()  # as a run that was interrupted
    found = reproduce(table, "short", 1, Workplace(tmp_path), only=["second"])
    left = json.loads(json.dumps(report(found)))
    assert "first is at round 3 of 3, best accuracy so far" in markdown(left, table.columns)
    begun_anew = [replace(rows[0], job={**JOB, "num_rounds": 4}), rows[1]]
    today = replace(table, settings={"short": lambda: Setting("in words", begun_anew)})
    assert "is at round" not in markdown(judged(left, today), table.columns)
    with pytest.raises(InputError, match="--rows: no row has 'fourth'; expected one of first; second"):
        reproduce(table, "short", 1, Workplace(tmp_path), only=["fourth"])


def test_a_stored_row_lacks_the_figures_of_a_column_that_is_new(tmp_path):
    rows = [PaperRow(name, "digits", {**JOB, "num_rounds": n}) for n, name in ((1, "first"), (2, "second"))]
    narrow, wide = one_row_table().columns[:1], (*one_row_table().columns[:1], Column("new %", lambda run: 5.0))
    table = replace(one_row_table(), settings={"short": lambda: Setting("in words", rows)}, claims=(), columns=narrow)
    stored = report(reproduce(table, "short", 1, Workplace(tmp_path / "here"), only=["second"]))
    today = replace(table, columns=wide)
    data = report(reproduce(today, "short", 1, Workplace(tmp_path / "elsewhere"), only=["first"]), stored)
    assert [row["figures"]["new %"]["mean"] for row in data["rows"]] == [5.0, None]
    assert "**" not in markdown(data, wide) and markdown(data, wide).count("| 5.00 |") == 1


def test_a_whole_label_asks_for_its_row_alone(tmp_path):
    rows = [
        PaperRow(name, "digits", {**JOB, "num_rounds": rounds})
        for rounds, name in ((1, "first"), (2, "the first of many"))
    ]
    table = replace(one_row_table(), settings={"short": lambda: Setting("in words", rows)}, claims=())
    for text, found in (("first", [1, 0]), ("the first", [1, 1])):
        place = Workplace(tmp_path)
        assert [len(result.runs) for result in reproduce(table, "short", 1, place, only=[text]).rows] == found


@pytest.mark.parametrize("text", ["", '{"rows": [{"label": "fi', '{"rows": null}', '{"rows": [{"label": 1}]}', "[]"])
def test_a_report_that_is_not_whole_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "reproduce-domo-short.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not a whole report of earlier rows; restore it, or remove it") as refused:
        read_report(path)
    assert "\n" not in str(refused.value)
    assert read_report(RESULTS / path.name)["table"] == "domo"


def test_rows_of_a_stored_report_and_logged_runs_need_no_runs(tmp_path):
    rows = [PaperRow(name, "digits", {**JOB, "num_rounds": n}) for n, name in ((1, "first"), (2, "second"))]
    table = replace(one_row_table(), settings={"short": lambda: Setting("in words", rows)}, claims=())
    logs = Logs(tmp_path / "logs")
    alone = reproduce(table, "short", 1, Workplace(tmp_path / "here", logs=logs), only=["first"])
    there = Workplace(tmp_path / "there", logs=logs)  # another machine, that has the logs
    both = reproduce(table, "short", 1, there)
    assert both.rows[0].runs[0].rounds == alone.rows[0].runs[0].rounds and both.rows[0].rate == "0.1"
    assert len(list((tmp_path / "there").glob("fedavg-*"))) == 1 and len(both.rows[1].runs[0].rounds) == 2
    stored = json.loads(json.dumps(report(alone)))
    bare = reproduce(table, "short", 1, Workplace(tmp_path / "there"), only=["second"])
    merged = report(bare, stored)
    assert merged["rows"][0] == stored["rows"][0] and merged["rows"][1]["seconds"] > 0
    assert "rows were run" not in markdown(merged, table.columns)
    first = table.setting("short").rows[0]
    other = replace(first, job={**first.job, "num_rounds": 3})  # a row that is another now
    assert logs.read(other, 0) is None and logs.read(first, 0) is not None
    changed = replace(bare, rows=[replace(bare.rows[0], row=other), bare.rows[1]])
    assert not was_run(report(changed, stored)["rows"][0])


def test_the_row_with_more_seeds_stays_and_of_equals_the_new_one(tmp_path):
    rows = [PaperRow(name, "digits", {**JOB, "num_rounds": n}) for n, name in ((1, "first"), (2, "second"))]
    table = replace(one_row_table(), settings={"short": lambda: Setting("in words", rows)}, claims=())
    stored = json.loads(json.dumps(report(reproduce(table, "short", 2, Workplace(tmp_path), only=["first"]))))
    fewer = reproduce(table, "short", 1, Workplace(tmp_path))
    merged = report(fewer, stored)
    assert merged["rows"][0] == stored["rows"][0] and merged["seeds"] == [0, 1]
    assert "(1 of 2)" in markdown(merged, table.columns)
    stored["rows"][0]["figures"]["accuracy %"]["mean"] = 0.0
    again = report(reproduce(table, "short", 2, Workplace(tmp_path)), stored)
    assert again["rows"][0]["figures"]["accuracy %"]["mean"] > 0


def test_what_is_published_is_what_the_table_says_today():
    stored = json.loads((RESULTS / "reproduce-partial-averaging-short.json").read_text())
    row = judged(stored, TABLES["partial-averaging"])["rows"][0]
    published = {name: figure["published"] for name, figure in row["figures"].items() if figure["published"]}
    assert published == {"accuracy at the end %": 92.33}  # its authors report the final accuracy


def test_embracing_is_judged_by_the_best_accuracy_as_in_the_papers_table():
    final, best = "accuracy at the end %", "best accuracy %"
    measured = {
        "EmbracingFL, 128/0/0": {final: 90.0, best: 80.0},
        "EmbracingFL, 16/0/112": {final: 60.0, best: 77.0},
        "width reduction, 16/0/112": {final: 70.0, best: 54.0},
    }
    assert all(claim.test(measured) for claim in TABLES["embracing-cases"].claims if "FEMNIST" not in claim.text)


def test_a_run_that_is_left_goes_on_elsewhere(tmp_path, monkeypatch):
    rows = [PaperRow("row", "digits", {**JOB, "num_rounds": 3})]
    table = replace(one_row_table(), settings={"short": lambda: Setting("in words", rows)}, claims=())
    whole = reproduce(table, "short", 1, Workplace(tmp_path / "whole")).rows[0].runs[0]
    logs = Logs(tmp_path / "logs")
    with monkeypatch.context() as patched:
        patched.setattr("bench.papers.run_cell.time", SimpleNamespace(time=count().__next__))
        left = reproduce(table, "short", 1, Workplace(tmp_path / "here", logs=logs, until=0.5)).rows[0]
    assert not left.runs and len(left.begun[0].rounds) == 1
    on = reproduce(table, "short", 1, Workplace(tmp_path / "there", logs=logs)).rows[0]
    assert [line["accuracy"] for line in on.runs[0].rounds] == [line["accuracy"] for line in whole.rounds]
    assert on.runs[0].rounds[0]["seconds"] == left.begun[0].rounds[0]["seconds"]  # it was not done again
    assert not list(tmp_path.glob("logs/*/checkpoint")) and logs.read(table.setting("short").rows[0], 0)


def test_no_rate_is_chosen_while_trials_have_rounds_to_go(tmp_path):
    table = one_row_table(rates=("0.1", "0.2"))
    with pytest.raises(EmbraceError, match="time ran out while rates were tried; the same command goes on"):
        reproduce(table, "short", 1, Workplace(tmp_path, until=0.0))
    assert not list(tmp_path.glob("fedavg-*"))
    assert reproduce(table, "short", 1, Workplace(tmp_path)).rows[0].runs


def test_rows_run_alone_know_the_rates_that_an_earlier_command_tried(tmp_path):
    rows = [PaperRow(name, "digits", {**JOB, "num_rounds": n}) for n, name in ((3, "first"), (4, "second"))]
    setting = Setting("in words", rows, ("0.1", "0.2"), 0.5)
    table = replace(one_row_table(), settings={"short": lambda: setting}, claims=())
    first = reproduce(table, "short", 1, Workplace(tmp_path), only=["first"])
    assert set(first.rows[0].tried) == {"0.1", "0.2"} and not first.rows[1].tried
    both = reproduce(table, "short", 1, Workplace(tmp_path), only=["second"])
    assert [set(result.tried) for result in both.rows] == [{"0.1", "0.2"}] * 2
    assert [len(result.runs) for result in both.rows] == [1, 1]


def test_a_change_begins_the_runs_of_its_models_anew():
    assert edition_of("femnist_cnn@0.125") == edition_of("femnist_cnn") == 1 and edition_of("digits") == 0


def test_a_run_ends_at_its_target(tmp_path):
    whole = reproduce(one_row_table(), "short", 1, Workplace(tmp_path / "whole"))
    targeted = one_row_table(stop_at=0.001)
    part = reproduce(targeted, "short", 1, Workplace(tmp_path / "part"))
    assert len(part.rows[0].runs[0].rounds) == 1
    assert part.rows[0].runs[0].rounds[0]["accuracy"] == whole.rows[0].runs[0].rounds[0]["accuracy"]


def test_every_rate_is_tried_with_a_seed_that_does_not_count(tmp_path):
    found = reproduce(one_row_table(rates=("1e-6", "0.2")), "short", 1, Workplace(tmp_path))
    row = found.rows[0]
    assert set(row.tried) == {"1e-6", "0.2"} and row.rate == max(row.tried, key=row.tried.__getitem__)
    assert len(list(tmp_path.glob("fedavg-*-seed1000"))) == 2 and found.tuning_seconds > 0


@pytest.mark.parametrize(
    "why", [{"local": {**JOB["local"], "rate": "1e30"}}, {"bounds": {"max_value": 2**-20}}], ids=["loss", "refused"]
)
def test_a_run_that_diverges_is_said_to(why, tmp_path):
    job = {**JOB, **why}
    found = reproduce(one_row_table(job=job), "short", 1, Workplace(tmp_path))
    assert found.rows[0].failures and not found.rows[0].runs
    assert "| here | diverged |" in markdown(report(found), found.table.columns)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_jobs_of_every_scale_are_jobs(table):
    assert {"smoke", "short", "full"} <= set(table.settings)
    for scale in table.settings:
        setting = table.setting(scale)
        assert setting.note and setting.rows
        for row in setting.rows:
            plan = plan_from({**row.job, "bundle": row.model})
            make_partitioner(plan.simulate.get("partitioner", "iid"), plan.simulate.get("partition", {}))
            assert set(row.published) <= {column.name for column in table.columns}
    with pytest.raises(InputError, match=f"expected {', '.join(table.settings)}, got 'long'"):
        table.setting("long")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_table_runs_at_the_smallest_scale(table, tmp_path):
    found = reproduce(table, "smoke", 1, Workplace(tmp_path))
    assert all(result.runs and not result.failures for result in found.rows)
    data = report(found)
    assert markdown(data, table.columns).startswith(f"# {table.name}, smoke")
    assert len(draw(found, tmp_path, "picture")) == 1 + len(table.maps)


def test_the_page_says_what_the_stored_results_say():
    text = PAGE.read_text("utf-8")
    assert filled(text) == text


def test_every_result_is_on_the_page():
    stored = {file.stem.removeprefix("reproduce-") for file in RESULTS.glob("reproduce-*.json")}
    shown = {"-".join(found) for found in re.findall(r"<!-- results (\S+) (\S+) -->", PAGE.read_text("utf-8"))}
    assert stored and stored <= shown


def test_a_result_of_an_earlier_edition_says_what_it_lacks(tmp_path):
    found = report(reproduce(one_row_table(), "short", 1, Workplace(tmp_path)))
    assert found["edition"] == EDITION and "Run before a change" not in markdown(found, ())
    change = CHANGES[0]
    for table in TABLES:
        old = {**found, "table": table, "edition": 0}
        assert (change.what in markdown(old, ())) == (table in change.tables)
        assert missed(table, EDITION) == []
    assert {name for change in CHANGES for name in change.tables} <= set(TABLES)


def test_central_training_learns():
    torch.manual_seed(0)
    data, model = load_dataset("digits"), zoo_model("digits").build()
    before = accuracy(data, model)
    train(data, model, steps=100, batch=32, rate=0.05, momentum=0.9, seed=0)
    assert accuracy(data, model) > 0.8 > 0.3 > before
