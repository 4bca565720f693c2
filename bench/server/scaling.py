"""What a second coordinator brings: rounds on PostgreSQL and a shared folder, with one process and with several.

Each case has as many cores as processes, for all that takes part: the processes, PostgreSQL and the devices. So the
best that can come out is the ratio of the numbers of processes. Cases take turns, each with a database of its own that
does not wait for the disk: the processors are what limits.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.server.load import Load, embrace_round
from bench.server.measure import check_result, enrol, update_headers
from bench.server.model import vectors, write_bundle
from bench.server.process import cpu_seconds, first_words, run_round, running
from bench.server.services import postgresql
from embrace.client import Client
from federation.errors import InputError
from federation.job import plan_from, plan_to
from federation.wire import encode_layers

Progress = Callable[[str, int, int], None]
BAR = 1.6  # updates per second of two processes, in those of one
MOST_PROCESSES = 16


@dataclass(frozen=True)
class ScalingRow:
    """Rounds of one number of processes; CPU in seconds for an update."""

    processes: int
    devices: int
    parameters: int
    seconds: list[float]  # of each round
    servers: list[float]  # CPU of each process
    database: float  # CPU of PostgreSQL
    devices_cpu: float  # CPU of the simulated devices
    load: float  # of the machine, over the last minute, when the case ended

    @property
    def round_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Updates per second."""
        return self.devices / self.round_seconds

    @property
    def cpu(self) -> float:
        """CPU of all that takes part, for an update."""
        return sum(self.servers) + self.database + self.devices_cpu

    @property
    def rate_by_cpu(self) -> float:
        """Updates per second that the cores of the case would do if they did nothing else."""
        return self.processes / self.cpu


def bench_scaling(
    processes: Sequence[int],
    devices: int,
    parameters: int,
    *,
    rounds: int,
    at_once: int,
    folder: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[ScalingRow]:
    """Measure rounds with each number of processes, in turns: one round of each case after the other."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not processes or min(processes) < 1 or max(processes) > min(len(cores), MOST_PROCESSES):
        raise InputError(f"--processes: expected numbers from 1 to the {len(cores)} cores, got {list(processes)}")
    with tempfile.TemporaryDirectory(prefix="embrace-bench-", dir=folder) as made, contextlib.ExitStack() as stack:
        Path(made).chmod(0o755)
        cases = []
        for count in processes:
            progress(f"{count} processes: start", 0, rounds)
            place = Path(made) / str(count)
            place.mkdir()
            with _cores(cores[-count:]):  # what is started here stays on them
                cases.append(stack.enter_context(_case(place, count, devices, parameters, rounds, at_once)))
        for version in range(rounds):
            for case in cases:
                progress(f"{case.count} processes", version, rounds)
                with _cores(cores[-case.count :]):
                    case.round(version)
        progress("done", rounds, rounds)
        return [case.row(parameters) for case in cases]


class _Case:
    """Some processes on one database, with a job, and what their rounds took."""

    def __init__(
        self, pids: Sequence[int], ports: Sequence[int], postmaster: int, tokens: Sequence[str], load: Load
    ) -> None:
        self.count = len(pids)
        self._pids = pids
        self._ports = ports
        self._postmaster = postmaster
        self._tokens = tokens
        self._load = load
        self._headers = update_headers(load.body)
        self._seconds: list[float] = []
        self._used: list[list[float]] = []  # CPU seconds of each round: of the processes, of PostgreSQL, of the devices

    def round(self, version: int) -> None:
        before, began = self._cpu(), time.perf_counter()
        run_round(embrace_round(self._ports, self._load, self._tokens, self._headers, version))
        self._seconds.append(time.perf_counter() - began)
        self._used.append([after - then for after, then in zip(self._cpu(), before)])

    def _cpu(self) -> list[float]:
        return [*map(cpu_seconds, self._pids), family_seconds(self._postmaster), time.process_time()]

    def row(self, parameters: int) -> ScalingRow:
        devices = len(self._tokens)
        *servers, database, own = (statistics.median(used) / devices for used in zip(*self._used))
        load = os.getloadavg()[0]
        return ScalingRow(self.count, devices, parameters, self._seconds, servers, database, own, load)


@contextlib.contextmanager
def _case(place: Path, count: int, devices: int, parameters: int, rounds: int, at_once: int) -> Iterator[_Case]:
    weights, update = vectors(parameters)
    manifest = write_bundle(place / "bundle", weights)
    load = Load(b"".join(bytes(part) for part in encode_layers(manifest.space, 0, update)), at_once)
    blobs = place / "blobs"
    blobs.mkdir()
    with contextlib.ExitStack() as stack:
        server, database = postgresql(place)
        server.command = [*server.command, "-cfsync=off"]
        stack.callback(server.kill)
        server.wait()
        assert server.process is not None
        pids, urls = [], []
        for number in range(count):
            own = place / str(number)
            own.mkdir()
            command = ["-m", "embrace", "serve", "--data", str(own / "data"), "--port", "0", "--devices", "0"]
            given = ["--database", database, "--blobs", str(blobs)]
            process = stack.enter_context(running(own, [*command, *given], EMBRACE_REQUESTS_PER_SECOND="1000000"))
            pids.append(process.pid)
            urls.append(first_words(process, own, lambda line: line.split()[1] if line[:12] == "coordinator:" else ""))
        admin = Client(urls[0], (place / "0" / "data" / "admin.token").read_text().strip())
        stack.callback(admin.close)
        everyone = {"count": devices, "quorum": 1.0, "lateness": 1000.0, "grace": 60.0}  # however busy the machine is
        bounds = {"lease": 3600.0, "offer": 3600.0}
        plan = plan_from({"bundle": "bench", "num_rounds": rounds + 1, "participate": everyone, "bounds": bounds})
        bundle = admin.send_bundle(place / "bundle")
        tokens = enrol(urls[0], admin, devices)
        job = str(admin.call("POST", "/jobs", json={"bundle": bundle, "plan": plan_to(plan)})["id"])
        ports = [int(url.rsplit(":", 1)[1]) for url in urls]
        yield _Case(pids, ports, server.process.pid, tokens, load)
        result = place / "result"
        admin.save_weights(job, rounds, result)
        check_result(np.fromfile(result, "<f4", offset=len(load.body) - 4 * parameters), weights, update, rounds)


@contextlib.contextmanager
def _cores(cores: Sequence[int]) -> Iterator[None]:
    """Let this process, and what it starts, run on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def family_seconds(pid: int) -> float:
    """CPU of a process and all that it has started, also of those that have ended."""
    found = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            own, fields = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            if own == pid:
                found += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            elif int(fields[1]) == pid:
                found += cpu_seconds(own)
    return found
