"""What a simulated fleet consists of: the table [simulate] of a job file, and the devices that come of it.

    [simulate]
    devices = 128
    dataset = "cifar10"                             # embrace data list
    partitioner = "dirichlet"                       # its constants stand in [simulate.partition]
    partition = { alpha = 0.1 }
    tiers = { strong = 16, weak = 112 }             # how many devices are of which; without it all train everything
    samples = 10000                                 # of the training set; without it all
    test_samples = 2000

A coordinator carries the table and has no use for it, so that a job runs unchanged on a real fleet: with agents of the
same names (device-0000 and so on), tiers and data it arrives at the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data import from_arrays
from federation.axes.cover import DeviceProfile
from federation.decode import decode
from federation.errors import InputError
from federation.identity import device_id
from federation.job import Plan
from federation.manifest import Manifest
from simulation.datasets import Dataset, load_dataset, make_partitioner
from simulation.shared_samples import convert

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class FleetTable:
    """The table, checked."""

    devices: int = 100
    dataset: str = "digits"
    partitioner: str = "iid"
    partition: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    samples: int | None = None
    test_samples: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= 1_000_000:
            raise InputError(f"simulate.devices: expected a number from 1 to 1000000, got {self.devices}")
        for name, value in (("samples", self.samples), ("test_samples", self.test_samples)):
            if value is not None and value < 1:
                raise InputError(f"simulate.{name}: expected at least 1, got {value}")
        if self.tiers and (min(self.tiers.values()) < 0 or sum(self.tiers.values()) != self.devices):
            total = sum(self.tiers.values())
            raise InputError(f"simulate.tiers: expected numbers that add up to {self.devices} devices, got {total}")


def fleet_table(plan: Plan, given: Mapping[str, Any]) -> FleetTable:
    """What the job says; what is given on the command line counts more."""
    told = {**plan.simulate, **{key: value for key, value in given.items() if value is not None}}
    if "devices" in given and given["devices"] is not None and "tiers" in plan.simulate:
        told["tiers"] = _scaled(plan.simulate["tiers"], int(given["devices"]))
    return decode(FleetTable, told, "simulate", defaults=True)


@dataclass(frozen=True)
class SimulatedDevice:
    """One device of the fleet."""

    id: str
    name: str
    profile: DeviceProfile
    numbers: Numbers  # of its samples


@dataclass(frozen=True)
class Scene:
    """Everything that does not change during a run; the same for the same plan, table, data and bundle."""

    plan: Plan
    table: FleetTable
    bundle: Path
    manifest: Manifest
    data: Dataset

    @cached_property
    def chosen(self) -> Numbers:
        """The training samples that are dealt."""
        count = len(self.data.y_train)
        wanted = min(count, self.table.samples or count)
        return np.sort(np.random.default_rng(self.plan.seed).permutation(count)[:wanted])

    @cached_property
    def test_numbers(self) -> Numbers:
        count = len(self.data.y_test)
        wanted = min(count, self.table.test_samples or count)
        return np.sort(np.random.default_rng(0).permutation(count)[:wanted])  # the same for every seed

    @cached_property
    def devices(self) -> list[SimulatedDevice]:
        table, chosen = self.table, self.chosen
        groups = None if self.data.groups is None else self.data.groups[chosen]
        partitioner = make_partitioner(table.partitioner, table.partition)
        parts = partitioner.partition(self.data.y_train[chosen], table.devices, self.plan.seed, groups)
        tiers = [tier for tier, count in table.tiers.items() for _ in range(count)] or [None] * table.devices
        order = np.random.default_rng([self.plan.seed, 1]).permutation(table.devices)  # tiers do not follow labels
        taken: set[str] = set()
        found = []
        for number, part in enumerate(parts):
            name = f"device-{number:04d}"
            own = device_id(name, taken.__contains__)
            taken.add(own)
            tier = tiers[int(order[number])]
            found.append(SimulatedDevice(own, name, DeviceProfile(tier=tier), chosen[part]))
        return found


def open_scene(plan: Plan, given: Mapping[str, Any], bundle: Path, manifest: Manifest, data_dir: Path | None) -> Scene:
    """Read the data and deal it."""
    table = fleet_table(plan, given)
    return Scene(plan, table, bundle, manifest, load_dataset(table.dataset, data_dir))


def shared_arrays(scene: Scene) -> dict[str, NDArray[Any]]:
    """The data as the model takes it, and whose samples are which: what every process reads."""
    data, chosen, test = scene.data, scene.chosen, scene.test_numbers
    train = from_arrays(data.x_train[chosen], data.y_train[chosen], scene.manifest, name="the training data")
    tested = from_arrays(data.x_test[test], data.y_test[test], scene.manifest, name="the test data")
    inputs, labels = convert(train)
    test_inputs, test_labels = convert(tested)
    place = np.zeros(len(data.y_train), np.int64)
    place[chosen] = np.arange(len(chosen))
    numbers = np.concatenate([place[device.numbers] for device in scene.devices])
    return {
        "inputs": inputs,
        "labels": labels,
        "test_inputs": test_inputs,
        "test_labels": test_labels,
        "numbers": numbers,
    }


def _scaled(tiers: Any, devices: int) -> dict[str, int]:
    """The same shares of another number of devices; what rounding leaves over goes to the first."""
    if not isinstance(tiers, Mapping) or not tiers:
        raise InputError("simulate.tiers: expected a table of numbers")
    total = sum(tiers.values())
    shares = {tier: count * devices // total for tier, count in tiers.items()}
    first = next(iter(shares))
    return {**shares, first: shares[first] + devices - sum(shares.values())}
