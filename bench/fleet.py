"""How long a fleet of real agents takes for a job when it is well, and when it has bad luck.

Each device is a process of `embrace agent`, on loopback, with real digits. Bad luck is: devices that are killed in the
middle of a round (SIGKILL), devices whose data does not fit the model, and devices that are many times slower than the
others. A slow one is stopped and continued again and again (SIGSTOP, SIGCONT): it is slow in everything it does, and
takes no processor from the others.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.machine import describe_device, load_average
from embrace.client import Client
from embrace.demo.digits_demo import SHIPPED
from embrace.demo.processes import COORDINATOR, Processes, served_at
from federation.errors import EmbraceError, InputError
from simulation.datasets.digits import DIGITS

BAR = 1.5  # times the duration of the healthy fleet
RUNS, STOPS = 0.05, 0.95  # seconds for which a slow device runs and is stopped, in turn
SAMPLES = 64  # of each device
POLL, STARTS, STANDS_STILL = 0.1, 600.0, 300.0  # seconds: between looks, to start all, without a new version
JOB = """\
bundle = "{bundle}"
num_rounds = {rounds}

[local]
steps = {steps}
batch = 16
rate = "0.02"
"""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Luck:
    """A fleet, and what happens to it."""

    name: str
    agents: int
    killed: int = 0
    wrong: int = 0
    slow: int = 0

    def __post_init__(self) -> None:
        if self.agents < 1 or min(self.killed, self.wrong, self.slow) < 0 or self.well < 1:
            raise InputError("expected more agents than are killed, have wrong data and are slow together")

    @property
    def well(self) -> int:
        """Devices to which nothing happens."""
        return self.agents - self.killed - self.wrong - self.slow

    def names(self, first: int, count: int) -> list[str]:
        return [f"device-{number:03}" for number in range(first, first + count)]

    @property
    def kinds(self) -> tuple[list[str], list[str], list[str]]:
        """The names of devices that are killed, have wrong data, are slow."""
        killed, wrong = self.names(0, self.killed), self.names(self.killed, self.wrong)
        return killed, wrong, self.names(self.killed + self.wrong, self.slow)


@dataclass(frozen=True)
class FleetRow:
    """What a fleet did."""

    luck: Luck
    seconds: float  # from the job's creation to its end
    rounds: Sequence[float]  # seconds of each
    updates: int  # that counted
    benched: int  # times that a device was
    failed: int  # tasks that were given back
    load: tuple[float, float]  # of the machine, before and after


@dataclass
class FleetReport:
    rows: list[FleetRow] = field(default_factory=list)
    device: dict[str, str] = field(default_factory=dict)

    def ratio(self, row: FleetRow) -> float:
        """Compare with the first fleet."""
        return row.seconds / self.rows[0].seconds


def bench_fleet(fleets: Sequence[Luck], rounds: int, steps: int, progress: Progress) -> FleetReport:
    """Run the same job on several fleets, one after the other."""
    report = FleetReport(device=describe_device())
    for luck in fleets:
        with tempfile.TemporaryDirectory(prefix="embrace-fleet-") as folder, Processes(Path(folder)) as processes:
            report.rows.append(_Run(Path(folder), processes, luck, rounds, steps, progress).run())
    return report


class _Run:
    """One fleet from its start to the end of its job."""

    def __init__(
        self, folder: Path, processes: Processes, luck: Luck, rounds: int, steps: int, progress: Progress
    ) -> None:
        self.folder = folder
        self.processes = processes
        self.luck = luck
        self.rounds = rounds
        self.steps = steps
        self.progress = progress
        self.killed, self.wrong, self.slow = luck.kinds

    def run(self) -> FleetRow:
        with self._serve() as admin:
            return self._measure(admin)

    def _measure(self, admin: Client) -> FleetRow:
        self._join(admin)
        file = self.folder / "job.toml"
        file.write_text(JOB.format(bundle=(SHIPPED / "model").as_posix(), rounds=self.rounds, steps=self.steps))
        before, began = load_average(), time.monotonic()
        with _slowed([self.processes.running[name].pid for name in self.slow]):
            job = admin.create(file)
            self._follow(admin, job)
        seconds = time.monotonic() - began
        rows = admin.call("GET", f"/jobs/{job}/rounds")
        kinds = [event["kind"] for event in admin.watch(job)]
        return FleetRow(
            self.luck,
            seconds,
            [row["closed_at"] - row["opened_at"] for row in rows],
            sum(row["summary"]["updates"] for row in rows),
            kinds.count("DeviceBenched"),
            kinds.count("TaskFailed"),
            (before, load_average()),
        )

    def _serve(self) -> Client:
        data = self.folder / COORDINATOR
        self.processes.start(COORDINATOR, "serve", "--data", str(data), "--port", "0", "--devices", "0")
        self.url = wait_for(
            lambda: served_at(self.processes.output(COORDINATOR)), STARTS, "the coordinator did not start"
        )
        return Client(self.url, (data / "admin.token").read_text().strip())

    def _join(self, admin: Client) -> None:
        """Start the agents and wait until all of them wait for a task."""
        token = admin.call("POST", "/enrolments", json={"uses": self.luck.agents, "seconds": 3600})["token"]
        with np.load(DIGITS) as file:
            x, y = file["x"].astype(np.float32) / 16, file["y"].astype(np.int64)
        names = self.luck.names(0, self.luck.agents)
        for number, name in enumerate(names):
            self.progress(f"start {self.luck.name}", number, len(names))
            rows = np.arange(number * SAMPLES, (number + 1) * SAMPLES) % len(y)
            mine = x[rows, ..., :5] if name in self.wrong else x[rows]  # five columns of eight
            np.savez(self.folder / f"{name}.npz", x=mine, y=y[rows])
            self._start(name, token)
        wait_for(lambda: _waiting(admin, len(names)), STARTS, "not every agent has enrolled")

    def _start(self, name: str, token: str) -> None:
        options = ["--data", str(self.folder / f"{name}.npz"), "--work", str(self.folder / name), "--name", name]
        options += ["--tier", "strong", "--engine", "portable"]
        self.processes.start(name, "agent", "--server", self.url, *options, EMBRACE_TOKEN=token)

    def _follow(self, admin: Client, job: str) -> None:
        """Watch until the job is over; kill a device in each of the first rounds but the first."""
        version, moved, doomed = -1, time.monotonic(), list(self.killed)
        while True:
            found = admin.call("GET", f"/jobs/{job}")
            if found["state"] == "failed":
                raise EmbraceError(f"the job failed: {found['message']}")
            if found["state"] == "done":
                return
            if found["version"] > version:
                version, moved = found["version"], time.monotonic()
                self.progress(f"rounds of {self.luck.name}", version, self.rounds)
            for victim in _at_work(found, self._ids(admin, doomed)) if len(self.killed) - len(doomed) < version else ():
                self.processes.running[victim].kill()
                doomed.remove(victim)
                break
            if time.monotonic() - moved > STANDS_STILL:
                raise EmbraceError(f"version {version} is the last for {STANDS_STILL:.0f} s: {found['waiting']}")
            time.sleep(POLL)

    def _ids(self, admin: Client, names: Collection[str]) -> dict[str, str]:
        if not names:
            return {}
        return {row["id"]: row["name"] for row in admin.call("GET", "/devices") if row["name"] in names}


def _at_work(job: dict[str, Any], names: dict[str, str]) -> list[str]:
    """List those of some devices that hold a task now."""
    slots = (job["round"] or {}).get("body", {}).get("slots", [])
    held = {slot["member"]["device"] for slot in slots if slot["state"] == "leased"}
    return [name for device, name in names.items() if device in held]


def _waiting(admin: Client, count: int) -> bool | None:
    """Whether so many devices have enrolled and asked for a task."""
    rows = admin.call("GET", "/devices")
    asked = [row for row in rows if row["seen_at"] > row["enrolled_at"] and row["state"] == "waiting"]
    return True if len(asked) >= count else None


def wait_for(ready: Callable[[], Any], seconds: float, why: str) -> Any:
    """Ask until there is an answer; EmbraceError if there is none in time."""
    until = time.monotonic() + seconds
    while (found := ready()) is None:
        if time.monotonic() > until:
            raise EmbraceError(f"{why} within {seconds:.0f} s")
        time.sleep(POLL)
    return found


@contextmanager
def _slowed(processes: Collection[int]) -> Iterator[None]:
    """Let processes run for a small part of the time only while the block runs."""
    if processes and not hasattr(signal, "SIGSTOP"):
        raise EmbraceError("slow devices are stopped and continued by signals, which this system does not have")
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            for number, seconds in ((signal.SIGSTOP, STOPS), (signal.SIGCONT, RUNS)):
                _signal(processes, number)
                over.wait(seconds)
        _signal(processes, signal.SIGCONT)

    thread = threading.Thread(target=turn, name="slow", daemon=True)
    if processes:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if processes:
            thread.join()


def _signal(processes: Collection[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
