"""A fleet on one machine: a coordinator and four agents, each a process of its own, over real HTTP, on real digits.

Nothing here takes part in the training. It starts the processes with the `embrace` command, creates a job, kills one of
the agents in the middle, and looks on: it scores every version of the weights on images that no device has, and reads
what the agents say about their work.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.budget import parse_size
from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.data import Samples, from_arrays
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer
from embrace.client import Client
from embrace.demo.processes import COORDINATOR, Processes, served_at, undisturbed
from embrace.demo.results import DemoOutcome, DeviceResult, RoundResult, View
from federation.axes.local import Momentum
from federation.errors import EmbraceError, InputError, NonFiniteLoss
from federation.manifest import Manifest
from federation.messages import Task
from federation.space import Vector
from simulation.datasets.digits import DIGITS

SHIPPED = Path(__file__).parent / "digits"
NEEDED = ("fastapi", "sqlalchemy", "uvicorn")  # by the coordinator, which is another process
STEPS, BATCH, RATE, MOMENTUM = 40, 32, 0.02, 0.9
OTHER_RATES = (0.1, 0.3)  # for a device alone: the frozen layers of an untrained network call for larger steps
POLL, PATIENCE = 0.1, 90.0  # seconds: between looks, without any progress
QUORUM = 2
KILLED = "weak-2"  # after a third of the rounds; the others go on without it
ALPHA, SEED = 0.5, 2  # of the split
HELD_OUT = 5  # every fifth image of each digit

JOB = f"""\
bundle = "digits"
name = "demo"
num_rounds = {{rounds}}

[participate]
quorum = {QUORUM}  # of four devices: a round goes on without those that are late ...
grace = 2.0  # ... by the measure of the others, and by so many seconds at least

[cover]
rule = "output_side"  # EmbracingFL: a device trains as many layers as it can, counted from the output

[local]
steps = {STEPS}
batch = {BATCH}
rate = "{RATE}"
rules = [{{{{ rule = "momentum", factor = {MOMENTUM} }}}}]

[weigh]
by = "samples"
"""


@dataclass(frozen=True)
class DemoAgent:
    """A device of the fleet."""

    name: str
    tier: str  # told, so that every demo is the same: the network is too small for memory to decide
    memory: str


FLEET = (
    DemoAgent("strong", "strong", "128MB"),
    DemoAgent("moderate", "moderate", "96MB"),
    DemoAgent("weak-1", "weak", "80MB"),
    DemoAgent("weak-2", "weak", "80MB"),
)


class FleetError(EmbraceError):
    """A process ended that should not have, or nothing happens any more; the logs are kept."""


Show = Callable[[View], None]
Digits = tuple[NDArray[np.float32], NDArray[np.int64]]


def load_digits() -> tuple[list[Digits], Digits]:
    """Load the devices' images and those that are held out; the same everywhere.

    Which share of a digit a device gets is drawn from a Dirichlet distribution, so that each has many images of some
    digits and hardly any of others.
    """
    with np.load(DIGITS) as file:
        x, y = file["x"].astype(np.float32) / 16, file["y"].astype(np.int64)
    chance = np.random.RandomState(SEED)  # unlike default_rng it promises the same numbers in every version of numpy
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(len(FLEET) + 1)]
    for digit in range(10):
        mine = np.flatnonzero(y == digit)
        held = np.arange(len(mine)) % HELD_OUT == HELD_OUT - 1
        parts[-1].append(mine[held])
        shares = np.cumsum(chance.dirichlet([ALPHA] * len(FLEET)))[:-1]
        for part, piece in zip(parts, np.split(mine[~held], np.rint(shares * np.sum(~held)).astype(int))):
            part.append(piece)
    chosen = [np.sort(np.concatenate(part)) for part in parts]
    *devices, rest = [(x[rows], y[rows]) for rows in chosen]
    return devices, rest


@contextmanager
def workspace(keep: Path | None) -> Iterator[Path]:
    """Make a directory for all files. It is removed afterwards, unless it is asked for or has the log of a failure."""
    if keep is None:
        directory = Path(tempfile.mkdtemp(prefix="embrace-demo-"))
    else:
        directory = keep.resolve()
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(f"{keep} exists and is not an empty directory")
        directory.mkdir(parents=True, exist_ok=True)
    failed = False
    try:
        yield directory
    except FleetError:
        failed = True
        raise
    finally:
        if keep is None and not failed:
            with undisturbed():
                shutil.rmtree(directory, ignore_errors=True)


def run_fleet(directory: Path, rounds: int, show: Show = lambda view: None) -> DemoOutcome:
    """Run the demo in an empty directory. When it returns or raises, no process is left."""
    started = time.perf_counter()
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    shares, held_out = load_digits()
    bundle = Path(shutil.copytree(SHIPPED / "model", directory / "digits"))
    manifest = read_manifest(bundle)
    look = Lookout(bundle, manifest, from_arrays(*held_out, manifest), show)
    with Processes(directory) as processes:
        fleet = Fleet(directory, processes, look)
        fleet.start(shares, rounds)
        fleet.follow(rounds)
    look.tell("train each device alone, for comparison")
    devices = [
        _device_result(manifest, member, share, fleet, look.alone(member, share, rounds))
        for member, share in zip(FLEET, shares)
    ]
    return DemoOutcome(len(held_out[1]), look.rounds, devices, look.notes, time.perf_counter() - started)


class Lookout:
    """Scores weights on images that no device has, and shows how things stand."""

    def __init__(self, bundle: Path, manifest: Manifest, held_out: Samples, show: Show) -> None:
        self.bundle = bundle
        self.manifest = manifest
        self._show = show
        self.rounds: list[RoundResult] = []
        self.seats: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self._source = BundleSource(bundle, manifest)
        self._first = np.array(map_weights(bundle / manifest.weights.name, manifest.space))
        self._evaluator = Evaluator(bundle, self._source, 0, held_out, settings=RuntimeSettings(), plan=ForwardPlan())

    def tell(self, doing: str) -> None:
        self._show(View(doing, list(self.rounds), list(self.seats), list(self.notes)))

    def score(self, weights: Vector) -> float:
        return self._evaluator.score(weights).accuracy or 0.0

    def alone(self, member: DemoAgent, share: Digits, rounds: int) -> float:
        """Train one device's data alone with as many steps, at the rate that suits it best."""
        boundary = self.manifest.boundary(member.tier)
        mine = self.manifest.space.suffix(boundary.layer)
        trainer = Trainer(self.bundle, self._source, from_arrays(*share, self.manifest))
        scores = []
        for rate in (RATE, *OTHER_RATES):
            task = Task(boundary.name, rounds * STEPS, BATCH, rate, (Momentum(MOMENTUM),))
            weights = self._first.copy()
            with suppress(NonFiniteLoss):
                weights[mine] = trainer.run(task, Received(weights[mine].copy())).parameters
            scores.append(self.score(weights))
        trainer.close()
        return max(scores)

    def start(self) -> None:
        self.rounds.append(RoundResult(0, self.score(self._first)))


class Fleet:
    """A coordinator and the agents, from their start to the end of the job."""

    def __init__(self, directory: Path, processes: Processes, look: Lookout) -> None:
        self.directory = directory
        self.processes = processes
        self.look = look
        self.ids: dict[str, str] = {}  # name of a device by its id
        self.peaks: dict[str, int] = {}
        self.lost: dict[str, str] = {}  # devices that did not see the end, and how that was
        self.killed_in: int | None = None  # the round, from 1, in which an agent is killed
        self._moved = time.monotonic()

    def start(self, shares: Sequence[Digits], rounds: int) -> None:
        self.look.tell("start the coordinator")
        data = self.directory / COORDINATOR
        self.processes.start(COORDINATOR, "serve", "--data", str(data), "--port", "0", "--devices", "1")
        url = self._wait(lambda: served_at(self.processes.output(COORDINATOR)))
        self.admin = Client(url, (data / "admin.token").read_text().strip())
        token = self._call("POST", "/enrolments", json={"uses": len(FLEET), "seconds": 600})["token"]
        for member, (x, y) in zip(FLEET, shares):
            np.savez(self.directory / f"{member.name}.npz", x=x, y=y)
            self.processes.start(
                member.name,
                "agent",
                "--server",
                url,
                "--data",
                str(self.directory / f"{member.name}.npz"),
                "--work",
                str(self.directory / member.name),
                "--name",
                member.name,
                "--tier",
                member.tier,
                "--memory",
                member.memory,
                "--engine",
                "portable",
                "--tasks",
                str(rounds),
                "--json",
                EMBRACE_TOKEN=token,
            )
        self.look.start()
        self.look.tell("wait for four agents")
        self.ids = self._wait(self._enrolled)
        file = self.directory / "job.toml"
        file.write_text(JOB.format(rounds=rounds))
        self.job = self.admin.create(file)

    def _enrolled(self) -> dict[str, str] | None:
        found = {row["id"]: row["name"] for row in self._call("GET", "/devices")}
        return found if len(found) == len(FLEET) else None

    def follow(self, rounds: int) -> None:
        """Watch until the job is over. The coordinator keeps two versions, so each is fetched before it is scored."""
        self.look.tell("round 1")
        waiting: list[tuple[int, Path | None]] = []
        fetched, over = 0, False
        while not over or waiting:
            job = self._call("GET", f"/jobs/{self.job}")
            for version in range(fetched + 1, job["version"] + 1):
                waiting.append((version, self._fetch(version)))
                self._moved = time.monotonic()
            fetched, over = job["version"], job["state"] in ("done", "failed", "stopped")
            if job["state"] == "failed":
                raise FleetError(f"the job failed: {job['message']}; logs are in {self.directory}")
            self.look.seats = self._seats(job)
            if self.killed_in is None and fetched >= rounds / 3 >= 1:
                self._kill(fetched + 1, anyway=fetched >= rounds / 3 + 2)
            if waiting:
                self._score(*waiting.pop(0))
            self.look.tell(f"round {min(fetched + 1, rounds)}")
            self._check(over)
            if not waiting and not over:
                time.sleep(POLL)

    def _kill(self, number: int, *, anyway: bool) -> None:
        """Kill an agent as a power cut would, if it has a task now or `anyway`."""
        if not anyway and not any(name == KILLED and state == "leased" for name, _, state in self.look.seats):
            return
        self.processes.running[KILLED].kill()
        self.killed_in = number
        self.lost[KILLED] = f"killed in round {number}"
        self.look.notes.append(f"{KILLED} is killed (kill -9) in round {number}")

    def _fetch(self, version: int) -> Path | None:
        path = self.directory / f"version-{version}.safetensors"
        try:
            self.admin.save_weights(self.job, version, path)
        except InputError:  # a machine that was busy elsewhere for two rounds
            return None
        return path

    def _score(self, version: int, path: Path | None) -> None:
        row = self._call("GET", f"/jobs/{self.job}/rounds")[version - 1]
        told, took = row["summary"], row["closed_at"] - row["opened_at"]
        accuracy = self.look.score(np.array(map_weights(path, self.look.manifest.space))) if path else None
        self.look.rounds.append(RoundResult(version, accuracy, told["loss"], told["updates"], took))
        if self.killed_in is not None and told["updates"] < len(FLEET) == self.look.rounds[-2].updates:
            self.look.notes.append(f"round {version} closes without {KILLED} after {took:.1f} s")

    def _seats(self, job: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        slots = (job["round"] or {}).get("body", {}).get("slots", [])
        known = {self.ids.get(slot["member"]["device"], "?"): slot for slot in slots}
        return [(m.name, known[m.name]["member"]["boundary"], known[m.name]["state"]) for m in FLEET if m.name in known]

    def _check(self, over: bool = False) -> None:
        """Raise if the coordinator ended; a fleet goes on without one of its devices."""
        if problem := self.processes.ended(COORDINATOR):
            raise self._error(problem, COORDINATOR)
        for name in self.processes.running.keys() - {COORDINATOR} - self.lost.keys():
            self._measure(name)
            if not over and (problem := self.processes.ended(name)):
                self._lose(name, problem)
        if time.monotonic() - self._moved > PATIENCE:
            last = [line for line in map(self.processes.last_words, self.processes.running) if line]
            told = f"; {last[-1]}" if last else ""
            raise FleetError(f"nothing has happened for {PATIENCE:.0f} s{told}; logs are in {self.directory}")

    def _lose(self, name: str, problem: str) -> None:
        self.lost[name] = problem
        self.look.notes.append(f"{problem}; the others go on")
        left = len(FLEET) - len(self.lost)
        if not self.ids or left < QUORUM:
            raise self._error(
                f"{problem}; {left} devices are left and {QUORUM} are needed" if self.ids else problem, name
            )

    def _error(self, problem: str, name: str) -> FleetError:
        return FleetError(f"{problem}; its log is {self.processes.log(name)}")

    def _measure(self, name: str) -> None:
        """Record the agent's anonymous memory, where the system tells it."""
        try:
            lines = Path(f"/proc/{self.processes.running[name].pid}/status").read_text().splitlines()
            now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
        except (OSError, StopIteration):
            return
        self.peaks[name] = max(self.peaks.get(name, 0), now)

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            return self.admin.call(method, path, **options)
        except InputError:
            raise
        except EmbraceError as error:
            time.sleep(POLL)
            self._check()  # says why, if the process is gone
            raise FleetError(f"{error}; logs are in {self.directory}") from None

    def _wait(self, ready: Callable[[], Any]) -> Any:
        while (found := ready()) is None:
            self._check()
            time.sleep(POLL)
        self._moved = time.monotonic()
        return found


def _device_result(manifest: Manifest, member: DemoAgent, share: Digits, fleet: Fleet, alone: float) -> DeviceResult:
    boundary = manifest.boundary(member.tier)
    lines = fleet.processes.output(member.name).read_text("utf-8").splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    seconds: dict[str, float] = {}
    for report in reports:
        for part, value in report["seconds"].items():
            spent = sum(value.values()) if isinstance(value, dict) else value
            seconds[part] = seconds.get(part, 0.0) + (spent or 0.0)
    training = [report["memory"]["anonymous"] for report in reports if report["memory"]]
    return DeviceResult(
        name=member.name,
        tier=member.tier,
        boundary=boundary.name,
        layers=[layer.name for layer in manifest.layers[boundary.layer :]],
        trained=manifest.weights_from(boundary.layer),
        images=len(share[1]),
        digits=np.bincount(share[1], minlength=10).tolist(),
        rounds=len(reports),
        sent=sum(report["bytes"]["uploaded"] for report in reports),
        received=sum(report["bytes"]["downloaded"] for report in reports),
        budget=parse_size(member.memory),
        process_peak=fleet.peaks.get(member.name),
        training_peak=max(training, default=None),
        seconds=seconds,
        alone=alone,
        ended=fleet.lost.get(member.name, ""),
    )
