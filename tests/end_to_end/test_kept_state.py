"""What devices keep between rounds: an agent that is killed around it, one that loses it, one that is replaced."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_runtime import state_file as state
from edge_runtime.device_state import KeptFiles
from federation.device_task import Kept
from federation.errors import EmbraceError
from federation.space import Vector
from simulation.fleet import SimulatedFleet, open_fleet, read_job
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from tests.coordinator.harness import ROOT, Files, Site, serving
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, at_work, enrol, job_text, read_weights, simulate

# Weights, momenta and control variates of its own.
BUSY = job_text(
    "scaffold",
    6,
    "[sync]\nrule = 'fedlama'\n",
    steps=2,
    rules="[{ rule = 'control_variate' }, { rule = 'momentum', factor = 0.5, between = 'keep' }]",
)
NAME = "device-0000"


@contextmanager
def fleet_at(site: Site, simulated: SimulatedFleet, folder: Path, without: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """All devices of a simulated fleet are enrolled; those that are named are not started."""
    tokens = enrol(site.url, site.server.registry.invite(len(simulated.devices), 600), simulated)
    fleet = Fleet(site.url, site.admin, tokens, simulated, folder)
    others = {name: fleet.devices.pop(name) for name in without}
    with at_work(fleet):
        fleet.devices |= others
        yield fleet


def tidy(site: Site, fleet: Fleet, job: str) -> None:
    """Nothing is left of a job that is over but its last two versions; of what devices kept, the last."""
    site.settle()
    assert not site.spool()
    last = fleet.job(job)["version"]
    assert {path.stem for path in Files(site.directory).version(job, 0).parent.iterdir()} == {str(last - 1), str(last)}
    for device in fleet.devices.values():
        assert len(list((device.agent.device.work / "kept" / job).glob("*"))) <= 1


# --- killed ----------------------------------------------------------------------------------------

POINTS = ("saved", "acknowledged")
_AGENT = """
import os, signal, sys
from edge_runtime.client import DeviceClient
from edge_runtime.device_state import KeptFiles
from tests.end_to_end.fleet import device_of, make_agent

url, token, folder, name, tier, point, times = sys.argv[1:]
done = 0

def reached(here):
    if here == point and done == int(times):
        os.kill(os.getpid(), signal.SIGKILL)

class Mortal(DeviceClient):
    def send_update(self, *given, **options):
        global done
        done += 1
        reached("saved")
        following = super().send_update(*given, **options)
        reached("sent")
        return following

clean = KeptFiles.acknowledged
KeptFiles.acknowledged = lambda self, task: (clean(self, task), reached("acknowledged"))
make_agent(url, token, device_of(folder, name, tier), Mortal).run(wait=1.0)
"""


def start_agent(
    fleet: Fleet, url: str, simulated: SimulatedFleet, point: str = "", times: int = 0
) -> subprocess.Popen[bytes]:
    """The first device as a process that kills itself at a point of its n-th task."""
    tier = simulated.devices[0].profile.tier or ""
    given = [url, fleet.tokens[NAME], str(fleet.folder), NAME, tier, point, str(times)]
    return subprocess.Popen([sys.executable, "-c", _AGENT, *given], cwd=ROOT)


@pytest.mark.parametrize("point", ["sent", *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS)])
def test_a_killed_agent_goes_on_with_what_counts(write_job: WriteJob, tmp_path: Path, point: str) -> None:
    file = write_job(BUSY)
    simulated = open_fleet(*read_job(file))
    expected = simulate(file, tmp_path / "run").weights
    with (
        serving(tmp_path / "served") as site,
        fleet_at(site, simulated, tmp_path / "devices", without=(NAME,)) as fleet,
    ):
        process = start_agent(fleet, site.url, simulated, point, times=3)
        try:
            job = fleet.admin.create(file)
            assert process.wait(120) == -signal.SIGKILL
            left = list((tmp_path / "devices" / NAME / "kept" / job).iterdir())
            assert len(left) == (1 if point == "acknowledged" else 2)
            process = start_agent(fleet, site.url, simulated)
            fleet.wait(lambda: fleet.job(job)["state"] == "done")
            found = fleet.weights(job)
            reports = fleet.admin.call("GET", f"/jobs/{job}/timings")
        finally:
            process.kill()
            process.wait()
        assert len(reports) == 30 and not any(report["lost_state"] for report in reports)
        tidy(site, fleet, job)
    assert (found == expected).all()


# --- lost ------------------------------------------------------------------------------------------


def test_a_device_that_lost_its_state_goes_on_from_the_servers_values(
    write_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(BUSY)
    simulated = open_fleet(*read_job(file))
    undisturbed = simulate(file, tmp_path / "undisturbed").weights
    with (
        serving(tmp_path / "served") as site,
        fleet_at(site, simulated, tmp_path / "devices", without=(NAME,)) as fleet,
    ):
        job = fleet.admin.create(file)
        forgetful = fleet.devices[NAME]
        assert forgetful.agent.run(most_tasks=3, wait=5.0) == 3
        shutil.rmtree(tmp_path / "devices" / NAME / "kept")
        forgetful.start()
        fleet.wait(lambda: fleet.job(job)["state"] == "done")
        found = fleet.weights(job)
        told = [row for row in fleet.admin.call("GET", f"/jobs/{job}/timings") if row["lost_state"]]
        rounds = fleet.admin.call("GET", f"/jobs/{job}/rounds")
        tidy(site, fleet, job)
    assert [(row["device"], row["round"]) for row in told] == [(simulated.devices[0].id, 3)]
    assert [row["summary"]["lost_state"] for row in rounds] == [0, 0, 0, 1, 0, 0]
    load = KeptFiles.load

    def forgotten(self: KeptFiles, task: str) -> Kept | None:
        return (
            None
            if self.folder.name == simulated.devices[0].id and task.startswith("simulated-2-")
            else load(self, task)
        )

    monkeypatch.setattr(KeptFiles, "load", forgotten)
    with pytest.raises(EmbraceError, match=r"round 4: 1 of \d+ devices lost what they had kept"):
        simulate(file, tmp_path / "refused")
    monkeypatch.setattr(Simulation, "_check_kept", lambda *_: None)  # a simulation that goes on as a fleet does
    assert (found == simulate(file, tmp_path / "run").weights).all()
    assert (found != undisturbed).any()


def test_a_full_disk_while_state_is_written(
    write_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is given back, what was kept before is good, and the device gets the task again."""
    file = write_job(BUSY + "[bounds]\noffer = 0.5\n")
    simulated = open_fleet(*read_job(file))
    expected = simulate(file, tmp_path / "run").weights
    written, fsync = [], os.fsync

    def full(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        written.extend([path.name] if path.name.endswith(".kept.new") and NAME in path.parts else [])
        if len(written) == 3 and path.name == written[-1]:
            written.append("no more")
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with serving(tmp_path / "served") as site, fleet_at(site, simulated, tmp_path / "devices") as fleet:
        monkeypatch.setattr(state.os, "fsync", full)
        job = fleet.admin.create(file)
        fleet.wait(lambda: fleet.job(job)["state"] == "done")
        found = fleet.weights(job)
        failed = [event["body"] for event in fleet.admin.watch(job) if event["kind"] == "TaskFailed"]
        tidy(site, fleet, job)
    assert [(body["device"], body["reason"]) for body in failed] == [(simulated.devices[0].id, "disk_full")]
    assert (found == expected).all()


# --- replaced --------------------------------------------------------------------------------------

FOUR = "[participate]\nquorum = 1.0\ncount = 4\nmin_available = 4\n"
REPLACED = {
    "FedLAMA": (job_text("fedlama", 6, f"[sync]\nrule = 'fedlama'\nfactor = 4\n{FOUR}", steps=2), 2),
    "rotating, local": (job_text("partial_averaging", 22, f"[sync]\nrule = 'rotating'\nparts = 2\n{FOUR}"), 5),
    "rotating, averaged": (
        job_text("partial_averaging", 22, f"[sync]\nrule = 'rotating'\nparts = 2\nredistribute = 'averaged'\n{FOUR}"),
        5,
    ),
}


def simulate_leaving(simulated: SimulatedFleet, folder: Path, device: str, after: int) -> Vector:
    """The simulation, without a device from a round on."""

    class Leaving(Simulation):
        def _round(self, pool: Any) -> dict[str, Any]:
            if self.server.state.number == after:
                del self.server.profiles[device]
            return super()._round(pool)

    Leaving(simulated, folder, Options("portable", 1, InlinePool, evaluate_every=0)).run()
    return read_weights(simulated.bundle, folder / "weights.safetensors")


@pytest.mark.parametrize("name", ["FedLAMA", *(pytest.param(n, marks=pytest.mark.slow) for n in list(REPLACED)[1:])])
def test_a_device_that_leaves_in_the_middle_of_a_window(write_job: WriteJob, tmp_path: Path, name: str) -> None:
    """Four of five take part; the fifth takes over the place of one that is shut out after some rounds."""
    text, after = REPLACED[name]
    file = write_job(text)
    simulated = open_fleet(*read_job(file))
    with (
        serving(tmp_path / "served") as site,
        fleet_at(site, simulated, tmp_path / "devices", without=(NAME,)) as fleet,
    ):
        job = fleet.admin.create(file)
        leaver = fleet.devices[NAME]
        assert leaver.agent.run(most_tasks=after, wait=5.0) == after
        fleet.admin.call("DELETE", f"/devices/{leaver.id}")
        fleet.wait(lambda: fleet.job(job)["state"] == "done")
        found = fleet.weights(job)
        seats = [(row["round"], row["device"]) for row in fleet.admin.call("GET", f"/jobs/{job}/timings")]
        tidy(site, fleet, job)
    mine = [number for number, device in seats if device == leaver.id]
    assert mine == list(range(after)) and len(seats) == 4 * simulated.plan.num_rounds
    assert (found == simulate_leaving(simulated, tmp_path / "run", leaver.id, after)).all()
    assert (found != simulate(file, tmp_path / "undisturbed").weights).any()


def test_nothing_is_left_of_a_job_that_is_over(write_job: WriteJob, tmp_path: Path) -> None:
    """Its last round ends a window, but hands nothing on; what devices kept of it goes when the next job begins."""
    some = "[participate]\nquorum = 1.0\ncount = 3\nmin_available = 5\n[sync]\nrule = 'rotating'\nparts = 1\n"
    file = write_job(job_text("partial_averaging", 10, some))
    simulated = open_fleet(*read_job(file))
    with serving(tmp_path / "served") as site, fleet_at(site, simulated, tmp_path / "devices") as fleet:
        first = fleet.admin.create(file)
        fleet.wait(lambda: fleet.job(first)["state"] == "done")
        tidy(site, fleet, first)
        kept = [device.agent.device.work / "kept" for device in fleet.devices.values()]
        assert sum((folder / first).is_dir() for folder in kept) >= 3
        second = fleet.admin.create(file)
        fleet.wait(lambda: fleet.job(second)["state"] == "done")
        tidy(site, fleet, second)
        active = {row["device"] for row in fleet.admin.call("GET", f"/jobs/{second}/timings")}
        for device, folder in zip(fleet.devices.values(), kept):
            assert {path.name for path in folder.glob("*")} == {second} or device.id not in active
