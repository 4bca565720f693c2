"""Flower in deployment mode under the same load: a SuperLink, a SuperNode per device, an app that trains nothing.

The model is one flat tensor, Flower's better layout. Flower lives in an environment of its own; nothing of it is
imported here. Measured are the SuperLink and all processes that it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.flower_python import FlowerMissing
from edge_runtime.system import HERE

LIMIT = 300.0  # seconds for everything
MOST_DEVICES = 32  # every one of them is a process of 100 MB

PROJECT = """\
[project]
name = "bench"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "load.server:app"
clientapp = "load.client:app"

[tool.flwr.app.config]
devices = 1
parameters = 1
rounds = 1
link = 1
result = ""
"""
CLIENT = """\
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(content), reply_to=message)
"""
SERVER = """\
import json, os, time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def usage(link):
    # (CPU seconds, resident bytes, sum of peaks) of a process and all below it
    rows = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                status = (entry / "status").read_text()
            except OSError:
                continue
            known = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            memory = [1024 * int(known.get(key, "0 kB").split()[0]) for key in ("VmRSS", "VmHWM")]
            rows[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])), *memory)
    family = {link}
    while more := {pid for pid, row in rows.items() if row[0] in family} - family:
        family |= more
    mine = [rows[pid] for pid in family if pid in rows]
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(row[1] for row in mine) / ticks, sum(row[2] for row in mine), sum(row[3] for row in mine)


@app.main()
def main(grid, context):
    config = context.run_config
    count, link = int(config["devices"]), int(config["link"])
    while len(list(grid.get_node_ids())) < count:
        time.sleep(0.1)
    arrays = ArrayRecord([np.zeros(int(config["parameters"]), np.float32)])
    found = {"seconds": [], "cpu": [], "idle": usage(link)[1]}
    for _ in range(int(config["rounds"])):
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
        before, began = usage(link)[0], time.perf_counter()
        arrays = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1).arrays
        found["seconds"].append(time.perf_counter() - began)
        found["cpu"].append(usage(link)[0] - before)
    found["peak"] = usage(link)[2]
    draft = Path(config["result"] + ".draft")
    draft.write_text(json.dumps(found))
    draft.rename(config["result"])
"""


@dataclass(frozen=True)
class Found:
    """What was measured; lists have an entry per round."""

    seconds: list[float]
    cpu: list[float]
    idle: int | None
    peak: int | None


def run_flower(python: Path, folder: Path, devices: int, parameters: int, rounds: int) -> Found:
    """Run rounds of Flower; start and end its processes."""
    if devices > MOST_DEVICES:
        raise FlowerMissing(f"not run with more than {MOST_DEVICES} devices, because each is a process of 100 MB")
    host, (port, *ports) = "127.0.0.1", map(str, _free_ports(1 + devices))
    address = f"{host}:{port}"
    _write_app(folder, address)
    until = time.monotonic() + LIMIT
    with contextlib.ExitStack() as stack:
        run = _Runner(python, folder, stack)
        link = run.start(
            "flower-superlink",
            "--insecure",
            "--host",
            host,
            "--port",
            port,
            "--disable-runtime-dependency-installation",
        )
        _wait_for(address, link, folder, until)
        for own in ports:
            run.start("flower-supernode", "--insecure", "--superlink", address, "--host", host, "--port", own)
        result = folder / "result.json"
        config = f'devices={devices} parameters={parameters} rounds={rounds} link={link.pid} result="{result}"'
        run.start("flwr", "run", str(folder / "app"), "bench", "--run-config", config)
        while not result.exists():
            if time.monotonic() > until or link.poll() is not None:
                raise FlowerMissing(f"no result after {LIMIT:g} seconds: {_last_words(folder)}")
            time.sleep(0.2)
    return Found(**json.loads(result.read_text()))


def _write_app(folder: Path, address: str) -> None:
    package = folder / "app" / "load"
    package.mkdir(parents=True)
    files = {"__init__.py": "", "client.py": CLIENT, "server.py": SERVER, "../pyproject.toml": PROJECT}
    for name, text in files.items():
        (package / name).write_text(text)
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "{address}"\ninsecure = true\n'
    )


class _Runner:
    """Starts programs of Flower's environment; each has a session of its own and ends with all it started."""

    def __init__(self, python: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self._bin = python.parent.absolute()
        self._folder = folder
        self._stack = stack

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        path = f"{self._bin}{os.pathsep}{os.environ.get('PATH', '')}"
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        home = {"FLWR_HOME": str(self._folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path}
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [self._bin / name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**kept, **home},
                **HERE.own_group,
            )
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    HERE.end_group(process.pid)
    process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes], folder: Path, until: float) -> None:
    host, port = address.split(":")
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.1)
    raise FlowerMissing(f"the SuperLink did not start: {_last_words(folder)}")


def _last_words(folder: Path) -> str:
    return " ".join((folder / "log").read_text(errors="replace").split())[-300:]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [bound.getsockname()[1] for bound in sockets]
