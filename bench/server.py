"""What a round costs the coordinator: many simulated devices over real sockets, no training.

For every number of devices and of parameters the baseline, the coordinator and, where it is installed, Flower take
turns, each in a fresh process. The model is synthetic: random weights, graphs that nobody runs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from bench.device import describe_device
from bench.server_flower import FlowerMissing, flower_version, run_flower
from bench.server_load import Load, LoadError, baseline_round, embrace_round
from coordinator.admin_client import AdminClient
from coordinator.plan import plan_from, plan_to
from federation.bundle_files import file_ref
from federation.errors import EmbraceError, InputError
from federation.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Boundary,
    FileRef,
    Layer,
    Loss,
    Manifest,
    Source,
    TensorSpec,
    dumps,
)  # fmt: skip
from federation.space import Parameter, Vector
from federation.weights import write_weights
from federation.wire import encode_layers

Progress = Callable[[str, int, int], None]
Name = Literal["baseline", "embrace", "flower"]

LAYERS = 8
SEED = 1
SPARE = 1 << 30  # bytes of the disk that are left alone
ROUND_LIMIT, START_LIMIT, END_LIMIT = 600.0, 60.0, 10.0  # seconds
SLOWER, MODELS, FLOWER_CPU, FLOWER_TIME = 3.0, 4, 0.1, 0.05  # the bars
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One server under one load; lists have an entry per round."""

    server: Name
    devices: int
    parameters: int
    seconds: list[float]
    cpu: list[float]  # seconds of the server's processes
    idle: int | None  # bytes, with all devices known and the job created
    peak: int | None  # bytes

    @property
    def round_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(self.cpu)

    @property
    def rate(self) -> float:
        """Updates per second."""
        return self.devices / self.round_seconds

    @property
    def bytes_per_second(self) -> float:
        """Weights and updates, both ways."""
        return 8 * self.parameters * self.rate

    @property
    def growth(self) -> int | None:
        """Bytes on top of the idle process."""
        return None if self.peak is None or self.idle is None else self.peak - self.idle

    @property
    def models(self) -> float | None:
        """The same in models."""
        return None if self.growth is None else self.growth / (4 * self.parameters)


@dataclass(frozen=True)
class Bar:
    """A promise and what was measured."""

    what: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


@dataclass
class ServerReport:
    """What was measured, how, on what, and what could not be."""

    at_once: int
    device: dict[str, str]
    rows: list[Row]
    notes: list[str]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> ServerReport:
        """Back from what `--json` printed."""
        rows = [Row(**{key.name: case[key.name] for key in fields(Row)}) for case in facts["cases"]]
        return cls(facts["at_once"], facts["device"], rows, facts["notes"])

    def row(self, server: Name, devices: int, parameters: int) -> Row | None:
        wanted = (server, devices, parameters)
        return next((row for row in self.rows if (row.server, row.devices, row.parameters) == wanted), None)

    def ratio(self, row: Row, what: Literal["round_seconds", "cpu_seconds"], other: Name) -> float | None:
        """A server relative to another one under the same load."""
        base = self.row(other, row.devices, row.parameters)
        return float(getattr(row, what) / getattr(base, what)) if base and getattr(base, what) else None

    def bars(self) -> list[Bar]:
        """The project's promises about the coordinator."""
        found = []
        for row in self.rows:
            if row.server != "embrace":
                continue
            load = f"{row.devices} devices, {row.parameters:,} parameters"
            candidates = (
                ("round / baseline", SLOWER, self.ratio(row, "round_seconds", "baseline")),
                ("peak memory above idle, in models", MODELS, row.models),
                ("server CPU / Flower", FLOWER_CPU, self.ratio(row, "cpu_seconds", "flower")),
                ("round / Flower", FLOWER_TIME, self.ratio(row, "round_seconds", "flower")),
            )
            found += [Bar(f"{load}: {what}", limit, value) for what, limit, value in candidates if value is not None]
        return found


def bench_server(
    devices: Sequence[int],
    parameters: Sequence[int],
    *,
    rounds: int = 1,
    at_once: int = 64,
    folder: Path | None = None,
    flower_python: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> ServerReport:
    """Measure every combination. Files are written to a folder that is removed at the end."""
    for name, numbers, most in (("devices", devices, 10_000), ("parameters", parameters, 10**9)):
        if not numbers or min(numbers) < 1 or max(numbers) > most:
            raise InputError(f"{name}: expected numbers from 1 to {most:,}, got {list(numbers)}")
    notes: list[str] = []
    servers = _servers(flower_python, notes)
    with tempfile.TemporaryDirectory(prefix="embrace-bench-", dir=folder) as made:
        _check_disk(Path(made), max(devices), max(parameters))
        cases = [(p, n, server) for p in parameters for n in devices for server in servers]
        rows = []
        for done, (size, count, server) in enumerate(cases):
            progress(f"{server}, {count} devices, {size:,} parameters", done, len(cases))
            with tempfile.TemporaryDirectory(dir=made) as own:
                try:
                    rows.append(_measure(server, Path(own), count, size, rounds, at_once, flower_python))
                except FlowerMissing as error:
                    notes.append(f"Flower, {count} devices, {size:,} parameters: {error}")
        progress("done", len(cases), len(cases))
    return ServerReport(at_once, _machine(flower_python if "flower" in servers else None), rows, notes)


def _servers(flower_python: Path | None, notes: list[str]) -> list[Name]:
    try:
        flower_version(flower_python)
    except FlowerMissing as error:
        notes.append(f"Flower is not compared with: {error}")
        return ["baseline", "embrace"]
    return ["baseline", "embrace", "flower"]


def _machine(flower_python: Path | None) -> dict[str, str]:
    found = {key: value for key, value in describe_device().items() if "torch" not in key and "onnx" not in key}
    return {**found, "flwr": flower_version(flower_python)} if flower_python else found


def _check_disk(folder: Path, devices: int, parameters: int) -> None:
    """A round keeps every body until it is over."""
    needed = 4 * parameters * (devices + 6) + SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{devices} updates of {parameters:,} parameters need {needed / 1e9:.1f} GB of disk; {folder.parent} has "
            f"{free / 1e9:.1f} GB: take fewer devices, or another disk with --folder"
        )


def _measure(
    server: Name, folder: Path, devices: int, parameters: int, rounds: int, at_once: int, flower_python: Path | None
) -> Row:
    if server == "flower":
        assert flower_python is not None
        found = run_flower(flower_python, folder, devices, parameters, rounds)
        return Row(server, devices, parameters, found.seconds, found.cpu, found.idle, found.peak)
    run = _run_baseline if server == "baseline" else _run_embrace
    return run(folder, devices, parameters, rounds, at_once)


# --- the servers -----------------------------------------------------------------------------------------------------


def _run_baseline(folder: Path, devices: int, parameters: int, rounds: int, at_once: int) -> Row:
    weights, update = _vectors(parameters)
    weights.astype("<f4").tofile(folder / "weights")
    load = Load(update.astype("<f4").tobytes(), at_once)
    command = ["-m", "bench.server_baseline", str(folder), str(parameters)]
    with _process(folder, command) as process:
        port = int(_line(process, folder, lambda line: line.strip()))
        watch = Watch(process.pid)
        for _ in range(rounds):
            watch.round(baseline_round(port, load, devices))
        _check_result(np.fromfile(folder / "weights", "<f4"), weights, update, rounds)
        return watch.row("baseline", devices, parameters)


def _run_embrace(folder: Path, devices: int, parameters: int, rounds: int, at_once: int) -> Row:
    weights, update = _vectors(parameters)
    manifest = write_bundle(folder / "bundle", weights)
    load = Load(b"".join(bytes(part) for part in encode_layers(manifest.space, 0, update)), at_once)
    command = ["-m", "cli.main", "serve", "--data", str(folder / "data"), "--port", "0", "--devices", "0"]
    # The devices of this bench come from one address with one enrolment token, all at once.
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(_process(folder, command, EMBRACE_REQUESTS_PER_SECOND="1000000"))
        url = _line(process, folder, lambda line: line.split()[1] if line.startswith("coordinator: ") else "")
        port = int(url.rsplit(":", 1)[1])
        token = (folder / "data" / "admin.token").read_text().strip()
        admin = AdminClient(url, token)
        stack.callback(admin.close)
        plan = plan_from({"bundle": "bench", "num_rounds": rounds, "participate": {"count": devices}})
        bundle = admin.send_bundle(folder / "bundle")
        tokens = _enrol(url, admin, devices)
        job = str(admin.call("POST", "/jobs", json={"bundle": bundle, "plan": plan_to(plan)})["id"])
        headers = _update_headers(load.body)
        watch = Watch(process.pid)
        for version in range(rounds):
            watch.round(embrace_round(port, load, tokens, headers, token, job, version))
        row = watch.row("embrace", devices, parameters)
        result = folder / "result"
        admin.save_weights(job, rounds, result)
        _check_result(np.fromfile(result, "<f4", offset=len(load.body) - 4 * parameters), weights, update, rounds)
        return row


def _enrol(url: str, admin: AdminClient, devices: int) -> list[str]:
    """Tokens of new devices; each of them enrols itself."""
    invitation = admin.call("POST", "/enrolments", json={"uses": devices, "seconds": 3600})["token"]
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {invitation}"}, timeout=30) as http:
        answers = [http.post("/v1/devices", json={"name": f"device {number}"}) for number in range(devices)]
    return [str(answer.raise_for_status().json()["token"]) for answer in answers]


def _update_headers(body: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return f'Embrace-Report: {{"samples": 1}}\r\nContent-Digest: sha-256=:{digest}:\r\n'


def _vectors(parameters: int) -> tuple[Vector, Vector]:
    """(weights, update); the same everywhere."""
    chance = np.random.default_rng(SEED)
    weights = chance.standard_normal(parameters, np.float32)
    return weights, 0.01 * chance.standard_normal(parameters, np.float32)


def _check_result(found: Vector, weights: Vector, update: Vector, rounds: int) -> None:
    """All updates are the same, so their mean is known: a server that is quick and wrong does not count."""
    if not np.allclose(found, weights + rounds * update, atol=1e-5 * rounds):
        raise LoadError("the weights after the round are not what the updates make of them")


def write_bundle(directory: Path, weights: Vector) -> Manifest:
    """A bundle of as many parameters, in a few dense layers; its graphs are words."""
    directory.mkdir(parents=True)
    one = TensorSpec("float32", (1,))

    def graph(name: str) -> FileRef:
        (directory / name).write_text(f"{name}: nobody runs this")
        return file_ref(directory, name)

    edges = np.linspace(0, weights.size, min(LAYERS, weights.size) + 1).astype(int)
    layers = tuple(
        Layer(f"dense{k}", one, one, _parameters(k, int(size)), 1, int(size), 0, graph(f"dense{k}.onnx"))
        for k, size in enumerate(np.diff(edges))
    )
    boundary = Boundary("dense0", 0, None, len(layers), graph("train.onnx"), ())
    missing = FileRef(WEIGHTS_NAME, "0" * 64, 0)
    manifest = Manifest(
        1, "bench", Source("onnx", "none"), 17, Loss("mse"), one, one, one, None, 1, False, layers, (boundary,),
        {"strong": "dense0"}, missing,
    )  # fmt: skip
    write_weights(directory / WEIGHTS_NAME, manifest.space, weights)
    manifest = replace(manifest, weights=file_ref(directory, WEIGHTS_NAME))
    (directory / MANIFEST_NAME).write_text(dumps(manifest))
    return manifest


def _parameters(layer: int, size: int) -> tuple[Parameter, ...]:
    """A weight and a bias."""
    bias = size // 100
    shapes = {"weight": (size - bias,), "bias": (bias,)} if bias else {"weight": (size,)}
    return tuple(Parameter(f"dense{layer}.{name}", "weight", shape) for name, shape in shapes.items())


# --- processes -------------------------------------------------------------------------------------------------------


class Watch:
    """What a server process uses, from /proc where there is one; else the clock only."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._idle = process_memory(pid, "VmRSS")
        self._seconds: list[float] = []
        self._cpu: list[float] = []

    def round(self, round: Awaitable[None]) -> None:
        cpu, began = cpu_seconds(self._pid), time.perf_counter()
        try:
            asyncio.run(_in_time(round))
        except OSError as error:
            raise LoadError(f"a device lost its connection: {error}") from None
        self._seconds.append(time.perf_counter() - began)
        self._cpu.append(cpu_seconds(self._pid) - cpu)

    def row(self, server: Name, devices: int, parameters: int) -> Row:
        peak = process_memory(self._pid, "VmHWM")
        return Row(server, devices, parameters, self._seconds, self._cpu, self._idle, peak)


async def _in_time(round: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(round, ROUND_LIMIT)
    except asyncio.TimeoutError:
        raise LoadError(f"a round took more than {ROUND_LIMIT:g} seconds") from None


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads, so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_memory(pid: int, what: Literal["VmRSS", "VmHWM"]) -> int | None:
    """Bytes."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def _process(folder: Path, arguments: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program, ended at the end."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EMBRACE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            env={**kept, "PYTHONPATH": path, **environment},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[bytes], folder: Path, find: Callable[[str], str]) -> str:
    """What a program says when it is ready."""
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        for line in (folder / "out").read_text().splitlines(keepends=True):
            if line.endswith("\n") and (found := find(line)):
                return found
        if process.poll() is not None:
            break
        time.sleep(0.02)
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
    raise EmbraceError(f"a server did not start: {' '.join(last) or 'it said nothing'}")
