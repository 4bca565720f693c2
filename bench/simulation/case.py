"""What every contestant of `embrace bench simulate` is given: files in a folder, written once.

case.json       sizes
stored.npy      samples of all devices, as a data set has them
inputs.npy      ... as the model takes them
labels.npy
numbers.npy     which of them each device has
seats.json      for every round the devices that take part, each with the seed of its task
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.data import from_arrays
from federation.job import Plan, plan_from
from simulation.datasets import Dataset
from simulation.fleet import SimulatedFleet, open_fleet
from simulation.server import SimulatedServer
from simulation.shared_samples import convert

MOMENTUM, DECAY = 0.9, 1e-4


@dataclass(frozen=True)
class SpeedCase:
    """The numbers that every contestant is given."""

    model: str
    bundle: str
    devices: int = 128
    cohort: int = 32
    samples: int = 64  # of each device
    steps: int = 10
    batch: int = 32
    rate: float = 0.01
    workers: int = 2
    rounds: int = 3  # that count; one more comes first
    tiers: dict[str, int] = field(default_factory=dict)  # devices of each; without it all train everything

    @property
    def plan(self) -> Plan:
        """The job of `embrace simulate`."""
        rules = [{"rule": "weight_decay", "factor": DECAY}, {"rule": "momentum", "factor": MOMENTUM}]
        return plan_from(
            {
                "bundle": self.bundle,
                "num_rounds": 1 + self.rounds,
                "cover": {"rule": "output_side"},
                "participate": {"count": self.cohort, "balance": False},
                "local": {"steps": self.steps, "batch": self.batch, "rate": str(self.rate), "rules": rules},
                "simulate": {"devices": self.devices, "dataset": "case", "partitioner": "iid", "tiers": self.tiers},
            }
        )


def write_case(case: SpeedCase, folder: Path, stored: NDArray[Any], labels: NDArray[Any]) -> None:
    """Write all files of a case."""
    np.save(folder / "stored.npy", stored)
    np.save(folder / "labels.npy", labels)
    converted, _ = convert(from_arrays(stored, labels, read_manifest(Path(case.bundle))))
    np.save(folder / "inputs.npy", converted)
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    fleet = open_case(case, folder)
    np.save(folder / "numbers.npy", np.stack([device.numbers for device in fleet.devices]))
    (folder / "seats.json").write_text(json.dumps(_seats(case, fleet)))


def read_case(folder: Path) -> SpeedCase:
    return SpeedCase(**json.loads((folder / "case.json").read_text()))


def open_case(case: SpeedCase, folder: Path) -> SimulatedFleet:
    """The fleet of `embrace simulate`, as if the samples were one of its data sets."""
    stored, labels = (np.load(folder / f"{name}.npy") for name in ("stored", "labels"))
    manifest = read_manifest(Path(case.bundle))
    data = Dataset("case", stored, labels, stored[:1], labels[:1], manifest.output.shape[0])
    return open_fleet(case.plan, Path(case.bundle), data)


def _seats(case: SpeedCase, fleet: SimulatedFleet) -> list[list[tuple[int, int]]]:
    weights = map_weights(fleet.bundle / fleet.manifest.weights.name, fleet.manifest.space)
    numbers = {device.id: number for number, device in enumerate(fleet.devices)}
    server = SimulatedServer(case.plan, fleet.manifest, {d.id: d.profile for d in fleet.devices}, weights)
    found = []
    for number in range(1 + case.rounds):
        server.state = replace(server.state, number=number)
        found.append([(numbers[seat.device], seat.task.seed) for seat in server.invite().seats])
    return found
