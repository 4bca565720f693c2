"""Peak memory of real agents: processes of `embrace agent`, one after the other, that train for a real coordinator.

An agent holds more than a training step: received weights, the update, a connection; and it runs its frozen layers as
it sees fit. Its report says what its process had at most on top of the idle one, over a whole task.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bench.device.subject import Progress
from bench.fleet import STARTS, wait_for
from edge_runtime.bundle_files import read_manifest
from edge_runtime.measure import Case, random_inputs, random_labels_of
from embrace.client import Client
from embrace.demo.processes import COORDINATOR, Processes, served_at
from federation.errors import EmbraceError

TASKS, STEPS, BATCHES = 2, 3, 4  # of each agent; batches are what its data has
LIMIT = 600.0  # seconds for an agent
NEEDS = "agents are not measured: that needs embrace-fl[coordinator]"


class Agents:
    """Agents that train for a coordinator, one after the other."""

    def __init__(self, folder: Path, processes: Processes, url: str, admin: Client) -> None:
        self._folder = folder
        self._processes = processes
        self._url = url
        self._admin = admin
        self._count = 0

    def peak(self, case: Case) -> dict[str, int]:
        """Let an agent train from a boundary; return bytes on top of the idle process, of its largest task."""
        self._count += 1
        name = f"agent-{self._count}"
        bundle, data = Path(case.bundle), self._folder / f"{name}.npz"
        manifest, count = read_manifest(bundle), BATCHES * case.batch
        x = random_inputs(manifest.input, count, manifest.vocabulary)
        np.savez(data, x=x, y=random_labels_of(manifest, count))
        local = {"steps": STEPS, "batch": case.batch, "rate": "0.001", "rules": [{"rule": "momentum", "factor": 0.9}]}
        plan = {"bundle": manifest.name, "num_rounds": TASKS, "local": local}
        sent = self._admin.send_bundle(bundle)
        self._admin.call("POST", "/jobs", json={"bundle": sent, "plan": plan})
        token = self._admin.call("POST", "/enrolments", json={"uses": 1, "seconds": 3600})["token"]
        told = ["--server", self._url, "--data", str(data), "--work", str(self._folder / name), "--name", name]
        told += [
            "--boundary",
            case.boundary,
            "--engine",
            case.engine,
            "--threads",
            str(case.threads),
            "--frozen",
            case.frozen,
        ]
        told += ["--tasks", str(TASKS), "--json"]
        process = self._processes.start(name, "agent", *told, EMBRACE_TOKEN=token)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise EmbraceError(f"it took more than {LIMIT:.0f} s") from None
        if process.returncode:
            raise EmbraceError(self._processes.ended(name))
        reports = [json.loads(line)["memory"] for line in self._processes.output(name).read_text().splitlines()]
        return max(reports, key=lambda memory: int(memory.get("anonymous", 0)), default={})


def measure_agents(
    cases: Sequence[Case], wanted: bool, notes: list[str], progress: Progress
) -> list[dict[str, int] | None]:
    """Measure an agent for each case; None, and a note, where there is none."""
    if not wanted or not cases or find_spec("fastapi") is None:
        notes += [NEEDS] if wanted and cases else []
        return [None] * len(cases)
    found: list[dict[str, int] | None] = []
    with tempfile.TemporaryDirectory(prefix="embrace-agents-") as folder, Processes(Path(folder)) as processes:
        data = Path(folder) / COORDINATOR
        processes.start(COORDINATOR, "serve", "--data", str(data), "--port", "0", "--devices", "0")
        url = wait_for(lambda: served_at(processes.output(COORDINATOR)), STARTS, "the coordinator did not start")
        with Client(url, (data / "admin.token").read_text().strip()) as admin:
            agents = Agents(Path(folder), processes, url, admin)
            for done, case in enumerate(cases):
                progress(f"an agent from {case.boundary}, {case.engine}", done, len(cases))
                try:
                    found.append(agents.peak(case) or None)
                except EmbraceError as error:
                    found.append(None)
                    notes.append(f"an agent from {case.boundary}, {case.engine}: not measured, {error}")
    return found
