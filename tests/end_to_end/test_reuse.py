"""Stored activations that real agents use again: as long as the frozen layers have changed little, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from simulation.fleet import open_fleet, read_job
from tests.edge_runtime.conftest import relative
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, at_work, enrol, job_text, simulate
from tests.live_server import live_server


def run(fleet: Fleet, file: Path) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The weights of a job, and what is told of its rounds, the first one first."""
    job = fleet.admin.create(file)
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    return fleet.weights(job), [line["summary"] for line in fleet.admin.rounds(job)]


def test_agents_and_simulation_follow_the_same_bound(fleet: Fleet, write_job: WriteJob, tmp_path: Path) -> None:
    text = job_text("embracing", 5, steps=3, refresh_every=4, refresh_change=1e5)
    always = simulate(write_job(text), tmp_path / "always").lines
    bound = 1.01 * max(line["changes"]["conv1"] for line in always)
    file = write_job(text.replace("100000.0", repr(bound)))
    expected = simulate(file, tmp_path / "run")
    found, rounds = run(fleet, file)
    assert relative(found, expected.weights) < 1e-5
    assert [line["reused"] for line in rounds] == [line["reused"] for line in expected.lines]
    assert 0 < sum(line["reused"] for line in rounds) < sum(line["reused"] for line in always)
    for line, simulated in zip(rounds, expected.lines):
        assert line["changes"].keys() == simulated["changes"].keys()
        assert np.allclose(list(line["changes"].values()), list(simulated["changes"].values()), rtol=1e-3)


def test_layers_that_no_device_trains_are_run_and_fetched_once(write_job: WriteJob, tmp_path: Path) -> None:
    text = job_text("embracing", 4, epochs=1).replace("strong = 2, moderate = 2, weak = 1", "weak = 5")
    file = write_job(text)
    simulated = open_fleet(*read_job(file))
    with live_server(tmp_path / "server", requests_per_second=10_000) as server:
        tokens = enrol(server.url, server.enrolment, simulated)
        with at_work(Fleet(server.url, server.admin, tokens, simulated, tmp_path / "fleet")) as fleet:
            found, rounds = run(fleet, file)
            reports = [report for device in fleet.devices.values() for report in device.reports]
    assert relative(found, simulate(file, tmp_path / "run").weights) < 1e-5
    assert [line["changes"]["conv1"] for line in rounds] == [0.0] * 4
    # The first round stores what its batches take, the second one all samples, if those were not all.
    assert [line["reused"] for line in rounds][2:] == [5, 5]
    later = [report for report in reports if report.activations_age]
    assert later and all(report.seconds["forward"] == {} for report in later)
    most = {report.round: report.bytes["downloaded"] for report in reports}
    assert max(report.bytes["downloaded"] for report in later) < most[0]
