"""`embrace simulate` from the outside: a job file in, a run's folder and a table out."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.runs import read_run

JOB = """
bundle = "{bundle}"
name = "first"
num_rounds = 3
[local]
steps = 2
batch = 8
[simulate]
devices = 8
dataset = "digits"
samples = 200
test_samples = 100
tiers = {{ strong = 2, weak = 6 }}
"""


@pytest.fixture
def job(digits: Path, tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(bundle=digits))
    return file


def test_a_job_becomes_a_run(embrace, job: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = embrace("simulate", job, "--rounds", 2, "--devices", 4, "--workers", 2, "--link", "5,20,60")
    assert answer.code == 0, answer.err
    assert "2 rounds" in answer.out and "training loss" in answer.out and "next: embrace plot runs/first" in answer.out
    run = read_run(tmp_path / "runs" / "first")
    assert (len(run.rounds), run.rounds[0]["devices"], run.about["engine"]) == (2, 4, "torch")
    assert run.about["job"]["simulate"]["tiers"] == {"strong": 1, "weak": 3}
    assert run.rounds[0]["link_seconds"] > 0 and run.accuracy is not None and run.weights


def test_a_run_that_is_done_is_told_again(embrace, job: Path, tmp_path: Path):
    options = ("--out", tmp_path / "run", "--engine", "portable", "--workers", 1, "--evaluate-every", 0, "--json")
    first = embrace("simulate", job, *options)
    assert first.code == 0, first.err
    assert [record["round"] for record in first.json["rounds"]] == [0, 1, 2]
    assert embrace("simulate", job, *options).json == first.json
    assert "another run" in embrace("simulate", job, *options, "--seed", 1).error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine-pool", "threads"), "--engine-pool: expected local or ray, got 'threads'"),
        (("--engine", "tensorflow"), "engine: expected torch or portable, got 'tensorflow'"),
        (("--link", "fast"), "--link: expected UP,DOWN,ROUND_TRIP"),
        (("--dataset", "mnits"), "no data set named 'mnits'"),
        (("--workers", "5000"), "workers: expected a number from 1 to 1024"),
    ],
)
def test_what_cannot_be_simulated(embrace, job: Path, tmp_path: Path, options: tuple[str, ...], message: str):
    answer = embrace("simulate", job, "--out", tmp_path / "run", *options)
    assert answer.code == 2 and message in answer.error


def test_a_run_ends_early_as_the_jobs_evaluation_says(embrace, job: Path, tmp_path: Path):
    """With a rate of almost nothing no version is better than the first; and any loss is good enough."""
    text = job.read_text()
    options = ("--engine", "portable", "--workers", 1)
    job.write_text(text.replace("batch = 8", 'batch = 8\nrate = "1e-30"') + "[evaluate]\nstop_after = 1\n")
    answer = embrace("simulate", job, "--out", tmp_path / "run", *options)
    assert answer.code == 0 and "2 rounds" in answer.out, answer.err
    run = read_run(tmp_path / "run")
    assert run.stopped is not None and run.stopped in answer.out
    assert run.stopped.startswith("stopped early: accuracy has not been better than") and len(run.rounds) == 2
    again = embrace("simulate", job, "--out", tmp_path / "run", *options, "--json")
    assert [record["round"] for record in again.json["rounds"]] == [0, 1], "it stays as it ended"
    job.write_text(text + "[evaluate]\nmetric = 'mean_loss'\ntarget = 1000.0\n")
    assert embrace("simulate", job, "--out", tmp_path / "other", *options).code == 0
    run = read_run(tmp_path / "other")
    assert len(run.rounds) == 1 and "reached the target 1000" in str(run.stopped)
