"""A soak: agents that join, leave and crash at random for some minutes, and then an account of every committed round.

    python -m tests.soak.soak --seconds 600 --agents 64

Agents are real processes that speak the real protocol but do not train: an update is a function of its task's name, so
that afterwards the weights can be computed again from the rounds alone, and have to be the same bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.repository import Repository
from coordinator.store.versions import Versions
from edge_runtime.bundle_files import read_manifest
from edge_runtime.client import Declined, DeviceClient, Unreachable
from embrace.client import Client
from embrace.demo.processes import served_at
from federation.accumulate import Accumulator
from federation.axes.serve import Average, RoundFacts
from federation.job import plan_from, plan_to
from federation.manifest import Manifest
from federation.messages import Report
from federation.region import of_layers
from federation.server_step import mean_moves, server_step
from federation.space import Vector
from federation.wire import encode_layers

BUNDLE = Path(__file__).resolve().parents[2] / "embrace" / "demo" / "digits" / "model"
LEASE, COHORT = 3.0, 16
ENDS = {0: "left", -signal.SIGKILL: "crashed"}  # anything else is a failure
CRASH_BEFORE, CRASH_AFTER, LEAVE = 0.04, 0.04, 0.04  # of each task


def update_of(task: str, size: int) -> Vector:
    """What an agent answers to a task: the same for whoever asks."""
    seed = int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "little")
    return (np.random.default_rng(seed).standard_normal(size) * 1e-3).astype(np.float32)


def agent(server: str, token: str, seed: int) -> None:
    """One agent: works until it leaves, crashes, or is told to stop."""
    chance = random.Random(seed)
    manifest = read_manifest(BUNDLE)
    tier = chance.choice(["strong", "moderate", "weak"])
    joining = DeviceClient(server, token, patience=120)
    _, own = joining.enrol(f"soak-{seed}", {"tier": tier})
    client = DeviceClient(server, own, patience=120)
    while True:
        offer = client.next_task(5)
        if offer is None:
            continue
        layer = manifest.boundary(offer.work["boundary"]).layer
        where = manifest.space.suffix(layer)
        with contextlib.suppress(Declined):
            for _ in client.weights(offer.job, offer.version, 4 * where.start, 4 * where.stop):
                pass
            time.sleep(chance.expovariate(20))
            if chance.random() < CRASH_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            delta = update_of(offer.id, where.stop - where.start)
            report = Report("done", "", "none", "fast", 0, 1, 1, 10, None, None)
            client.send_update(offer.id, lambda: encode_layers(manifest.space, layer, delta), report)  # noqa: B023
            if chance.random() < CRASH_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
        if chance.random() < LEAVE:
            return


def soak(seconds: float, agents: int, rounds: int = 0) -> dict[str, Any]:
    """Run for so long, and on a slow machine until so many rounds are committed; stop, and check what happened."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "coordinator"
        server, url = _serve(root)
        ended = Counter(left=0, crashed=0, failed=0)
        fleet: list[subprocess.Popen[bytes]] = []
        try:
            with Client(url, (root / "admin.token").read_text().strip()) as admin:
                plan = {
                    "bundle": str(BUNDLE),
                    "num_rounds": 1_000_000,
                    "participate": {"count": COHORT, "quorum": 0.5, "deadline": 4.0},
                    "bounds": {"lease": LEASE, "offer": LEASE},
                }
                digest = admin.send_bundle(BUNDLE)
                job = admin.call("POST", "/jobs", json={"bundle": digest, "plan": plan_to(plan_from(plan))})["id"]
                token = admin.call("POST", "/enrolments", json={"uses": 100_000, "seconds": 86400})["token"]
                until, number = time.monotonic() + seconds, 0
                while time.monotonic() < until or admin.call("GET", f"/jobs/{job}")["version"] < rounds:
                    for child in [child for child in fleet if child.poll() is not None]:
                        fleet.remove(child)
                        ended[ENDS.get(child.returncode, "failed")] += 1
                    if len(fleet) < agents:
                        command = [sys.executable, "-m", "tests.soak.soak", "--agent", url, token, str(number)]
                        fleet.append(subprocess.Popen(command))
                        number += 1
                    time.sleep(0.1)
                memory = _memory(server.pid)
                admin.call("POST", f"/jobs/{job}/stop")
        finally:
            for child in (*fleet, server):
                child.terminate()
            for child in (*fleet, server):
                child.wait()
        return {**check(root, job), "agents": number, **ended, "server_peak_bytes": memory, "seconds": seconds}


def check(root: Path, job: str) -> dict[str, Any]:
    """The newest weights, computed again from nothing but the rounds; AssertionError if a bit differs."""
    manifest = read_manifest(BUNDLE)
    repository = Repository(open_database(sqlite_url(root)))
    with repository.reading() as session:
        rows = [row for row in repository.rounds(session, job) if row.state == "committed"]
        seats = {row.number: repository.seats(session, row) for row in rows}
    space, again = manifest.space, Versions(DirectoryBlobs(root / "again"))
    again.create(job, BUNDLE / manifest.weights.name, {})
    states: Counter[str] = Counter()
    for version, row in enumerate(rows):
        slots = seats[row.number]
        counted = [seat for seat in slots if seat["state"] == "arrived"]
        states.update(seat["state"] for seat in slots)
        total = _total(manifest, job, row.number, slots, counted)
        before = again.open(job, version, space, ())
        changes = server_step(Average(), mean_moves(total, space), before, RoundFacts(rate=0.05))
        again.write_next(job, version, space, (), changes)
        again.forget(job, before=version + 1)
    found, expected = (versions.weights(job, len(rows)) for versions in (Versions(DirectoryBlobs(root)), again))
    assert found.read_bytes() == expected.read_bytes(), "the weights are not what the rounds add up to"
    return {"rounds": len(rows), "adds_up": True, "slots": dict(states)}


def _total(manifest: Manifest, job: str, number: int, slots: list[Any], counted: list[Any]) -> Accumulator:
    draws = float(sum(seat["count"] for seat in slots))
    total = Accumulator(manifest.space, max_value=64.0, max_weight=draws)
    for seat in counted:
        layer = manifest.boundary(seat["member"]["boundary"]).layer
        where = manifest.space.suffix(layer)
        task = f"{job}-{number}-{seat['number']}-{len(seat['holders'])}"
        delta = update_of(task, where.stop - where.start)
        region = of_layers(manifest.space, range(layer, len(manifest.layers)))
        largest = float(np.abs(delta).max())
        total.fold(region, zip(region.runs, [delta]), float(seat["count"]), {}, largest=largest)
    return total


def _serve(root: Path) -> tuple[subprocess.Popen[bytes], str]:
    log = root.with_suffix(".log")
    command = [sys.executable, "-m", "embrace", "serve", "--data", str(root), "--port", "0", "--log-level", "warning"]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    while True:
        if url := served_at(log):
            return server, url
        if server.poll() is not None:
            raise SystemExit(f"the coordinator did not start: {log.read_text()}")
        time.sleep(0.05)


def _memory(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--agent", nargs=3, metavar=("URL", "TOKEN", "SEED"), help="be one of the agents")
    given = parser.parse_args()
    if given.agent:
        with contextlib.suppress(Unreachable, KeyboardInterrupt):
            agent(given.agent[0], given.agent[1], int(given.agent[2]))
        return
    print(json.dumps(soak(given.seconds, given.agents), indent=2))


if __name__ == "__main__":
    main()
