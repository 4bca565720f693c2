"""Kill everything but the devices, at random, and compare the weights with those of a run without kills.

    python -m bench.server.chaos --minutes 10 --agents 64 --out chaos.json

Two coordinators and workers on one PostgreSQL database and one S3 server; every few seconds one of these processes is
killed with SIGKILL and comes back a moment later. The devices are the device's real client in threads of this process:
each fetches the weights of its task's version, and sends an update that is a function of these, of the round and of the
seat. A round waits for all of them, so that cohorts do not depend on time. At the end:

- every update that a device was told to have arrived is recorded, and every version counts one of each seat;
- the last version is, bit for bit, that of one process with SQLite and a directory in which nothing was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.server.model import vectors, write_bundle
from bench.server.services import (
    BUCKET,
    Supervisor,
    balancer,
    coordinator,
    postgresql,
    s3_server,
    worker,
)
from edge_runtime.client import Declined, DeviceClient
from embrace.client import Client
from federation.errors import EmbraceError
from federation.job import plan_from, plan_to
from federation.manifest import Manifest
from federation.messages import Report, TaskOffer
from federation.space import Vector
from federation.wire import encode_layers

PARAMETERS = 4096
PATIENCE = 300.0  # seconds without a new version, after which a run has failed
LAST_ROUNDS = 2  # that are committed after the last kill
DOWN = (0.2, 2.0)  # seconds until a killed process comes back
MOST_ROUNDS = 100_000


class ChaosError(EmbraceError):
    """The coordinators did not do what they have to."""


@dataclass
class Fleet:
    """What devices share and tell."""

    url: str
    manifest: Manifest
    job: str
    acknowledged: list[str] = field(default_factory=list)  # tasks
    direct: list[str] = field(default_factory=list)  # tasks whose bytes may go past the coordinators
    declined: list[tuple[str, str]] = field(default_factory=list)  # tasks, and why
    errors: list[str] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)


def update_of(offer: TaskOffer, weights: Vector) -> Vector:
    """Return what a device sends: a function of the version's weights, the round and the seat."""
    number, seat, _ = map(int, offer.id.split("-")[1:])
    noise = np.random.default_rng([number, seat]).standard_normal(weights.size, np.float32)
    update: Vector = np.float32(0.01) * noise - np.float32(0.05) * weights
    return update


def work(fleet: Fleet, token: str) -> None:
    """Take tasks until the end, and ride out whatever happens to the servers."""
    size = fleet.manifest.weights.bytes
    with DeviceClient(fleet.url, token, patience=1e6, sleep=lambda s: time.sleep(min(s, 1.0))) as client:
        while not fleet.ends.is_set():
            try:
                offer = client.next_task(5.0)
                if offer is None:
                    continue
                found = b"".join(client.weights(offer.job, offer.version, 0, size, offer.storage))
                vector = update_of(offer, np.frombuffer(found, "<f4", offset=size - 4 * fleet.manifest.space.size))
                report = Report("done", offer.work["boundary"], "portable", "fast", offer.version, 1, 1, 1, 1.0, 1.0)
                client.send_update(
                    offer.id,
                    lambda: encode_layers(fleet.manifest.space, 0, vector),  # noqa: B023
                    report,
                    storage=offer.storage is not None,
                )
                fleet.acknowledged.append(offer.id)
                fleet.direct += [offer.id] if offer.storage is not None else []
            except Declined as refusal:
                fleet.declined.append((offer.id if offer else "", f"{refusal.answer} {refusal.reason}: {refusal}"))
                time.sleep(0.2)
            except EmbraceError as error:
                fleet.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)


@contextlib.contextmanager
def at_work(fleet: Fleet, tokens: Sequence[str]) -> Iterator[None]:
    threads = [threading.Thread(target=work, args=(fleet, token), daemon=True) for token in tokens]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        fleet.ends.set()
        for thread in threads:
            thread.join(30.0)


def prepare(url: str, token: str, folder: Path, agents: int, rounds: int) -> tuple[Fleet, list[str], Client]:
    """Create a job that every device takes part in, and enrol them."""
    bundle = folder / "bundle"
    manifest = write_bundle(bundle, vectors(PARAMETERS)[0])
    admin = Client(url, token)
    plan = plan_from(
        {
            "bundle": "bench",
            "num_rounds": rounds,
            "participate": {"min_available": agents, "quorum": 1.0},
            "bounds": {"lease": 3600.0, "offer": 3600.0},
        }
    )
    digest = admin.send_bundle(bundle)
    job = str(admin.call("POST", "/jobs", json={"bundle": digest, "plan": plan_to(plan)})["id"])
    invitation = admin.invite(agents, 7 * 86400.0)
    with DeviceClient(url, invitation) as client:
        tokens = [client.enrol(f"device {number}", {"tier": "strong"})[1] for number in range(agents)]
    return Fleet(url, manifest, job), tokens, admin


def patiently(ask: Any) -> Any:
    """Ask until there is an answer: processes are being killed."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except EmbraceError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def wait_for(fleet: Fleet, admin: Client, version: int) -> None:
    """Wait for a version; a job that stands still is an error."""
    last, since = -1, time.monotonic()
    while (found := patiently(lambda: admin.job(fleet.job)))["version"] < version:
        if found["state"] not in ("running", "done"):
            raise ChaosError(f"the job is {found['state']}: {found['message']}")
        if found["version"] != last:
            last, since = found["version"], time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            raise ChaosError(
                f"version {last + 1} did not come within {PATIENCE:g} seconds; it waits: {found['waiting']}"
            )
        time.sleep(0.5)


def harm(supervisor: Supervisor, seconds: float, every: float, chance: random.Random) -> list[str]:
    """Kill for so long, every few seconds; return what was killed."""
    killed, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(every * chance.uniform(0.5, 1.5))
        victim = chance.choice(supervisor.services)
        if victim.is_running() and victim.ready():  # one that is only starting has lost nothing
            supervisor.kill(victim, chance.uniform(*DOWN))
            killed.append(victim.name)
    return killed


def run_chaos(folder: Path, agents: int, seconds: float, every: float, workers: int, seed: int) -> dict[str, Any]:
    """Run with kills; return what was found, and the last version in a file `chaos`."""
    database, url = postgresql(folder)
    objects, environment = s3_server(folder)
    places = ["--database", url, "--blobs", f"s3://{BUCKET}/chaos"]
    started = [coordinator(folder, name, environment, *places) for name in ("one", "two")]
    helpers = [worker(folder, f"worker{number}", environment, *places) for number in range(workers)]
    services = [database, objects, *(service for service, _ in started), *helpers]
    with Supervisor(services) as supervisor, balancer([port for _, port in started]) as front:
        token = (folder / "one" / "admin.token").read_text().strip()
        fleet, tokens, admin = prepare(front, token, folder, agents, MOST_ROUNDS)
        began = time.monotonic()
        with at_work(fleet, tokens):
            wait_for(fleet, admin, 1)
            killed = harm(supervisor, seconds, every, random.Random(seed))
            for service in services:
                service.wait()
            during = int(patiently(lambda: admin.job(fleet.job))["version"])
            wait_for(fleet, admin, during + LAST_ROUNDS)
            patiently(lambda: admin.stop(fleet.job))
            while (found := patiently(lambda: admin.job(fleet.job)))["round"]["state"] == "closing":
                time.sleep(0.2)
        took = time.monotonic() - began
        version = int(found["version"])
        patiently(lambda: admin.save_weights(fleet.job, version, folder / "chaos"))
        admin.close()
        lost, short = compare(url, fleet, version, agents)
        check = checked(folder, places, environment)
    return {
        "agents": agents,
        "seconds": round(took, 1),
        "seed": seed,
        "every": every,
        "coordinators": len(started),
        "workers": workers,
        "killed": dict(sorted(Counter(killed).items())),
        "starts": {service.name: service.starts for service in services},
        "rounds": version,
        "acknowledged": len(fleet.acknowledged),
        "direct": len(fleet.direct),
        "lost": lost,
        "short_rounds": short,
        "declined": dict(Counter(why.partition(":")[0] for _, why in fleet.declined)),
        "errors": dict(Counter(fleet.errors).most_common(5)),
        "check": check,
    }


def compare(url: str, fleet: Fleet, version: int, agents: int) -> tuple[list[str], list[int]]:
    """Return acknowledged tasks that are not recorded, and rounds that count fewer updates than there are seats."""
    from sqlalchemy import create_engine, text

    engine = create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT task, round FROM updates WHERE job = :job"), {"job": fleet.job}).all()
    engine.dispose()
    recorded, counts = {row[0] for row in rows}, Counter(int(row[1]) for row in rows)
    short = [number for number in range(version) if counts[number] != agents]
    return sorted(set(fleet.acknowledged) - recorded)[:20], short


def checked(folder: Path, places: Sequence[str], environment: dict[str, str]) -> Any:
    """Have `embrace admin check` look at what is stored."""
    import os
    import subprocess

    command = [sys.executable, "-m", "embrace", "admin", "check", "--data", str(folder / "one"), "--json", *places]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    try:
        return json.loads(answer.stdout)["wrong"]
    except (ValueError, KeyError):
        return [answer.stderr.strip() or answer.stdout.strip()]


def run_alone(folder: Path, agents: int, rounds: int) -> None:
    """Run one process with SQLite and a directory, without a kill; the last version becomes the file `alone`."""
    service, port = coordinator(folder, "alone.data", {})
    with Supervisor([service]):
        token = (folder / "alone.data" / "admin.token").read_text().strip()
        (folder / "alone.files").mkdir()
        url = f"http://127.0.0.1:{port}"
        fleet, tokens, admin = prepare(url, token, folder / "alone.files", agents, rounds)
        with at_work(fleet, tokens):
            wait_for(fleet, admin, rounds)
        admin.save_weights(fleet.job, rounds, folder / "alone")
        admin.close()


def main() -> int:
    about = argparse.ArgumentParser(description="Kill coordinators, workers, database and S3 server; compare the bits.")
    about.add_argument("--minutes", type=float, default=10.0)
    about.add_argument("--every", type=float, default=4.0, help="Seconds between two kills, half more or less.")
    about.add_argument("--agents", type=int, default=64)
    about.add_argument("--workers", type=int, default=1 if importlib.util.find_spec("coordinator.worker") else 0)
    about.add_argument("--seed", type=int, default=1)
    about.add_argument("--folder", type=Path, help="Keep logs and stores here; else they go.")
    about.add_argument("--out", type=Path, help="Write the JSON here, too.")
    given = about.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embrace-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        found = run_chaos(folder, given.agents, 60.0 * given.minutes, given.every, given.workers, given.seed)
        run_alone(folder, given.agents, found["rounds"])
        digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("chaos", "alone")]
        found |= {"sha256": digests[0], "sha256_without_kills": digests[1], "same_bits": digests[0] == digests[1]}
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 0 if found["same_bits"] and not found["lost"] and not found["short_rounds"] and not found["check"] else 1


if __name__ == "__main__":
    sys.exit(main())
