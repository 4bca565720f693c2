"""What people see of a job whose algorithm synchronises in parts and has state on the server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.embrace.cli.conftest import run
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, job_text, read_weights


def test_show_and_export(write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    job = fleet.admin.create(write_job(job_text("fedlama", 5, "[serve]\nrule = 'adam'\n", steps=3)))
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    server = str(fleet.admin._http.base_url)
    login = ("--server", server, "--token", fleet.admin._http.headers["Authorization"].removeprefix("Bearer "))
    told = json.loads(run("job", "show", job, *login, "--json").out)["rounds"]
    names = list(told[0]["summary"]["trainers"])
    assert [len(row["summary"]["synchronised"]) for row in told[:2]] == [len(names)] * 2  # to begin with
    intervals = told[1]["summary"]["facts"]["sync"]["intervals"]
    rare = [name for name, rounds in zip(names, intervals) if rounds > 1]
    assert rare and set(told[2]["summary"]["synchronised"]) == set(names) - set(rare)
    shown = run("job", "show", job, *login).out
    assert "parts averaged" in shown and f"{len(names) - len(rare)} of {len(names)}" in shown
    answer = run("job", "export", job, "--out", tmp_path / "trained", "--bundle", fleet.bundle, *login)
    assert answer.code == 0, answer.err
    np.testing.assert_array_equal(
        read_weights(fleet.bundle, tmp_path / "trained" / "weights.safetensors"), fleet.weights(job)
    )
