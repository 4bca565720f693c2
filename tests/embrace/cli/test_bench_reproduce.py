"""`embrace bench reproduce`: what it keeps of earlier commands, and what it does when time runs out."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from tests.embrace.cli.conftest import run


def test_rows_whose_runs_lie_elsewhere_stay_and_time_that_is_over_leaves_no_picture(tmp_path):
    options = ("bench", "reproduce", "svcca", "--scale", "smoke", "--seeds", 1, "--jobs", 1, "--out", tmp_path)
    assert run(*options, "--rows", "alone", "--runs", tmp_path / "here").code == 0
    stored = tmp_path / "reproduce-svcca-smoke.json"
    before = json.loads(stored.read_text())["rows"][0]
    (tmp_path / "reproduce-svcca-smoke.png").unlink()
    answer = run(*options, "--hours", 0, "--runs", tmp_path / "there")  # as on a fresh clone
    assert answer.code == 0 and ".png" not in answer.out
    assert json.loads(stored.read_text())["rows"][0] == before
    assert not (tmp_path / "reproduce-svcca-smoke.png").exists()


def test_time_that_is_over_in_the_trials_is_said_in_one_line(tmp_path):
    answer = run(
        "bench", "reproduce", "domo", "--jobs", 1, "--hours", 0, "--out", tmp_path, "--runs", tmp_path / "runs"
    )
    assert answer.code == 1 and "time ran out while rates were tried" in answer.error
