"""A strong and a weak device train the demo's model: `embrace serve` and two `embrace agent`, over real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.bundle_files import map_weights, read_manifest
from embrace.client import Client
from embrace.jobs import Job
from federation.space import Vector
from tests.live_server import live_server
from tests.stock_python import ROOT

BUNDLE = ROOT / "embrace" / "demo" / "digits" / "model"
MANIFEST = read_manifest(BUNDLE)
TIERS = {"desk": "strong", "board": "weak"}
EMBRACE = (sys.executable, "-m", "embrace")  # how the command is called here
PATIENCE = 1800


def write_data(folder: Path) -> None:
    """Write DEVICE.npz for each device."""
    for number, name in enumerate(TIERS):
        rng = np.random.default_rng(number)
        x = rng.random((40, *MANIFEST.input.shape), np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=rng.integers(0, 10, 40))


def train(
    folder: Path,
    data: Path,
    rounds: int,
    agents: Mapping[str, Sequence[str | Path]],
    serve: Sequence[str] = EMBRACE,
    **plan: Any,
) -> tuple[Vector, dict[str, list[dict[str, Any]]]]:
    """Run a job with the commands of these agents; return the weights, and what each agent reported."""
    with live_server(folder, command=serve) as server, Client(server.url, server.admin) as client:
        # Every update counts, however slow its device is: an emulated one on a busy machine takes minutes.
        both = {"min_available": len(TIERS), "quorum": 1.0, "deadline": PATIENCE}
        patient = {"participate": both, "bounds": {"lease": PATIENCE, "offer": PATIENCE}}
        plan = {**patient, "local": {"steps": 3, "batch": 8}, **plan}
        job = client.create(Job(BUNDLE, num_rounds=rounds, **plan))
        running = {}
        for name, command in agents.items():
            told = ["agent", "--server", server.url, "--name", name, "--data", data / f"{name}.npz"]
            told += [
                "--tier",
                TIERS[name],
                "--work",
                folder / name,
                "--engine",
                "portable",
                "--tasks",
                rounds,
                "--json",
            ]
            running[name] = subprocess.Popen(
                [*map(str, command), *map(str, told)],
                cwd=ROOT,
                env={**os.environ, "EMBRACE_TOKEN": server.enrolment},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        reports = {}
        try:
            for name, agent in running.items():
                out, errors = agent.communicate(timeout=PATIENCE)
                assert agent.returncode == 0, errors
                reports[name] = [json.loads(line) for line in out.splitlines()]
            for _ in client.watch(job):  # to its end
                pass
            found = client.job(job)
            assert (found["state"], found["version"]) == ("done", rounds)
            client.save_weights(job, rounds, folder / "weights.safetensors")
        finally:
            for agent in running.values():
                if agent.poll() is None:
                    agent.kill()
                    agent.communicate()
    return np.array(map_weights(folder / "weights.safetensors", MANIFEST.space)), reports
