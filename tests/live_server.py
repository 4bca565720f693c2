"""A coordinator in its own process, a small bundle made without PyTorch, and a device that sends zeros."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from embrace.client import Client
from federation.manifest import Loss, Manifest, Source, TensorSpec
from federation.space import ParameterSpace
from federation.wire import encode_layers
from tests.stock_python import ROOT
from tests.tiny_bundle import boundary, layer, manifest, weight, write_bundle
from tests.waiting import PATIENCE, wait_until


def make_bundle(directory: Path, width: int = 4) -> Manifest:
    """Two dense layers. No test runs the graphs: a coordinator only serves them."""
    entry, middle, leaves = (TensorSpec("float32", (size,)) for size in (width, 8, 3))
    layers = [
        layer("first", weight("w1", 8, width), activations=8, macs=32, input=entry, output=middle),
        layer("second", weight("w2", 3, 8), weight("b2", 3), activations=8, macs=32, input=middle, output=leaves),
    ]
    made = manifest(
        layers,
        [boundary("first", 0, 8), boundary("second", 1, 8)],
        {"strong": "first", "weak": "second"},
        name="small",
        source=Source("onnx", "small.onnx"),
        loss=Loss("cross_entropy"),
        labels=TensorSpec("int64", ()),
        batch=4,
    )
    return write_bundle(directory, made, np.linspace(-1, 1, made.space.size, dtype=np.float32))


@dataclass
class LiveServer:
    """What a test wants to know about a running coordinator."""

    url: str
    enrolment: str
    admin: str
    process: subprocess.Popen[str]
    printed: str
    _log: Path
    _clients: list[httpx.Client] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines()]

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def create_job(self, directory: Path, **plan: Any) -> str:
        """A job on a new small bundle."""
        if not directory.is_dir():
            make_bundle(directory)
        client = Client(self.url, self.admin)
        self._clients.append(client._http)
        digest = client.send_bundle(directory)
        whole = {"bundle": "small", **plan}
        return str(client.call("POST", "/jobs", json={"bundle": digest, "plan": whole})["id"])

    def client(self, token: str) -> httpx.Client:
        made = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)
        self._clients.append(made)
        return made

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def enrol(self, name: str = "device", tier: str = "strong") -> httpx.Client:
        """A client with the token of a new device."""
        headers = {"Authorization": f"Bearer {self.enrolment}"}
        wanted = {"name": name, "profile": {"tier": tier}}
        answer = httpx.post(f"{self.url}/v1/devices", json=wanted, headers=headers, timeout=PATIENCE)
        assert answer.status_code == 201, answer.text
        return self.client(answer.json()["token"])

    def retire_devices(self) -> None:
        """No round waits for a device of another test."""
        admin = self.client(self.admin)
        for device in admin.get("/v1/devices").json():
            if not device["revoked"]:
                admin.delete(f"/v1/devices/{device['id']}").raise_for_status()

    def wait_for_log(self, text: str) -> None:
        wait_until(lambda: text in self.log, lambda: f"{text!r} never came:\n{self.log}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def next_task(device: httpx.Client, wait: float = 30.0) -> dict[str, Any]:
    answer = device.post("/v1/tasks/next", params={"wait": wait})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def zero_update(layer: int = 0, width: int = 4) -> bytes:
    """The body of an update of the small bundle, from a layer on."""
    space = ParameterSpace([[weight("w1", 8, width)], [weight("w2", 3, 8), weight("b2", 3)]])
    size = sum(space.layer(i).stop - space.layer(i).start for i in range(layer, 2))
    return b"".join(bytes(part) for part in encode_layers(space, layer, np.zeros(size, np.float32)))


def send_update(device: httpx.Client, task: str, report: dict[str, Any] | None = None) -> httpx.Response:
    told = json.dumps({"samples": 10, "loss": 1.5, **(report or {})})
    return device.put(f"/v1/tasks/{task}/update", content=zero_update(), headers={"Embrace-Report": told})


@contextmanager
def live_server(
    directory: Path, *options: str, command: Sequence[str] = (sys.executable, "-m", "embrace"), **settings: object
) -> Iterator[LiveServer]:
    """`embrace serve` on a free port; settings go by the environment. It is ended at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    data, log, out = directory / "data", directory / "log", directory / "out"
    own = {f"EMBRACE_{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("w") as errors, out.open("w") as screen:
        process = subprocess.Popen(
            [*command, "serve", "--data", str(data), "--port", "0", *options],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "300", **own},
            stdout=screen,
            stderr=errors,
            text=True,
        )
    try:

        def told() -> str:
            return out.read_text() + log.read_text()

        def ready() -> bool:
            assert process.poll() is None, told()
            return "API documentation" in out.read_text() and "startup complete" in log.read_text()

        wait_until(ready, told)
        printed = out.read_text()
        url = re.search(r"coordinator: (\S+)", printed)
        token = re.search(r"embrace_enrol_[\w-]+", printed)
        assert url and token
        admin = Path(str(settings.get("admin_token_file", data / "admin.token"))).read_text().strip()
        running = LiveServer(url[1], token[0], admin, process, printed, log)
        try:
            yield running
        finally:
            running.close()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
