"""What fits is decided by trial steps, and both sides agree: the agent against a real coordinator.

The trials' numbers are made up here, because this process has the memory of all tests before it; real ones are in
tests/end_to_end/test_memory_budget.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import trial
from edge_runtime.agent import Agent, Device
from edge_runtime.client import DeviceClient
from edge_runtime.memory import current_memory
from edge_runtime.trial import Trial
from federation.axes.cover import OutputSide
from federation.errors import InputError, OutOfMemory
from federation.messages import Report
from tests.edge_runtime.conftest import failures

MB = 1_000_000
NEEDS = {"conv1": 60 * MB, "conv2": 45 * MB, "conv3": 20 * MB, "dense": 6 * MB, "classifier": 2 * MB}
needs_proc = pytest.mark.skipif(current_memory() is None, reason="the system does not say what a process takes")
pytestmark = needs_proc


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials that take ten times what is predicted, and the names of those that were made."""
    made: list[str] = []

    def attempt(told: trial.Conditions, boundary: object, engine: str, place: Path | None = None) -> Trial:
        name = boundary.name  # type: ignore[attr-defined]
        made.append(name)
        if NEEDS[name] > NEEDS["conv2"]:  # passes any limit here
            raise OutOfMemory("ended")
        return Trial(NEEDS[name], 0.4, 0.1)

    monkeypatch.setattr(trial, "attempt", attempt)
    return made


def budget(room: int) -> str:
    """A budget that leaves about so much beside this process."""
    now = current_memory()
    assert now is not None
    return str(now.anonymous + room)


def run(agent: Agent, tasks: int) -> list[Report]:
    reports: list[Report] = []
    agent.on_report = reports.append
    assert agent.run(most_tasks=tasks, wait=5.0) == tasks
    return reports


def test_a_task_that_does_not_fit_goes_back_and_the_next_one_fits(
    site,
    make_job: Callable[..., str],
    connect,
    data: Path,
    tmp_path: Path,
    tries: list[str],
) -> None:
    job = make_job(num_rounds=3, bounds={"offer": 600.0})  # the seat comes back at once, to the same device
    device, token = site.enrol()
    agent = Agent(connect(DeviceClient, token), Device(str(data), tmp_path / "work", memory=budget(30 * MB)))
    agent.client.set_profile(agent.memory.describe())
    reports = run(agent, 3)
    assert [report.boundary for report in reports] == ["conv3"] * 3
    (told,) = failures(site, job)
    assert told["reason"] == "too_large"
    assert "training from 'conv1' needs" in told["message"] and "'conv3' would fit" in told["message"]
    assert sorted(tries) == sorted(set(tries)), "each is tried once"
    known = agent.memory.profile
    with site.server.coordinator.repository.reading() as session:
        assert site.server.coordinator.repository.profiles(session, [device]) == ({device: known}, {})
    manifest = next(iter(agent._loaded.values())).bundle.manifest
    assert OutputSide().cover(manifest, known, 16) == "conv3"
    assert reports[0].memory["allowed"] == int(agent.device.memory or 0)
    assert reports[0].memory["process"] > reports[0].memory["anonymous"]


def test_a_device_that_was_here_before_tries_nothing_and_is_given_what_fits_at_once(
    site,
    make_job: Callable[..., str],
    connect,
    data: Path,
    tmp_path: Path,
    tries: list[str],
) -> None:
    make_job(num_rounds=1)
    client = connect(DeviceClient, site.enrol()[1])
    first = Agent(client, Device(str(data), tmp_path / "work", memory=budget(30 * MB)))
    run(first, 1)
    job, before = make_job(num_rounds=1), len(tries)
    again = Agent(client, Device(str(data), tmp_path / "work", memory=budget(30 * MB)))
    assert {need.bytes for need in again.memory.profile.needs} >= {NEEDS["conv3"]}
    again.client.set_profile(again.memory.describe())
    assert [report.boundary for report in run(again, 1)] == ["conv3"]
    assert failures(site, job) == []
    assert set(tries[before:]) <= {"conv1", "conv2"}, "what passed the limit has no number to remember"


def test_a_fixed_boundary_that_does_not_fit_is_refused_in_one_line_and_not_offered_again(
    site,
    make_job: Callable[..., str],
    connect,
    data: Path,
    tmp_path: Path,
    tries: list[str],
    caplog,
) -> None:
    job = make_job(num_rounds=1)
    device = Device(str(data), tmp_path / "work", memory=budget(30 * MB), boundary="conv2")
    agent = Agent(connect(DeviceClient, site.enrol()[1]), device)
    agent.client.set_profile(agent.memory.describe())
    asked = iter([False, False, False, True])
    assert agent.run(wait=0.1, until=lambda: next(asked)) == 0
    (told,) = failures(site, job)
    assert told["reason"] == "too_large" and told["message"].endswith("--boundary conv3")
    unfit = [line for line in caplog.messages if line.startswith("no job can use this device")]
    assert len(unfit) == 1 and "training from 'conv2' needs 45 MB" in unfit[0]
    assert tries == ["conv2"]


def test_a_fixed_boundary_that_fits_is_trained(
    site,
    make_job: Callable[..., str],
    connect,
    data: Path,
    tmp_path: Path,
    tries: list[str],
) -> None:
    make_job(num_rounds=1)
    device = Device(str(data), tmp_path / "work", memory=budget(30 * MB), boundary="dense")
    agent = Agent(connect(DeviceClient, site.enrol()[1]), device)
    agent.client.set_profile(agent.memory.describe())
    assert [report.boundary for report in run(agent, 1)] == ["dense"]
    assert tries == ["dense"]


def test_with_plenty_of_memory_nothing_is_tried(
    site,
    make_job: Callable[..., str],
    connect,
    data: Path,
    tmp_path: Path,
    tries: list[str],
) -> None:
    make_job(num_rounds=1)
    agent = Agent(connect(DeviceClient, site.enrol()[1]), Device(str(data), tmp_path / "work"))
    (report,) = run(agent, 1)
    assert (report.boundary, tries) == ("conv1", [])
    assert "allowed" not in report.memory and report.memory["process"] > 0


def test_budgets_that_cannot_be_are_refused_before_joining(tmp_path: Path) -> None:
    arrays = np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
    told = {"token": "embrace_enrol_x", "work": tmp_path}
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(InputError, match=r"64 bytes\? write 64MB"):
        Agent.join(nowhere, arrays, memory="64", **told)
    with pytest.raises(OutOfMemory, match=r"1\.0 MB allowed, the idle process takes"):
        Agent.join(nowhere, arrays, memory="1MB", **told)
    with pytest.raises(InputError, match="tier and boundary both say"):
        replace(Device(arrays, tmp_path, tier="weak"), boundary="conv1")
