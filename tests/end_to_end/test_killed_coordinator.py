"""kill -9 of the coordinator at every named point, under algorithms whose devices and server keep things.

The agents go on by themselves. What comes of it is compared with the simulation, which nobody disturbs.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from embrace.client import Client
from federation.space import Vector
from simulation.fleet import SimulatedFleet, open_fleet, read_job
from tests.coordinator.harness import Files, end_process, serving, start_server
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, at_work, enrol, job_text, simulate
from tests.waiting import PATIENCE

SOME = "[participate]\nquorum = 1.0\nmin_available = 5\ncount = 3\n"
JOBS = {
    "domo": job_text("domo", 4, steps=2),
    "scaffold": job_text("scaffold", 4, steps=2),
    "fedlama": job_text("fedlama", 4, "[serve]\nrule = 'adam'\n", steps=2),
    # The cohort changes after 20 rounds, and the bodies of the last one are handed on.
    "partial_averaging": job_text("partial_averaging", 22, SOME + "[sync]\nrule = 'rotating'\nparts = 2\n"),
}
UPDATES = {"domo": 5, "scaffold": 5, "fedlama": 5, "partial_averaging": 3}  # of a round
LATE = {"domo": 2, "scaffold": 2, "fedlama": 2, "partial_averaging": 20}  # the round in which it is killed
FOLDED = {"partial_averaging": 50}  # before that round; a device that does not train the part that is due has no block


@dataclass(frozen=True)
class Prepared:
    """A directory with enrolled devices and a job, before anything has happened; and what it leads to."""

    directory: Path
    simulated: SimulatedFleet
    job: str
    admin: str
    tokens: dict[str, str]
    expected: Vector


@pytest.fixture(scope="module")
def prepare(write_job: WriteJob, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    made: dict[str, Prepared] = {}

    def give(name: str) -> Prepared:
        if name not in made:
            folder, file = tmp_path_factory.mktemp(name), write_job(JOBS[name])
            simulated = open_fleet(*read_job(file))
            with serving(folder / "start") as site:
                known = site.server.registry
                tokens = enrol(site.url, known.invite(len(simulated.devices), 600), simulated)
                admin = Client(site.url, site.admin)
                job = admin.create(file)
                admin.close()
            expected = simulate(file, folder / "run").weights
            made[name] = Prepared(folder / "start", simulated, job, site.admin, tokens, expected)
        return made[name]

    return give


def points(name: str) -> list[tuple[str, str, int]]:
    updates, late = UPDATES[name], LATE[name]
    return [
        (name, "after-spool", late * updates + 1),
        (name, "after-record", late * updates + 2),
        (name, "after-record", late * updates),  # the last of a round
        (name, "mid-fold", FOLDED.get(name, late * updates) + 1),
        (name, "mid-commit", late),
        (name, "after-commit", late),
    ]


QUICK = [("domo", "mid-commit", 2), ("scaffold", "after-record", 10), ("fedlama", "after-commit", 2)]
QUICK += [("partial_averaging", "after-record", 62)]
REST = [pytest.param(*point, marks=pytest.mark.slow) for name in JOBS for point in points(name) if point not in QUICK]


@pytest.mark.parametrize(("name", "point", "times"), [*QUICK, *REST])
def test_killed_at_a_point(
    prepare: Callable[[str], Prepared], tmp_path: Path, name: str, point: str, times: int
) -> None:
    prepared = prepare(name)
    directory = Path(shutil.copytree(prepared.directory, tmp_path / "disturbed"))
    process, url = start_server(directory, point=point, times=times)
    try:
        with at_work(Fleet(url, prepared.admin, prepared.tokens, prepared.simulated, tmp_path / "devices")) as fleet:
            assert process.wait(PATIENCE) == -signal.SIGKILL
            end_process(process)
            process, again = start_server(directory, port=httpx.URL(url).port or 0)
            assert again == url
            fleet.wait(lambda: fleet.job(prepared.job)["state"] == "done")
            fleet.wait(lambda: not list((directory / "spool").iterdir()))
            found = fleet.weights(prepared.job)
            assert not any(report.lost_state for device in fleet.devices.values() for report in device.reports)
    finally:
        end_process(process)
    assert (found == prepared.expected).all()
    last = prepared.simulated.plan.num_rounds
    kept = {path.stem for path in Files(directory).version(prepared.job, 0).parent.iterdir()}
    assert kept == {str(last), str(last - 1)}
