"""A bundle with narrow boundaries, exported once, and a fleet that works for a whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from simulation.fleet import open_fleet, read_job
from tests.end_to_end.fleet import Fleet, at_work, enrol, job_text
from tests.live_server import live_server

WriteJob = Callable[[str], Path]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle `digits`, for job files beside it."""
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    folder = tmp_path_factory.mktemp("home")
    export_bundle(load_source("digits"), folder / "digits", Choices(widths=(0.45, 0.2), engines=("portable",)))
    return folder


@pytest.fixture(scope="session")
def write_job(home: Path) -> WriteJob:
    """A job file beside the bundle."""

    def write(text: str) -> Path:
        file = home / f"{len(list(home.glob('*.toml')))}.toml"
        file.write_text(text)
        return file

    return write


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob) -> Iterator[Fleet]:
    """`embrace serve` and five agents, which work from job to job."""
    folder = tmp_path_factory.mktemp("fleet")
    simulated = open_fleet(*read_job(write_job(job_text("fedavg"))))
    with live_server(folder / "server", requests_per_second=10_000) as server:
        tokens = enrol(server.url, server.enrolment, simulated)
        with at_work(Fleet(server.url, server.admin, tokens, simulated, folder)) as found:
            yield found
