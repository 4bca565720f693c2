"""One job file twice: simulated in this process, and on a real coordinator with real agents over sockets.

The agents have the names, tiers and samples of the simulated devices, so that both arrive at the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.agent import Agent, Device
from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.client import DeviceClient
from edge_runtime.engine.session import RuntimeSettings
from embrace.client import Client
from federation.messages import Report
from federation.space import Vector
from simulation.fleet import SimulatedDevice, SimulatedFleet, open_fleet, read_job
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from tests.waiting import PATIENCE, wait_until

SEED = 3
HEAD = f"""
bundle = "digits"
seed = {SEED}
num_rounds = {{rounds}}
{{algorithm}}
[simulate]
devices = 5
dataset = "digits"
partitioner = "dirichlet"
partition = {{{{ alpha = 1.0 }}}}
tiers = {{{{ strong = 2, moderate = 2, weak = 1 }}}}
samples = 400
[local]
batch = 8
"""


def job_text(algorithm: str, rounds: int = 4, more: str = "", **local: Any) -> str:
    """A job of five devices; `local` goes into the table [local], `more` behind it."""
    named = f'algorithm = "{algorithm}"' if algorithm else ""
    lines = "".join(f"{key} = {value}\n" for key, value in local.items())
    joins = "" if "[participate]" in more else "[participate]\nquorum = 1.0\nmin_available = 5\n"
    return HEAD.format(rounds=rounds, algorithm=named) + lines + joins + more


@dataclass(frozen=True)
class Simulated:
    weights: Vector
    lines: list[dict[str, Any]]


def simulate(file: Path, folder: Path) -> Simulated:
    """The job on simulated devices that compute what real ones do."""
    simulated = open_fleet(*read_job(file))
    run = Simulation(simulated, folder, Options("portable", 1, InlinePool, evaluate_every=0)).run()
    return Simulated(read_weights(simulated.bundle, folder / "weights.safetensors"), list(run.rounds))


def read_weights(bundle: Path, file: Path) -> Vector:
    return np.array(map_weights(file, read_manifest(bundle).space))


@dataclass
class RealDevice:
    """An agent in a thread, with its own connection, data and work directory."""

    name: str
    id: str
    agent: Agent
    reports: list[Report] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    leave: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.leave.clear()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.agent.run(wait=0.5, until=self.leave.is_set)
        except BaseException as error:
            self.errors.append(error)

    def stop(self) -> None:
        """It goes home after what it is doing."""
        self.leave.set()
        if self.thread is not None:
            self.thread.join(PATIENCE)
            assert not self.thread.is_alive()


def write_device(simulated: SimulatedFleet, device: SimulatedDevice, folder: Path) -> Device:
    """What a simulated device has, for a real one."""
    data = folder / f"{device.name}.npz"
    np.savez(data, **dict(zip("xy", simulated.train.batch(device.numbers))))
    return device_of(folder, device.name, device.profile.tier)


def device_of(folder: Path | str, name: str, tier: str | None) -> Device:
    """A device whose data is there."""
    data, work = Path(folder) / f"{name}.npz", Path(folder) / name
    return Device(str(data), work, tier=tier, engine="portable", settings=RuntimeSettings(threads=1))


def make_agent(url: str, token: str, device: Device, client: type[DeviceClient] = DeviceClient) -> Agent:
    """An agent that rides out whatever happens to the server, without long pauses."""
    return Agent(client(url, token, patience=1e6, sleep=lambda seconds: time.sleep(min(seconds, 0.1))), device)


def enrol(url: str, enrolment: str, simulated: SimulatedFleet) -> dict[str, str]:
    """The devices of a simulated fleet; their tokens by name."""
    client, tokens = DeviceClient(url, enrolment), {}
    for device in simulated.devices:
        own, tokens[device.name] = client.enrol(device.name, {"tier": device.profile.tier, "measures": True})
        assert own == device.id
    client.close()
    return tokens


class Fleet:
    """A coordinator's devices, and its administrator."""

    def __init__(self, url: str, admin: str, tokens: dict[str, str], simulated: SimulatedFleet, folder: Path) -> None:
        """Of devices that are enrolled; `tokens` by name. Everything of theirs goes into the folder."""
        self.admin, self.folder, self.bundle, self.tokens = Client(url, admin), folder, simulated.bundle, tokens
        self.devices: dict[str, RealDevice] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for device in simulated.devices:
            agent = make_agent(url, tokens[device.name], write_device(simulated, device, folder))
            self.devices[device.name] = RealDevice(device.name, device.id, agent)
            agent.on_report = self.devices[device.name].reports.append

    def run(self, file: Path) -> Vector:
        """A job to its end; the weights that came of it."""
        job = self.admin.create(file)
        self.wait(lambda: self.job(job)["state"] == "done")
        return self.weights(job)

    def job(self, job: str) -> dict[str, Any]:
        return dict(self.admin.call("GET", f"/jobs/{job}"))

    def weights(self, job: str) -> Vector:
        path = self.folder / f"{job}.safetensors"
        self.admin.save_weights(job, self.job(job)["version"], path)
        return read_weights(self.bundle, path)

    def wait(self, ready: Callable[[], bool]) -> None:
        def looked() -> bool:
            assert not self.errors, self.errors
            return ready()

        wait_until(looked)

    @property
    def errors(self) -> list[BaseException]:
        return [error for device in self.devices.values() for error in device.errors]

    def close(self) -> None:
        for device in self.devices.values():
            device.leave.set()
        for device in self.devices.values():
            device.stop()
            device.agent.client.close()
        self.admin.close()


@contextmanager
def at_work(fleet: Fleet) -> Iterator[Fleet]:
    """All agents run meanwhile."""
    try:
        for device in fleet.devices.values():
            device.start()
        yield fleet
    finally:
        fleet.close()
