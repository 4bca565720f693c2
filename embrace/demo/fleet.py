"""A fleet on one machine: a coordinator and four agents, each a process of its own, over real HTTP.

Nothing here takes part in the training. It starts the processes with the `embrace` command, creates a job, kills one of
the agents in the middle, and looks on: it scores every version of the weights on samples that no device has, and reads
what the agents say about their work.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.budget import parse_size
from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.data import Samples
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from embrace.client import Client
from embrace.demo.processes import COORDINATOR, Processes, served_at, undisturbed
from embrace.demo.results import DeviceResult, RoundResult, View
from federation.errors import EmbraceError, InputError
from federation.space import Vector

NEEDED = ("fastapi", "sqlalchemy", "uvicorn")  # by the coordinator, which is another process
POLL, PATIENCE = 0.1, 90.0  # seconds: between looks, without any progress
QUORUM = 2
KILLED = "weak-2"  # after a third of the rounds; the others go on without it


@dataclass(frozen=True)
class DemoAgent:
    """A device of the fleet."""

    name: str
    memory: str
    tier: str | None = None  # told where the network is too small for memory to decide


@dataclass(frozen=True)
class DemoJob:
    """What a fleet trains: a bundle, the data of each device and what is held out, and the job file."""

    bundle: Path
    members: Sequence[DemoAgent]
    data: Sequence[Path]
    held_out: Samples
    toml: str
    patience: float = PATIENCE


class FleetError(EmbraceError):
    """A process ended that should not have, or nothing happens any more; the logs are kept."""


Show = Callable[[View], None]


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


def job_file(bundle: str, rounds: int, local: str) -> str:
    """Write the job of a fleet; `local` is what a device does in a round."""
    return f"""\
bundle = "{bundle}"
name = "demo"
num_rounds = {rounds}

[participate]
quorum = {QUORUM}  # of four devices: a round goes on without those that are late ...
grace = 2.0  # ... by the measure of the others, and by so many seconds at least

[cover]
rule = "output_side"  # EmbracingFL: a device trains as many layers as it can, counted from the output

[local]
{local}
[weigh]
by = "samples"
"""


def check_packages() -> None:
    """Refuse to start without what the coordinator needs."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def run_fleet(directory: Path, job: DemoJob, rounds: int, show: Show) -> tuple[Lookout, Fleet]:
    """Run a coordinator and its agents in a directory. When it returns or raises, no process is left."""
    look = Lookout(job, show)
    with Processes(directory) as processes:
        fleet = Fleet(directory, processes, look, job)
        fleet.start(rounds)
        fleet.follow(rounds)
    return look, fleet


class Lookout:
    """Scores weights on samples that no device has, and shows how things stand."""

    def __init__(self, job: DemoJob, show: Show) -> None:
        self.bundle = job.bundle
        self.manifest = read_manifest(job.bundle)
        self._show = show
        self.rounds: list[RoundResult] = []
        self.seats: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self.source = BundleSource(job.bundle, self.manifest)
        self.first = np.array(map_weights(job.bundle / self.manifest.weights.name, self.manifest.space))
        self.last = self.first  # the newest version that was scored
        self._evaluator = self.evaluator(job.held_out)

    def evaluator(self, samples: Samples) -> Evaluator:
        return Evaluator(self.bundle, self.source, 0, samples, settings=RuntimeSettings(), plan=ForwardPlan())

    def tell(self, doing: str) -> None:
        self._show(View(doing, list(self.rounds), list(self.seats), list(self.notes)))

    def score(self, weights: Vector) -> float:
        return self._evaluator.score(weights).accuracy or 0.0

    def start(self) -> None:
        self.rounds.append(RoundResult(0, self.score(self.first)))


class Fleet:
    """A coordinator and the agents, from their start to the end of the job."""

    def __init__(self, directory: Path, processes: Processes, look: Lookout, job: DemoJob) -> None:
        self.directory = directory
        self.processes = processes
        self.look = look
        self.what = job
        self.ids: dict[str, str] = {}  # name of a device by its id
        self.peaks: dict[str, int] = {}
        self.lost: dict[str, str] = {}  # devices that did not see the end, and how that was
        self.killed_in: int | None = None  # the round, from 1, in which an agent is killed
        self._moved = time.monotonic()

    def start(self, rounds: int) -> None:
        self.look.tell("start the coordinator")
        data = self.directory / COORDINATOR
        self.processes.start(COORDINATOR, "serve", "--data", str(data), "--port", "0", "--devices", "1")
        url = self._wait(lambda: served_at(self.processes.output(COORDINATOR)))
        self.admin = Client(url, (data / "admin.token").read_text().strip())
        token = self._call("POST", "/enrolments", json={"uses": len(self.what.members), "seconds": 600})["token"]
        for member, file in zip(self.what.members, self.what.data):
            self.processes.start(
                member.name,
                "agent",
                "--server",
                url,
                "--data",
                str(file),
                "--work",
                str(self.directory / member.name),
                "--name",
                member.name,
                *(["--tier", member.tier] if member.tier is not None else []),
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
        file.write_text(self.what.toml)
        self.job = self.admin.create(file)

    def _enrolled(self) -> dict[str, str] | None:
        found = {row["id"]: row["name"] for row in self._call("GET", "/devices")}
        return found if len(found) == len(self.what.members) else None

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
                self._kill(fetched + 1, anyway=fetched >= rounds / 3 + 1)
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
        accuracy = None
        if path is not None:
            self.look.last = np.array(map_weights(path, self.look.manifest.space))
            accuracy = self.look.score(self.look.last)
        self.look.rounds.append(RoundResult(version, accuracy, told["loss"], told["updates"], took))
        if self.killed_in is not None and told["updates"] < len(self.what.members) == self.look.rounds[-2].updates:
            self.look.notes.append(f"round {version} closes without {KILLED} after {took:.1f} s")

    def _seats(self, job: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        slots = (job["round"] or {}).get("body", {}).get("slots", [])
        known = {self.ids.get(slot["member"]["device"], "?"): slot for slot in slots}
        names = [member.name for member in self.what.members if member.name in known]
        return [(name, known[name]["member"]["boundary"], known[name]["state"]) for name in names]

    def _check(self, over: bool = False) -> None:
        """Raise if the coordinator ended; a fleet goes on without one of its devices."""
        if problem := self.processes.ended(COORDINATOR):
            raise self._error(problem, COORDINATOR)
        for name in self.processes.running.keys() - {COORDINATOR} - self.lost.keys():
            self._measure(name)
            if not over and (problem := self.processes.ended(name)):
                self._lose(name, problem)
        if time.monotonic() - self._moved > self.what.patience:
            last = [line for line in map(self.processes.last_words, self.processes.running) if line]
            told = f"; {last[-1]}" if last else ""
            raise FleetError(f"nothing has happened for {self.what.patience:.0f} s{told}; logs are in {self.directory}")

    def _lose(self, name: str, problem: str) -> None:
        self.lost[name] = problem
        self.look.notes.append(f"{problem}; the others go on")
        left = len(self.what.members) - len(self.lost)
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


def device_result(member: DemoAgent, fleet: Fleet, counts: Sequence[int], alone: float | None) -> DeviceResult:
    """Sum up what a device reported; `counts` are its samples of each class."""
    manifest = fleet.look.manifest
    lines = fleet.processes.output(member.name).read_text("utf-8").splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    boundary = manifest.boundary(member.tier or (reports[-1]["boundary"] if reports else manifest.whole.name))
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
        samples=sum(counts),
        classes=list(counts),
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
