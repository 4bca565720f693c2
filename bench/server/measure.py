"""What a round costs the coordinator: many simulated devices over real sockets, no training.

For every number of devices and of parameters the baseline, the coordinator and, where it is installed, Flower take
turns, each in a fresh process. The model is synthetic: random weights, graphs that are never run.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np

from bench.flower_python import FlowerMissing, flower_version, has_flower
from bench.server.load import Load, LoadError, baseline_round, embrace_round
from bench.server.model import vectors, write_bundle
from bench.server.process import Watch, first_words, running
from bench.server.report import Name, ServerReport, ServerRow
from edge_runtime.machine import describe_device
from embrace.client import Client
from federation.errors import InputError
from federation.job import plan_from, plan_to
from federation.space import Vector
from federation.wire import encode_layers

Progress = Callable[[str, int, int], None]

SPARE = 1 << 30  # bytes of the disk that are left alone


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
    servers: list[Name] = ["baseline", "embrace"]
    servers += ["flower"] if has_flower(flower_python, notes) else []
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
    return ServerReport(at_once, machine(flower_python if "flower" in servers else None), rows, notes)


def machine(flower_python: Path | None) -> dict[str, str]:
    found = {key: value for key, value in describe_device().items() if "torch" not in key and "onnx" not in key}
    return {**found, "flwr": flower_version(flower_python)} if flower_python else found


def _check_disk(folder: Path, devices: int, parameters: int) -> None:
    """Check the free space: a round keeps every body until it is over."""
    needed = 4 * parameters * (devices + 10) + SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{devices} updates of {parameters:,} parameters need {needed / 1e9:.1f} GB of disk; {folder.parent} has "
            f"{free / 1e9:.1f} GB: take fewer devices, or another disk with --folder"
        )


def _measure(
    server: Name, folder: Path, devices: int, parameters: int, rounds: int, at_once: int, flower_python: Path | None
) -> ServerRow:
    if server == "flower":
        from bench.flower.server import run_flower  # the wheel does not have it

        assert flower_python is not None
        found = run_flower(flower_python, folder, devices, parameters, rounds)
        return ServerRow(server, devices, parameters, found.seconds, found.cpu, found.idle, found.peak)
    run = _run_baseline if server == "baseline" else _run_embrace
    return run(folder, devices, parameters, rounds, at_once)


# --- the servers -----------------------------------------------------------------------------------------------------


def _run_baseline(folder: Path, devices: int, parameters: int, rounds: int, at_once: int) -> ServerRow:
    weights, update = vectors(parameters)
    weights.astype("<f4").tofile(folder / "weights")
    load = Load(update.astype("<f4").tobytes(), at_once)
    command = ["-m", "bench.server.baseline", str(folder), str(parameters)]
    with running(folder, command) as process:
        port = int(first_words(process, folder, lambda line: line.strip()))
        watch = Watch(process.pid)
        for _ in range(rounds):
            watch.round(baseline_round(port, load, devices))
        check_result(np.fromfile(folder / "weights", "<f4"), weights, update, rounds)
        return watch.row("baseline", devices, parameters)


def _run_embrace(folder: Path, devices: int, parameters: int, rounds: int, at_once: int) -> ServerRow:
    weights, update = vectors(parameters)
    manifest = write_bundle(folder / "bundle", weights)
    load = Load(b"".join(bytes(part) for part in encode_layers(manifest.space, 0, update)), at_once)
    command = ["-m", "embrace", "serve", "--data", str(folder / "data"), "--port", "0", "--devices", "0"]
    # The devices of this bench come from one address with one enrolment token, all at once.
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(running(folder, command, EMBRACE_REQUESTS_PER_SECOND="1000000"))
        url = first_words(process, folder, lambda line: line.split()[1] if line.startswith("coordinator: ") else "")
        port = int(url.rsplit(":", 1)[1])
        token = (folder / "data" / "admin.token").read_text().strip()
        admin = Client(url, token)
        stack.callback(admin.close)
        plan = plan_from({"bundle": "bench", "num_rounds": rounds + 1, "participate": {"count": devices}})
        bundle = admin.send_bundle(folder / "bundle")
        tokens = enrol(url, admin, devices)
        job = str(admin.call("POST", "/jobs", json={"bundle": bundle, "plan": plan_to(plan)})["id"])
        headers = update_headers(load.body)
        watch = Watch(process.pid)
        for version in range(rounds):
            watch.round(embrace_round([port], load, tokens, headers, version))
        row = watch.row("embrace", devices, parameters)
        result = folder / "result"
        admin.save_weights(job, rounds, result)
        check_result(np.fromfile(result, "<f4", offset=len(load.body) - 4 * parameters), weights, update, rounds)
        return row


def enrol(url: str, admin: Client, devices: int) -> list[str]:
    """Enrol new devices and return their tokens."""
    invitation = admin.call("POST", "/enrolments", json={"uses": devices, "seconds": 3600})["token"]
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {invitation}"}, timeout=30) as http:
        answers = [http.post("/v1/devices", json={"name": f"device {number}"}) for number in range(devices)]
    return [str(answer.raise_for_status().json()["token"]) for answer in answers]


def update_headers(body: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return f'Embrace-Report: {{"samples": 1}}\r\nContent-Digest: sha-256=:{digest}:\r\n'


def check_result(found: Vector, weights: Vector, update: Vector, rounds: int) -> None:
    """Check the new weights: all updates are the same, so their mean is known."""
    if not np.allclose(found, weights + rounds * update, atol=1e-5 * rounds):
        raise LoadError("the weights after the round are not what the updates make of them")
