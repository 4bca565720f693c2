"""A large fleet and one coordinator: devices check in over real sockets, are told to come back, and some train.

    python -m bench.server.fleet --devices 10000 --selected 1000 --rounds 5 --out fleet.json

The devices are coroutines of a few processes and train nothing: they fetch the weights, let a while pass in which they
send heartbeats, and send an update. Every check-in asks with `wait=0` first, as an agent does that starts, so that
what it takes to be answered can be told from what a device is let wait. All times are of the devices.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from bench.server.load import Answer, Connection, LoadError
from bench.server.measure import check_result, machine, update_headers
from bench.server.model import vectors, write_bundle
from bench.server.process import cpu_seconds, first_words, process_memory, running
from bench.server.services import postgresql
from coordinator.presence import PRESENCE
from edge_runtime.system import HERE
from embrace.client import Client
from federation.errors import EmbraceError, InputError
from federation.job import plan_from, plan_to
from federation.wire import encode_layers

MOST_DEVICES, MOST_SECONDS = 20_000, 1800.0
MOST_BETWEEN = 4.0  # seconds between heartbeats, which the lease would have every ten
CONTROL, TRANSFER = 1 << 12, 1 << 17  # bytes that are read at once
MEMORY, LATENCY = 1e9, 1.0  # the bars: bytes of the server, seconds of a control request
KINDS = ("check-in", "heartbeat", "job")  # control requests
CURVE = (0, 1, 2, 5, *range(10, 91, 5), *range(92, 100), 99.5, 99.9, 100)  # % of the requests


@dataclass(frozen=True)
class Times:
    """How long devices take, in seconds."""

    arrive: float  # in which all come for the first time
    least: float  # that a device trains
    most: float


@dataclass
class Seen:
    """What devices, or one process of them, have seen."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind of request
    counts: Counter[str] = field(default_factory=Counter)
    cpu: float = 0.0

    def add(self, kind: str, began: float) -> None:
        self.seconds.setdefault(kind, []).append(time.perf_counter() - began)

    def join(self, other: Seen) -> None:
        for kind, seconds in other.seconds.items():
            self.seconds.setdefault(kind, []).extend(seconds)
        self.counts += other.counts
        self.cpu += other.cpu


class Fleet:
    """The devices of one process."""

    def __init__(self, port: int, body: bytes, headers: str, times: Times, stop: Event) -> None:
        self._port = port
        self._times = times
        self._body = memoryview(body)
        self._headers = headers
        self._stop = stop
        self.seen = Seen()

    async def run(self, tokens: Sequence[str]) -> None:
        devices = [asyncio.ensure_future(self._live(token)) for token in tokens]
        while not self._stop.is_set():
            await asyncio.sleep(0.2)
        for device in devices:
            device.cancel()
        await asyncio.gather(*devices, return_exceptions=True)

    async def _live(self, token: str) -> None:
        await asyncio.sleep(random.uniform(0, self._times.arrive))
        while True:
            try:
                told = await self._check_in(token)
            except (OSError, LoadError):
                self.seen.counts["lost connections"] += 1
                told = 1.0
            await asyncio.sleep(told * random.uniform(1.0, 1.01))

    async def _check_in(self, token: str) -> float:
        """Ask for a task and do it; return in how many seconds to come back."""
        for wait in (0, 30):
            async with Connection(self._port, token, CONTROL) as server:
                began = time.perf_counter()
                answer = await server.try_to(f"POST /v1/tasks/next?wait={wait}")
            if not wait:
                self.seen.add("check-in", began)
            if answer.status == 200:
                return await self._work(token, answer)
            if answer.status != 204:
                self.seen.counts[f"check-ins answered {answer.status}"] += 1
                return 2.0
            if "retry-after" in answer.headers:
                self.seen.counts["told to come back"] += 1
                return float(answer.headers["retry-after"])
            self.seen.counts["waited"] += wait > 0
        return 0.0

    async def _work(self, token: str, offer: Answer) -> float:
        task = offer.json()
        beating = asyncio.ensure_future(self._beat(token, task["id"], float(offer.headers["embrace-lease"]) / 3))
        try:
            async with Connection(self._port, token, TRANSFER) as server:
                began = time.perf_counter()
                await server.ask(f"GET /v1/jobs/{task['job']}/versions/{task['version']}/weights")
                self.seen.add("weights", began)
            await asyncio.sleep(random.uniform(self._times.least, self._times.most))
            async with Connection(self._port, token, CONTROL) as server:
                began = time.perf_counter()
                answer = await server.try_to(f"PUT /v1/tasks/{task['id']}/update?next=1", self._headers, self._body)
                self.seen.add("update", began)
        finally:
            beating.cancel()
        self.seen.counts[f"updates answered {answer.status}"] += 1
        if answer.status == 201 and answer.json()["next"] is not None:
            return await self._work(token, Answer(200, json.dumps(answer.json()["next"]).encode(), 0, answer.headers))
        return float(answer.headers.get("retry-after", 0.0))

    async def _beat(self, token: str, task: str, seconds: float) -> None:
        seconds = min(seconds, MOST_BETWEEN)
        await asyncio.sleep(random.uniform(0, seconds))
        while True:
            with contextlib.suppress(OSError, LoadError):
                async with Connection(self._port, token, CONTROL) as server:
                    began = time.perf_counter()
                    answer = await server.try_to(f"POST /v1/tasks/{task}/heartbeat")
                self.seen.add("heartbeat", began)
                self.seen.counts[f"heartbeats answered {answer.status}"] += 1
            await asyncio.sleep(seconds)


def run_fleet(
    port: int, tokens: Sequence[str], body: bytes, headers: str, times: Times, stop: Event, answer: Any
) -> None:
    """Run devices until told to stop, and say what they saw."""
    HERE.allow_open_files(len(tokens) + 256)
    fleet = Fleet(port, body, headers, times, stop)
    asyncio.run(fleet.run(tokens))
    fleet.seen.cpu = time.process_time()
    answer.put(fleet.seen)


@dataclass
class Watch:
    """The server's process, looked at once a second."""

    pid: int
    memory: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)  # that are open: connections, and bodies that arrive

    def look(self) -> None:
        self.memory.append(process_memory(self.pid, "VmRSS") or 0)
        self.cpu.append(cpu_seconds(self.pid))
        self.files.append(len(os.listdir(f"/proc/{self.pid}/fd")))


def measure(
    devices: int,
    selected: int,
    parameters: int,
    rounds: int,
    processes: int,
    times: Times,
    settings: Mapping[str, str],
    progress: Callable[[str], None] = lambda what: None,
    *,
    on_postgresql: bool = False,
) -> dict[str, Any]:
    """Run rounds with a fleet; return every figure. PostgreSQL is started for it, if wanted."""
    if not 1 <= selected <= devices <= MOST_DEVICES:
        raise InputError(f"expected 1 <= selected <= devices <= {MOST_DEVICES:,}, got {selected} and {devices}")
    weights, update = vectors(parameters)
    with tempfile.TemporaryDirectory(prefix="embrace-bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        manifest = write_bundle(folder / "bundle", weights)
        body = b"".join(bytes(part) for part in encode_layers(manifest.space, 0, update))
        command = ["-m", "embrace", "serve", "--data", str(folder / "data"), "--port", "0", "--devices", "0"]
        stores: dict[str, str] = {}
        if on_postgresql:
            database, stores["database"] = postgresql(folder)
            stack.callback(database.kill)
            database.wait()
            stores["blobs"] = str(folder / "blobs")
            (folder / "blobs").mkdir()
        given = {"requests_per_second": "1000000", **stores, **settings}
        own = {f"EMBRACE_{key.upper()}": value for key, value in given.items()}
        process = stack.enter_context(running(folder, command, **own))
        url = first_words(process, folder, lambda line: line.split()[1] if line.startswith("coordinator: ") else "")
        port = int(url.rsplit(":", 1)[1])
        admin = Client(url, (folder / "data" / "admin.token").read_text().strip())
        stack.callback(admin.close)
        bundle = admin.send_bundle(folder / "bundle")
        tokens = asyncio.run(_enrol(port, admin, devices))
        progress(f"enrolled {devices} devices")
        time.sleep(PRESENCE)  # a device that has just enrolled would be invited before it comes
        plan = plan_from({"bundle": "bench", "num_rounds": rounds, "participate": {"count": selected}})
        job = str(admin.call("POST", "/jobs", json={"bundle": bundle, "plan": plan_to(plan)})["id"])
        watch, seen = Watch(process.pid), Seen()
        watch.look()
        began = time.perf_counter()
        with _fleets(port, tokens, body, update_headers(body), processes, times, seen):
            while True:
                asked = time.perf_counter()
                found = _ask(admin, job, seen)
                watch.look()
                progress(f"{asked - began:.0f} s: version {found.get('version')}, {watch.memory[-1] / 1e6:.0f} MB")
                if found.get("state", "running") != "running" or asked - began > MOST_SECONDS:
                    break
                time.sleep(1.0)
        took = time.perf_counter() - began
        rows = admin.call("GET", f"/jobs/{job}/rounds")
        result = folder / "result"
        admin.save_weights(job, rounds, result)
        check_result(np.fromfile(result, "<f4", offset=len(body) - 4 * parameters), weights, update, rounds)
    return {
        "devices": devices,
        "selected": selected,
        "times": asdict(times),
        "parameters": parameters,
        "settings": dict(settings),
        "database": "PostgreSQL" if on_postgresql else "SQLite",
        "machine": machine(None),
        "load": _load(),
        "seconds": took,
        "rounds": [
            {"seconds": row["closed_at"] - row["opened_at"], "updates": row["summary"].get("updates")} for row in rows
        ],
        "server": {
            "cpu": watch.cpu[-1] - watch.cpu[0],
            "idle": watch.memory[0],
            "peak": max(watch.memory),
            "files": max(watch.files),
            "by_second": asdict(watch) | {"pid": None},
        },
        "fleet_cpu": seen.cpu,
        "counts": dict(seen.counts),
        "requests": {kind: quantiles(seconds) for kind, seconds in sorted(seen.seconds.items())},
    }


@contextlib.contextmanager
def _fleets(
    port: int, tokens: Sequence[str], body: bytes, headers: str, processes: int, times: Times, seen: Seen
) -> Iterator[None]:
    """Let devices live in processes while the block runs; afterwards `seen` has what they saw."""
    context = multiprocessing.get_context("spawn")
    stop, answers = context.Event(), context.Queue()
    started = [
        context.Process(target=run_fleet, args=(port, tokens[first::processes], body, headers, times, stop, answers))
        for first in range(processes)
    ]
    for process in started:
        process.start()
    try:
        yield
        stop.set()
        for _ in started:
            seen.join(answers.get(timeout=60))
    finally:
        stop.set()
        for process in started:
            process.join(20)
            if process.is_alive():
                process.kill()


def _ask(admin: Client, job: str, seen: Seen) -> dict[str, Any]:
    """Ask how a job is, as an administrator does; nothing if the server is busy."""
    asked = time.perf_counter()
    try:
        found: dict[str, Any] = admin.call("GET", f"/jobs/{job}")
    except EmbraceError:
        seen.counts["administrator told to try again"] += 1
        return {}
    seen.add("job", asked)
    return found


async def _enrol(port: int, admin: Client, devices: int) -> list[str]:
    """Enrol new devices, a few at a time, and return their tokens."""
    invitation = str(admin.call("POST", "/enrolments", json={"uses": devices, "seconds": 3600})["token"])
    numbers = iter(range(devices))

    async def some() -> list[str]:
        found = []
        async with Connection(port, invitation, CONTROL) as server:
            for number in numbers:
                body = memoryview(json.dumps({"name": f"device {number}"}).encode())
                answer = await server.ask("POST /v1/devices", "Content-Type: application/json\r\n", body)
                found.append(str(answer.json()["token"]))
        return found

    return [token for found in await asyncio.gather(*(some() for _ in range(8))) for token in found]


def _load() -> list[float]:
    """Processes that wanted a processor, on average over the last 1, 5 and 15 minutes; empty where it is not known."""
    with contextlib.suppress(OSError):
        return [float(number) for number in Path("/proc/loadavg").read_text().split()[:3]]
    return []


def quantiles(seconds: Sequence[float]) -> dict[str, Any]:
    """Count, median, 99th of 100, longest, and a curve of them all: (% of the requests, seconds)."""
    p50, p99 = np.percentile(seconds, (50, 99))
    curve = [[share, float(np.percentile(seconds, share))] for share in CURVE]
    return {"count": len(seconds), "p50": float(p50), "p99": float(p99), "most": max(seconds), "curve": curve}


def table(found: Mapping[str, Any]) -> str:
    """Write the figures for people."""
    server, settled = found["server"], [row["seconds"] for row in found["rounds"]]
    lines = [
        f"{found['devices']:,} devices, {found['selected']:,} selected, {found['parameters']:,} parameters",
        f"rounds: {', '.join(f'{seconds:.1f} s' for seconds in settled)}; updates "
        + ", ".join(str(row["updates"]) for row in found["rounds"]),
        f"server: {server['cpu']:.1f} s of processor time in {found['seconds']:.1f} s; "
        f"memory {server['idle'] / 1e6:.0f} MB idle, {server['peak'] / 1e6:.0f} MB at most; "
        f"{server['files']} open files; devices {found['fleet_cpu']:.1f} s",
        ", ".join(f"{what}: {count}" for what, count in sorted(found["counts"].items())),
    ]
    for kind, own in found["requests"].items():
        facts = f"{own['count']:>7} times, median {own['p50'] * 1e3:7.1f} ms, p99 {own['p99'] * 1e3:7.1f} ms"
        lines.append(f"{kind:>10} {facts}, longest {own['most'] * 1e3:7.1f} ms")
    slowest = max(found["requests"][kind]["p99"] for kind in KINDS)
    lines.append(f"memory under 1 GB: {'met' if server['peak'] < MEMORY else 'missed'}")
    lines.append(f"p99 of control requests under a second: {'met' if slowest < LATENCY else 'missed'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.server.fleet", description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--selected", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=272_762)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arrive", type=float, default=60.0, help="seconds in which all come for the first time")
    parser.add_argument("--training", default="2,10", help="seconds that a device takes, at least and at most")
    parser.add_argument("--processes", type=int, default=2, help="of simulated devices")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server")
    parser.add_argument("--postgresql", action="store_true", help="in place of SQLite; it is started for this")
    parser.add_argument("--out", type=Path, help="a file for every figure, as JSON")
    parser.add_argument("--plot", type=Path, help="a file for a picture of them")
    given = parser.parse_args()
    try:
        settings = dict(pair.split("=", 1) for pair in given.set)
        sizes = (given.devices, given.selected, given.parameters, given.rounds, given.processes)
        times = Times(given.arrive, *map(float, given.training.split(",")))
        progress = partial(print, end="", file=sys.stderr)
        found = measure(*sizes, times, settings, lambda what: progress(f"\r{what:<60}"), on_postgresql=given.postgresql)
        print(file=sys.stderr)
    except (EmbraceError, TypeError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.plot is not None:
        from bench.server.fleet_picture import plot_fleet  # which needs matplotlib

        plot_fleet(found, LATENCY, given.plot)
    print(table(found))


if __name__ == "__main__":
    main()
