"""A coordinator without training: a small hand-made model, devices whose updates are a function of their tasks.

The graphs of the model are a few bytes that are never run. What a device sends depends on the layer, the round and the
seat alone, so that an interrupted job and an undisturbed one can be compared bit by bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from coordinator.arrivals import Arrival, Receiving
from coordinator.coordinator import Coordinator
from coordinator.evaluation import EvaluationLimits
from coordinator.registry import Registry
from coordinator.retention import Keep
from coordinator.server import Server
from coordinator.settings import Settings
from coordinator.store.blobs import Blobs, DirectoryBlobs
from coordinator.store.database import open_database
from coordinator.store.repository import Repository
from edge_runtime.bundle_files import map_weights
from edge_runtime.data import Samples
from edge_runtime.sample_file import write_samples
from federation.algorithm import Facts
from federation.axes.cover import DeviceProfile
from federation.engine import RoundEngine
from federation.job import plan_from
from federation.manifest import (
    MANIFEST_NAME,
    Loss,
    Manifest,
    Source,
)
from federation.messages import Report, TaskOffer
from federation.pace import Pace
from federation.space import Vector
from federation.wire import CheckedUpdate, encode, encode_layers
from tests import tiny_bundle
from tests.coordinator.databases import database_url
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("strong", "moderate", "weak")
BOUNDARIES = ("stem", "body", "head")  # the layers 0, 1 and 2
ALL_THREE = {"participate": {"min_available": 3, "quorum": 1.0}}  # of a plan: three devices, however slow they are


def write_bundle(directory: Path, width: int = 3) -> tuple[str, Manifest]:
    """(digest, manifest) of a model with three layers; the first has statistics, the last 2·width + 2 elements."""
    parameters = (
        (tiny_bundle.weight("stem.w", 2, width), tiny_bundle.statistic("stem.mean", 2)),
        (tiny_bundle.weight("body.w", 5),),
        (tiny_bundle.weight("head.w", 2, width), tiny_bundle.weight("head.b", 2)),
    )
    tiny = tiny_bundle.manifest(
        [tiny_bundle.layer(name, *own, activations=10) for name, own in zip(BOUNDARIES, parameters)],
        [tiny_bundle.boundary(name, number, 10 * (3 - number)) for number, name in enumerate(BOUNDARIES)],
        dict(zip(TIERS, BOUNDARIES)),
        source=Source("onnx", "none"),
        opset=17,
        loss=Loss("cross_entropy"),
        batch=4,
    )
    vector = np.random.default_rng(1).normal(size=tiny.space.size).astype(np.float32)
    manifest = tiny_bundle.write_bundle(directory, tiny, vector, f" of width {width}")
    return hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest(), manifest


def place_bundle(root: Path, width: int = 3) -> tuple[str, Manifest]:
    """The same, where a coordinator keeps its bundles."""
    draft = root / "bundles" / "new"
    digest, manifest = write_bundle(draft, width)
    draft.rename(root / "bundles" / digest)
    return digest, manifest


def task_parts(task: str) -> tuple[int, int, int]:
    """(round, seat, attempt)"""
    number, seat, attempt = map(int, task.split("-")[1:])
    return number, seat, attempt


def suffix_of(manifest: Manifest, offer: Any) -> slice:
    return manifest.space.suffix(manifest.boundary(offer.work["boundary"]).layer)


def scripted(manifest: Manifest, offer: Any) -> Vector:
    """What a device sends for a task: a function of layer, round and seat, whoever does it."""
    layer = manifest.boundary(offer.work["boundary"]).layer
    number, seat, _ = task_parts(offer.id)
    where = suffix_of(manifest, offer)
    return np.random.default_rng([layer, number, seat]).normal(0, 0.1, where.stop - where.start).astype(np.float32)


def body_of(manifest: Manifest, offer: Any, vector: Vector | None = None) -> bytes:
    vector = scripted(manifest, offer) if vector is None else vector
    layer = manifest.boundary(offer.work["boundary"]).layer
    return b"".join(bytes(part) for part in encode_layers(manifest.space, layer, vector))


def full_body(engine: RoundEngine, offer: Any, facts: Facts) -> bytes:
    """What a device sends for a task, with every track of the algorithm: a function of task and track."""
    number, seat, _ = task_parts(offer.id)
    tracks = engine.layout(offer.work["boundary"], number, facts).tracks
    rngs = {name: np.random.default_rng([number, seat, *name.encode()]) for name in tracks}
    vectors = {name: (own, rngs[name].normal(0, 0.1, own.size).astype(np.float32)) for name, own in tracks.items()}
    return b"".join(bytes(part) for part in encode(vectors))


def only(answers: Sequence[Any]) -> Any:
    """The answer of a call for many that was made for one."""
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer


class Files:
    """Where a coordinator's directory has what; written down again, because directories outlive programs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def bundle(self, digest: str) -> Path:
        return self.root / "bundles" / digest

    def version(self, job: str, number: int) -> Path:
        return self.root / "jobs" / job / "versions" / f"{number}.safetensors"

    def state(self, job: str, number: int) -> Path:
        return self.version(job, number).with_suffix(".state")

    def unscored(self, job: str, number: int) -> Path:
        return self.version(job, number).with_suffix(".evaluated")


def settle(coordinator: Coordinator) -> None:
    """Wait until everything that was accepted is folded, and what followed is done."""
    items = coordinator._folding._items
    with items.all_tasks_done:
        assert items.all_tasks_done.wait_for(lambda: not items.unfinished_tasks, PATIENCE)


class World:
    """A coordinator whose clock stands still unless it is moved, and its devices. No HTTP."""

    limits = EvaluationLimits()
    keep = Keep()
    pace = Pace()

    def __init__(self, root: Path, *, width: int = 3, reached: Callable[[str], None] = lambda point: None) -> None:
        self.root, self.now, self.reached = root, 1_000_000.0, reached
        self.files = Files(root)
        (root / "operator").mkdir(parents=True)
        (root / "operator" / "test.npz").touch()
        self.limits = EvaluationLimits(evaluation_data=str(root / "operator"))
        DirectoryBlobs(root)  # makes the folders
        self.bundle, self.manifest = self.place_bundle(width)
        self.begin()

    def place_bundle(self, width: int) -> tuple[str, Manifest]:
        return place_bundle(self.root, width)

    def open_blobs(self) -> Blobs:
        return DirectoryBlobs(self.root)

    def begin(self) -> None:
        """Start, or start again after `end`."""
        self.sessions = open_database(database_url(self.root))
        repository, blobs = Repository(self.sessions), self.open_blobs()
        self.registry = Registry(repository, lambda: self.now)
        self.coordinator = Coordinator(
            repository,
            blobs,
            clock=lambda: self.now,
            reached=self.reached,
            limits=self.limits,
            keep=self.keep,
            pace=self.pace,
        )
        self.coordinator.start()

    def end(self) -> None:
        self.coordinator.stop()

    def restart(self) -> None:
        self.end()
        self.begin()

    def interrupted(self, job: str) -> None:
        """Let the database say, after `end`, that a process that shares it was killed at work on a job."""
        repository = Repository(open_database(database_url(self.root)))
        if repository.is_shared:
            with repository.begin() as session:
                repository.delete_shared_job(session, job)
                repository.add_shared_job(session, job)
                repository.change_shared_job(session, job, open=False, scoring=1)
        repository.close()

    def job(self, **plan: Any) -> str:
        return self.coordinator.create_job(plan_from({"bundle": "tiny", **plan}), self.bundle)

    def device(self, tier: str | None = "strong", **profile: Any) -> str:
        found, _ = self.registry.enrol(self.registry.invite(1, 60), "device", DeviceProfile(tier=tier, **profile))
        return found

    def fleet(self, *tiers: str) -> list[str]:
        return [self.device(tier) for tier in tiers]

    def poll(self, device: str) -> Any:
        return only(self.coordinator.next_tasks([device]))

    def accept(
        self, device: str, receiving: Receiving, checked: CheckedUpdate, sha256: str, report: dict[str, Any]
    ) -> None:
        only(self.coordinator.accept_all([Arrival(device, receiving, checked, sha256, report)]))

    def offers(self, devices: list[str]) -> dict[str, TaskOffer]:
        """A task for everybody: the last one to come makes the round start, so all are asked twice."""
        for device in devices:
            self.poll(device)
        found = {device: self.poll(device) for device in devices}
        return {device: offer for device, offer in found.items() if offer is not None}

    def send(
        self, device: str, offer: TaskOffer, vector: Vector | None = None, samples: Any = 1, **report: Any
    ) -> None:
        """An update of the model alone, as the API hands it over."""
        self._send(device, offer, body_of(self.manifest, offer, vector), {"samples": samples, **report})

    def send_all(self, device: str, offer: TaskOffer, **report: Any) -> None:
        """An update of everything that the algorithm of a job asks for; of control variates and momenta, too."""
        job = self.coordinator._jobs[offer.job]
        self._send(device, offer, full_body(job.engine, offer, job.state.facts), report)

    def _send(self, device: str, offer: TaskOffer, body: bytes, report: dict[str, Any]) -> None:
        receiving = self.coordinator.receive(device, offer.id)
        try:
            receiving.path.write_bytes(body)
            receiving.decoder.feed(body)
            checked = receiving.decoder.finish()
        except BaseException:
            receiving.path.unlink(missing_ok=True)
            raise
        sha256 = hashlib.sha256(body).hexdigest()
        self.accept(device, receiving, checked, sha256, report)

    def settle(self) -> None:
        settle(self.coordinator)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.tick()
        self.settle()

    def round(self, devices: list[str], **report: Any) -> dict[str, TaskOffer]:
        """A whole round in which everybody answers."""
        offers = self.offers(devices)
        for device, offer in offers.items():
            self.send(device, offer, **report)
        self.settle()
        return offers

    def finish(self, job: str) -> None:
        """Wait until a process that shares the database has removed what is left of a job that is over."""
        repository = self.coordinator.repository

        def is_finished() -> bool:
            self.coordinator.tick()
            with repository.reading() as session:
                return job not in {row.job for row in repository.shared_jobs(session)}

        wait_until(is_finished)

    def weights(self, job: str, version: int | None = None) -> Vector:
        version = self.state(job)["version"] if version is None else version
        return np.array(map_weights(self.files.version(job, version), self.manifest.space))

    def state(self, job: str) -> dict[str, Any]:
        return self.coordinator.job(job)

    def kinds(self, job: str) -> list[str]:
        return [event["kind"] for event in self.coordinator.events(job, 0)[0]]

    def spool(self) -> list[str]:
        return sorted(path.name for path in (self.root / "spool").iterdir())


def upload(world: World, samples: Samples) -> str:
    """Give a world's coordinator evaluation data; return the reference to it."""
    place = world.root / "samples"
    write_samples(samples, place)
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    draft = world.coordinator.arriving_data(digest)
    place.rename(draft)
    world.coordinator.keep_data(draft, digest, digest)
    return f"sha256:{digest}"


def mean_oracle(manifest: Manifest, updates: list[tuple[int, float, Vector]]) -> tuple[Vector, np.ndarray]:
    """(mean in double precision, which elements were trained) of (first layer, weight, values): two passes."""
    space = manifest.space
    rows = np.zeros((len(updates), space.size))
    weights = np.zeros((len(updates), space.size))
    for row, weight, (first, w, values) in zip(rows, weights, updates):
        row[space.suffix(first)] = values
        weight[space.suffix(first)] = w
    total = weights.sum(axis=0)
    return (rows * weights).sum(axis=0) / np.where(total > 0, total, 1), total > 0


# --- over HTTP -------------------------------------------------------------------------------------


@dataclass
class Site:
    """A server in a thread of this process, on a socket."""

    url: str
    server: Server
    admin: str
    directory: Path

    def http(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Without verify=False every client would load the system's certificates.
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, verify=False)

    def enrol(self, tier: str = "strong", name: str = "a device") -> tuple[str, str]:
        """(id, token) of a new device."""
        known = self.server.registry
        return known.enrol(known.invite(1, 60), name, DeviceProfile(tier=tier))

    def settle(self) -> None:
        settle(self.server.coordinator)

    def spool(self) -> list[Path]:
        return sorted((self.directory / "spool").iterdir())


@contextmanager
def serving(directory: Path, **settings: Any) -> Iterator[Site]:
    """A real server on a free port of this machine, until the block ends."""
    known = {"port": 0, "requests_per_second": 10_000, "database": database_url(directory), **settings}
    server = Server(directory, Settings(**known))
    admin = server.registry.set_admin_token() or ""
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the product does: 40 ms less for each request
    config = uvicorn.Config(server.app, log_config=None, access_log=False, lifespan="on", ws="none")
    process = uvicorn.Server(config)
    thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_until(lambda: process.started or not thread.is_alive())
    assert process.started
    try:
        yield Site(f"http://127.0.0.1:{bound.getsockname()[1]}", server, admin, directory)
    finally:
        server.coordinator.release()
        process.should_exit = True
        thread.join(PATIENCE)
        bound.close()
        assert not thread.is_alive()


class Offer:
    """A task as JSON, with the fields as attributes."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.__dict__.update(found)

    id: str
    job: str
    work: dict[str, Any]


def put_update(client: httpx.Client, offer: Offer, body: Any, **headers: str) -> httpx.Response:
    return client.put(f"/v1/tasks/{offer.id}/update", content=body, headers={**report_header(), **headers})


# --- in a process of its own -----------------------------------------------------------------------

_SERVE = """
import os, signal, sys
from pathlib import Path
from coordinator.server import Server
from coordinator.settings import Settings

directory, port, point, times = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
seen = 0

def reached(name):
    global seen
    seen += name == point
    if name == point and seen == times:
        os.kill(os.getpid(), signal.SIGKILL)

known = {"database": sys.argv[5], "blobs": sys.argv[6] or None, "workers": int(sys.argv[7])}
known["storage_url"] = sys.argv[8] or None
settings = Settings(port=port, requests_per_second=10_000, log_level="error", **known)
Server(directory, settings, reached=reached).run(lambda url: print(url, flush=True))
"""


def start_server(
    directory: Path,
    port: int = 0,
    point: str = "",
    times: int = 0,
    blobs: str = "",
    database: str = "",
    workers: int = 1,
    storage_url: str = "",
) -> tuple[subprocess.Popen[str], str]:
    """(process, URL) of a server that kills itself when it reaches a point for the n-th time."""
    database = database or database_url(directory)
    given = [str(directory), str(port), point, str(times), database, blobs, str(workers), storage_url]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, *given],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    while True:  # it listens before it has taken up what was going on
        if point and process.poll() == -signal.SIGKILL:  # it reached its point while it took up what was going on
            return process, url
        assert url and process.poll() in (None, -signal.SIGKILL), "the server did not start"
        if process.poll() is not None:  # it was to be killed while it did so
            return process, url
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{url}/healthz", verify=False).raise_for_status()
            return process, url
        time.sleep(0.02)


def end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PATIENCE)
    if process.stdout is not None:
        process.stdout.close()


def report_of(offer: Any, samples: int = 1) -> Report:
    boundary = offer.work["boundary"]
    return Report("done", boundary, "portable", "fast", offer.work["round"], 1, 1, samples, 1.0, 1.0)


def report_header(samples: Any = 1, **more: Any) -> dict[str, str]:
    return {"Embrace-Report": json.dumps({"samples": samples, **more})}
