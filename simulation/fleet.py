"""Describe a simulated fleet: the table [simulate] of a job file, and the devices that come of it.

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
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle_files import read_manifest
from edge_runtime.data import from_arrays
from edge_runtime.user_module import load_class
from federation.axes.cover import DeviceProfile
from federation.decode import decode
from federation.errors import FieldError, InputError
from federation.identity import device_id
from federation.job import Plan, parse_plan
from federation.manifest import Manifest
from simulation.datasets import Dataset, load_dataset, make_partitioner
from simulation.datasets.dataset import as_labels
from simulation.shared_samples import convert

Numbers = NDArray[np.int64]
SamplesXY = tuple[NDArray[Any], NDArray[Any]]  # inputs and labels
HELD_OUT = 0.2  # share of the samples that are tested on, where none are given for it


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
            raise FieldError("devices", f"expected a number from 1 to 1000000, got {self.devices}")
        for name, value in (("samples", self.samples), ("test_samples", self.test_samples)):
            if value is not None and value < 1:
                raise FieldError(name, f"expected at least 1, got {value}")
        if self.tiers and (min(self.tiers.values()) < 0 or sum(self.tiers.values()) != self.devices):
            total = sum(self.tiers.values())
            raise FieldError("tiers", f"expected numbers that add up to {self.devices} devices, got {total}")


def fleet_table(plan: Plan, given: Mapping[str, Any]) -> FleetTable:
    """Read what the job says; what is given beside it counts more."""
    told = {**plan.simulate, **{key: value for key, value in given.items() if value is not None}}
    if given.get("devices") is not None and given.get("tiers") is None and "tiers" in plan.simulate:
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
class SimulatedFleet:
    """The devices of a run, with their data and job: nothing that changes during it.

    It is the same for the same plan, table, data and bundle.
    """

    plan: Plan
    table: FleetTable
    bundle: Path
    manifest: Manifest
    data: Dataset

    @cached_property
    def chosen(self) -> Numbers:
        """The training samples that devices have."""
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
        named = [tier for tier, count in table.tiers.items() for _ in range(count)]
        tiers: list[str | None] = [*named] or [None] * table.devices
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

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Convert the data to what the model takes, and say whose samples are which: what every process reads."""
        data, chosen, test = self.data, self.chosen, self.test_numbers
        train = from_arrays(data.x_train[chosen], data.y_train[chosen], self.manifest, name="the training data")
        tested = from_arrays(data.x_test[test], data.y_test[test], self.manifest, name="the test data")
        inputs, labels = convert(train)
        test_inputs, test_labels = convert(tested)
        place = np.zeros(len(data.y_train), np.int64)
        place[chosen] = np.arange(len(chosen))
        numbers = np.concatenate([place[device.numbers] for device in self.devices])
        return {
            "inputs": inputs,
            "labels": labels,
            "test_inputs": test_inputs,
            "test_labels": test_labels,
            "numbers": numbers,
        }


def read_job(
    file: Path, *, num_rounds: int | None = None, seed: int | None = None, own_rules: bool = True
) -> tuple[Plan, Path]:
    """Read a job file; return its plan and the bundle it names, which is looked for beside it.

    `own_rules`: load rules of the user's own from the files beside it; else refuse them.
    """
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is no TOML: expected text in UTF-8") from None
    plan = parse_plan(text, partial(load_class, folder=file.parent) if own_rules else None)
    rounds = plan.num_rounds if num_rounds is None else num_rounds
    plan = replace(plan, num_rounds=rounds, seed=plan.seed if seed is None else seed)
    return plan, file.parent / plan.bundle


def open_fleet(
    plan: Plan,
    bundle: Path,
    data: str | Dataset | SamplesXY | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    test_data: SamplesXY | None = None,
    data_dir: Path | None = None,
) -> SimulatedFleet:
    """Read the data and give every device its part; what is `given` counts more than the job's table."""
    told = dict(given or {})
    if data is None or isinstance(data, str):
        table = fleet_table(plan, {**told, "dataset": data})
        found = load_dataset(table.dataset, data_dir)
    else:
        found = data if isinstance(data, Dataset) else dataset_of(data, test_data)
        table = fleet_table(plan, {**told, "dataset": found.name})
    return SimulatedFleet(plan, table, bundle, read_manifest(bundle), found)


def dataset_of(data: SamplesXY, test_data: SamplesXY | None = None) -> Dataset:
    """Make a data set of arrays; without test samples some are held out, the same ones each time.

    Its name tells one set of samples from another, so that a run does not go on with other data.
    """
    x, y = _checked(data, "data")
    if test_data is None:
        order = np.random.default_rng(0).permutation(len(y))
        test, train = np.split(order, [max(1, round(HELD_OUT * len(y)))])
        parts = x[np.sort(train)], y[np.sort(train)], x[np.sort(test)], y[np.sort(test)]
    else:
        parts = x, y, *_checked(test_data, "test_data")
    digest = sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    classes = 1 + int(max(parts[1].max(initial=0), parts[3].max(initial=0)))
    return Dataset(f"arrays-{digest.hexdigest()[:16]}", *parts, classes)


def _checked(data: SamplesXY, name: str) -> tuple[NDArray[Any], Numbers]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError(f"{name}: expected a pair of arrays, inputs and labels")
    x, y = np.asarray(data[0]), np.asarray(data[1])
    if not x.ndim or len(x) != len(y) or len(y) < 2:
        raise InputError(f"{name}: expected as many inputs as labels, at least two, got {x.shape} and {y.shape}")
    return x, as_labels(y, f"{name}: labels")


def _scaled(tiers: Any, devices: int) -> dict[str, int]:
    """Scale tiers to another number of devices; what rounding leaves over goes to the first."""
    if not isinstance(tiers, Mapping) or not tiers:
        raise FieldError(("simulate", "tiers"), "expected a table of numbers")
    total = sum(tiers.values())
    shares = {tier: count * devices // total for tier, count in tiers.items()}
    first = next(iter(shares))
    return {**shares, first: shares[first] + devices - sum(shares.values())}
