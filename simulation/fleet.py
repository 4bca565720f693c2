"""Describe a simulated fleet: the table [simulate] of a job file, and the devices that come of it.

    [simulate]
    devices = 128
    data = "flowers"                                # your own, as a device takes it; or dataset = "cifar10"
    partitioner = "dirichlet"                       # its constants stand in [simulate.partition]
    partition = { alpha = 0.1 }
    tiers = { strong = 16, weak = 112 }             # how many devices are of which; without it all train everything

docs/reference/jobs.md explains every key. A coordinator carries the table and has no use for it, so that a job runs
unchanged on a real fleet: with agents of the same names (device-0000 and so on), tiers and data it arrives at the same
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle_files import own_tokenizer, read_manifest
from edge_runtime.data import Samples, TrainingSamples, from_arrays, load_samples
from edge_runtime.data.archive import read_groups
from edge_runtime.data.load import Data
from edge_runtime.data.samples import hold_out
from edge_runtime.data.targets import are_classes
from edge_runtime.user_module import load_class
from federation.axes.cover import DeviceProfile
from federation.decode import decode
from federation.errors import DataError, FieldError, InputError
from federation.identity import device_id, task_seed
from federation.job import Plan, parse_plan
from federation.manifest import Manifest
from federation.toml_lines import line_of
from simulation.datasets import DATASETS, Dataset, load_dataset, make_partitioner
from simulation.datasets.load import find_source
from simulation.pace import Pace
from simulation.shared_samples import SharedSamples, convert

Numbers = NDArray[np.int64]
ARRAYS = "arrays"  # stands in a table for data that has no name
_OF_DATA = ("label", "tokenizer", "test_data", "test_share")  # keys that belong to own data
BLIND = ("iid", "natural")  # partitioners that need no classes


@dataclass(frozen=True)
class FleetTable:
    """The table, checked."""

    devices: int = 100
    dataset: str = "digits"  # a data set by name
    data: str | None = None  # instead: own data, as `embrace train --data` takes it
    label: str | None = None  # of .csv files: the column
    tokenizer: str | None = None  # of texts: tokenizer.json; None: the bundle's
    test_data: str | None = None  # own data for testing
    test_share: float = 0.2  # without it: the share of the data that is held out
    partitioner: str = "iid"
    partition: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    samples: int | None = None
    test_samples: int | None = None
    pace: Pace | None = None  # how quick devices are; None: none is ever late

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= 1_000_000:
            raise FieldError("devices", f"expected a number from 1 to 1000000, got {self.devices}")
        for name, value in (("samples", self.samples), ("test_samples", self.test_samples)):
            if value is not None and value < 1:
                raise FieldError(name, f"expected at least 1, got {value}")
        if not 0 < self.test_share < 1:
            raise FieldError("test_share", f"expected a share between 0 and 1, got {self.test_share}")
        if self.tiers and (min(self.tiers.values()) < 0 or sum(self.tiers.values()) != self.devices):
            total = sum(self.tiers.values())
            raise FieldError("tiers", f"expected numbers that add up to {self.devices} devices, got {total}")

    def to_json(self) -> dict[str, Any]:
        """Return what tells runs apart: the name of own data has a digest of its samples, wherever they lie."""
        left_out = ("data", *_OF_DATA, *(["pace"] if self.pace is None else []))
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def fleet_table(plan: Plan, given: Mapping[str, Any]) -> FleetTable:
    """Read what the job says; what is given beside it counts more."""
    own = {key: value for key, value in given.items() if value is not None}
    theirs = dict(plan.simulate)
    if {"data", "dataset"} <= theirs.keys():
        raise FieldError(("simulate", "data"), "expected own data or a data set by its name, got both; remove dataset")
    for name, replaced in (("data", ["dataset"]), ("dataset", ["data", *_OF_DATA])):
        theirs = {key: value for key, value in theirs.items() if name not in own or key not in replaced}
    told = {**theirs, **own}
    for name in _OF_DATA:
        if name in told and "data" not in told:
            raise FieldError(("simulate", name), "belongs to own data; a data set by its name has test data of its own")
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
    held: NDArray[np.bool_]  # which of them it never trains on

    @property
    def trained(self) -> Numbers:
        return self.numbers[~self.held]

    @property
    def held_out(self) -> Numbers:
        return self.numbers[self.held]


@dataclass(frozen=True)
class SimulatedFleet:
    """The devices of a run, with their data and job: nothing that changes during it.

    It is the same for the same plan, table, data and bundle.
    """

    plan: Plan
    table: FleetTable
    bundle: Path
    manifest: Manifest
    train: TrainingSamples
    test: TrainingSamples
    labels: Numbers | None  # the class of each training sample; None: labels are no classes
    groups: Numbers | None  # the writer of each training sample, or the film it is about

    @cached_property
    def chosen(self) -> Numbers:
        """The training samples that devices have."""
        count = len(self.train)
        wanted = min(count, self.table.samples or count)
        return np.sort(np.random.default_rng(self.plan.seed).permutation(count)[:wanted])

    @cached_property
    def test_numbers(self) -> Numbers:
        count = len(self.test)
        wanted = min(count, self.table.test_samples or count)
        return np.sort(np.random.default_rng(0).permutation(count)[:wanted])  # the same for every seed

    @cached_property
    def devices(self) -> list[SimulatedDevice]:
        table, chosen = self.table, self.chosen
        groups = None if self.groups is None else self.groups[chosen]
        partitioner = make_partitioner(table.partitioner, table.partition)
        if self.labels is None and table.partitioner not in BLIND:
            raise InputError(
                f"simulate.partitioner: {table.partitioner!r} deals by classes, and labels of the data are none; "
                f"expected {' or '.join(BLIND)}"
            )
        labels = np.zeros(len(chosen), np.int64) if self.labels is None else self.labels[chosen]
        parts = partitioner.partition(labels, table.devices, self.plan.seed, groups)
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
            numbers = chosen[part]
            found.append(
                SimulatedDevice(own, name, DeviceProfile(tier=tier, measures=True), numbers, self._held(own, numbers))
            )
        return found

    def _held(self, device: str, numbers: Numbers) -> NDArray[np.bool_]:
        """Hold out what the agent of a device holds out."""
        evaluate, manifest = self.plan.evaluate, self.manifest
        if not evaluate.on_devices:
            return np.zeros(len(numbers), np.bool_)
        labels = self.train.labels[numbers]
        classes = are_classes(labels, manifest)
        return hold_out(labels, classes, evaluate.holdout, task_seed(self.plan.seed, device))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Convert the data to what the model takes, and say whose samples are which: what every process reads."""
        inputs, labels = convert(self.train, self.chosen)
        test_inputs, test_labels = convert(self.test, self.test_numbers)
        place = np.zeros(len(self.train), np.int64)
        place[self.chosen] = np.arange(len(self.chosen))
        own = [part for device in self.devices for part in (device.trained, device.held_out)]
        numbers = np.concatenate([place[part] for part in own])
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
    try:
        fleet_table(plan, {})
    except FieldError as error:
        raise error.on_line(line_of(text, error.path)) from None
    rounds = plan.num_rounds if num_rounds is None else num_rounds
    beside: dict[str, Any] = {
        key: str(file.parent / plan.simulate[key]) for key in ("data", "test_data", "tokenizer") if key in plan.simulate
    }
    plan = replace(plan, num_rounds=rounds, seed=plan.seed if seed is None else seed)
    return replace(plan, simulate={**plan.simulate, **beside}), file.parent / plan.bundle


def open_fleet(
    plan: Plan,
    bundle: Path,
    data: Data | Dataset | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    test_data: Data | None = None,
    data_dir: Path | None = None,
) -> SimulatedFleet:
    """Read the data and give every device its part; what is `given` counts more than the job's table.

    `data` is a data set, its name, or own data in any form that a device takes; without it the job's.
    """
    manifest, told = read_manifest(bundle), dict(given or {})
    if isinstance(data, Dataset):
        table = fleet_table(plan, {**told, "dataset": data.name})
        _check_pace(table, manifest)
        return _of_dataset(plan, table, bundle, manifest, data)
    if data is not None:
        told["dataset" if _names_dataset(data) else "data"] = str(data) if isinstance(data, (str, Path)) else ARRAYS
    if test_data is not None:
        told["test_data"] = str(test_data) if isinstance(test_data, (str, Path)) else ARRAYS
    table = fleet_table(plan, told)
    _check_pace(table, manifest)
    if table.data is None:
        return _of_dataset(plan, table, bundle, manifest, load_dataset(table.dataset, data_dir))
    for_test = table.test_data if test_data is None else test_data
    return _of_own_data(plan, table, bundle, manifest, table.data if data is None else data, for_test)


def _check_pace(table: FleetTable, manifest: Manifest) -> None:
    """Refuse the pace of a tier that neither the bundle nor the fleet has."""
    known = {**manifest.tiers, **table.tiers}
    if strange := [tier for tier in (table.pace.tiers if table.pace else ()) if tier not in known]:
        names = ", ".join(known)
        raise FieldError(("simulate", "pace", "tiers", strange[0]), f"no such tier; this bundle and fleet have {names}")


def _names_dataset(data: Data) -> bool:
    """Tell the name of a data set from own data; a word that is neither is refused."""
    if not isinstance(data, str) or data in DATASETS:
        return isinstance(data, str)
    return not (set(data) & set("./:") or Path(data).exists()) and bool(find_source(data))


def _of_dataset(plan: Plan, table: FleetTable, bundle: Path, manifest: Manifest, data: Dataset) -> SimulatedFleet:
    train = from_arrays(data.x_train, data.y_train, manifest, name="the training data")
    test = from_arrays(data.x_test, data.y_test, manifest, name="the test data")
    return SimulatedFleet(plan, table, bundle, manifest, train, test, data.y_train, data.groups)


def _of_own_data(
    plan: Plan, table: FleetTable, bundle: Path, manifest: Manifest, data: Data, test_data: Data | None
) -> SimulatedFleet:
    """Open own data; without test data some is held out, the same samples for every seed.

    The name tells one set of samples from another, so that a run does not go on with other data.
    """
    tokenizer = Path(table.tokenizer) if table.tokenizer is not None else own_tokenizer(bundle, manifest)
    samples = _open(data, manifest, table.label, tokenizer, "data")
    groups = read_groups(Path(samples.name)) if samples.name.endswith(".npz") else None
    if groups is not None and len(groups) != len(samples):
        raise DataError(f"{samples.name}: {len(samples)} samples but {len(groups)} groups")
    if test_data is None:
        train, test = samples.split(table.test_share, seed=0)
    else:
        train, test = samples, _open(test_data, manifest, table.label, tokenizer, "test_data")
    if min(len(train), len(test)) < 1:
        raise DataError(f"{samples.name}: {len(samples)} samples are too few to train on some and to test on others")
    labels = train.labels[:].reshape(-1).astype(np.int64) if train.are_classes else None
    digest, shared = sha256(), []
    for part in (train, test):
        inputs, targets = convert(part)
        digest.update(inputs.data)
        digest.update(targets.data)
        shared.append(SharedSamples(inputs, targets, np.arange(len(part)), part.name))
    stem = Path(data).name.replace(":", "-") if isinstance(data, (str, Path)) else ARRAYS
    table = replace(table, dataset=f"{stem}-{digest.hexdigest()[:16]}")
    kept = None if groups is None else groups[train.numbers]
    return SimulatedFleet(plan, table, bundle, manifest, shared[0], shared[1], labels, kept)


def _open(data: Data, manifest: Manifest, label: str | None, tokenizer: Path | None, name: str) -> Samples:
    if isinstance(data, (str, Path)):
        return load_samples(data, manifest, label=label, tokenizer=tokenizer)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise InputError(f"{name}: expected a pair of arrays, inputs and labels, or a reference to data")
    return load_samples((data[0], data[1]), manifest)


def _scaled(tiers: Any, devices: int) -> dict[str, int]:
    """Scale tiers to another number of devices; what rounding leaves over goes to the first."""
    if not isinstance(tiers, Mapping) or not tiers:
        raise FieldError(("simulate", "tiers"), "expected a table of numbers")
    total = sum(tiers.values())
    shares = {tier: count * devices // total for tier, count in tiers.items()}
    first = next(iter(shares))
    return {**shares, first: shares[first] + devices - sum(shares.values())}
