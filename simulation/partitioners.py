"""Divide a data set among devices. The names are Flower's where Flower has the same.

A partitioner is a small frozen dataclass; `partition` gives one sorted array of sample numbers per device. No sample
goes to two devices, and none is left out unless the partitioner says so. Chance is numpy's `Generator(PCG64(seed))`:
the same seed gives the same parts on every platform and with the same version of numpy; numpy keeps the right to draw
differently in a later one. `embrace data split` writes parts down for good.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from federation.decode import decode
from federation.errors import DataError, FieldError, InputError

Numbers = NDArray[np.int64]  # of samples, labels or groups


class Partitioner(Protocol):
    """Deals samples to devices by their labels or groups."""

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]: ...


@dataclass(frozen=True)
class IidPartitioner:
    """Every device gets the same number of samples (but for one), whatever they are."""

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]:
        rng = _prepare(labels, num_partitions, seed)
        return _sorted(np.array_split(rng.permutation(len(labels)), num_partitions))


@dataclass(frozen=True)
class DirichletPartitioner:
    """The samples of each label are dealt in shares drawn from a symmetric Dirichlet distribution over the devices.

    A small `alpha` gives each label to few devices and each device few labels; a large one is nearly IID. Devices that
    drew less than `min_partition_size` get the rest, sample by sample, from the device that then has most.
    """

    alpha: float
    min_partition_size: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise InputError(f"dirichlet.alpha: expected a number above 0, got {self.alpha}")
        if self.min_partition_size < 0:
            raise InputError(f"dirichlet.min_partition_size: expected 0 or more, got {self.min_partition_size}")

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]:
        rng = _prepare(labels, num_partitions, seed, self.min_partition_size)
        parts: list[list[Numbers]] = [[] for _ in range(num_partitions)]
        for label in np.unique(labels):
            own = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_partitions, self.alpha))
            # Rounding the sums, not the shares, hands out every sample once.
            ends = np.rint(np.cumsum(shares)[:-1] * len(own)).astype(np.int64)
            for part, samples in zip(parts, np.split(own, ends)):
                part.append(samples)
        dealt = [rng.permutation(np.concatenate(part)).tolist() for part in parts]
        _fill(dealt, self.min_partition_size)
        return _sorted([np.array(part, np.int64) for part in dealt])


@dataclass(frozen=True)
class ShardPartitioner:
    """Samples sorted by label are cut into equal shards, and each device gets some at random (McMahan et al., 2017)."""

    shards_per_partition: int = 2

    def __post_init__(self) -> None:
        if self.shards_per_partition < 1:
            raise InputError(f"shard.shards_per_partition: expected 1 or more, got {self.shards_per_partition}")

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]:
        rng = _prepare(labels, num_partitions, seed, self.shards_per_partition)
        shards = np.array_split(_by_label(labels, rng), num_partitions * self.shards_per_partition)
        dealt = np.split(rng.permutation(len(shards)), num_partitions)
        return _sorted([np.concatenate([shards[number] for number in numbers]) for numbers in dealt])


@dataclass(frozen=True)
class DigitsPartitioner:
    """Every device has samples of so many labels, the p digits per worker of Yang, Fang and Liu (ICLR 2021).

    Each label goes to equally many devices (but for one), which share its samples equally (but for one). Which labels
    meet on a device is random.
    """

    labels_per_partition: int = 2

    def __post_init__(self) -> None:
        if self.labels_per_partition < 1:
            raise InputError(f"digits.labels_per_partition: expected 1 or more, got {self.labels_per_partition}")

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]:
        rng = _prepare(labels, num_partitions, seed)
        known, counts = np.unique(labels, return_counts=True)
        each = self.labels_per_partition
        if each > len(known):
            raise InputError(f"digits.labels_per_partition: expected at most {len(known)}, all labels, got {each}")
        if each * num_partitions < len(known):
            raise InputError(
                f"{num_partitions} devices of {each} labels leave some of the {len(known)} labels to no device; "
                f"expected at least {math.ceil(len(known) / each)} devices"
            )
        takers = self._deal_labels(len(known), num_partitions, rng)
        parts: list[list[Numbers]] = [[] for _ in range(num_partitions)]
        for label, count, devices in zip(known, counts, takers):
            if count < len(devices):
                raise DataError(f"label {label} has {count} samples for {len(devices)} devices, expected one for each")
            own = rng.permutation(np.flatnonzero(labels == label))
            for device, samples in zip(devices, np.array_split(own, len(devices))):
                parts[device].append(samples)
        return _sorted([np.concatenate(part) for part in parts])

    def _deal_labels(self, known: int, devices: int, rng: np.random.Generator) -> list[list[int]]:
        """Choose the devices of each label: a device takes those that the fewest have so far, by lot among equals."""
        takers: list[list[int]] = [[] for _ in range(known)]
        for device in range(devices):
            lots = rng.permutation(known)
            order = sorted(range(known), key=lambda label: (len(takers[label]), lots[label]))
            for label in order[: self.labels_per_partition]:
                takers[label].append(device)
        return [rng.permutation(devices_of).tolist() for devices_of in takers]


@dataclass(frozen=True)
class SimilarityPartitioner:
    """A fraction of all samples is dealt at random, the rest sorted by label (Karimireddy et al., 2020; DOMO).

    `similarity` 1 is IID; with 0 every device has a stretch of the sorted samples.
    """

    similarity: float

    def __post_init__(self) -> None:
        if not 0 <= self.similarity <= 1:
            raise InputError(f"similarity.similarity: expected a fraction from 0 to 1, got {self.similarity}")

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]:
        rng = _prepare(labels, num_partitions, seed)
        order = rng.permutation(len(labels))
        dealt = round(self.similarity * len(labels))
        alike, rest = order[:dealt], order[dealt:]
        stretches = np.array_split(rest[np.argsort(labels[rest], kind="stable")], num_partitions)
        # From the other end, so that the devices which get one more here are not those which get one more there.
        shares = np.array_split(alike, num_partitions)[::-1]
        return _sorted([np.concatenate(pair) for pair in zip(shares, stretches)])


@dataclass(frozen=True)
class NaturalIdPartitioner:
    """Whole groups are dealt to devices at random: all samples of a writer, all reviews of a film.

    With `groups_per_partition` every device gets so many, and the groups that are left over go to no device. Without it
    all groups are dealt, equally many to each device (but for one).
    """

    groups_per_partition: int | None = None

    def __post_init__(self) -> None:
        if self.groups_per_partition is not None and self.groups_per_partition < 1:
            raise InputError(f"natural.groups_per_partition: expected 1 or more, got {self.groups_per_partition}")

    def partition(
        self, labels: Numbers, num_partitions: int, seed: int, groups: Numbers | None = None
    ) -> list[Numbers]:
        rng = _prepare(labels, num_partitions, seed)
        if groups is None:
            raise DataError(
                "the data has no natural groups; expected femnist, imdb, or your own .npz file with an array groups"
            )
        if groups.shape != labels.shape:
            raise DataError(f"expected one group per sample, got {len(groups)} for {len(labels)}")
        _, which = np.unique(groups, return_inverse=True)
        members = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
        wanted = num_partitions * (self.groups_per_partition or 1)
        if wanted > len(members):
            each = f" with {self.groups_per_partition} groups each" if self.groups_per_partition else ""
            raise DataError(f"{num_partitions} devices{each} need {wanted} groups, the data set has {len(members)}")
        order = rng.permutation(len(members))[: wanted if self.groups_per_partition else None]
        dealt = np.array_split(order, num_partitions)
        return _sorted([np.concatenate([members[number] for number in numbers]) for numbers in dealt])


PARTITIONERS: Mapping[str, type[Partitioner]] = MappingProxyType(
    {
        "iid": IidPartitioner,
        "dirichlet": DirichletPartitioner,
        "shard": ShardPartitioner,
        "digits": DigitsPartitioner,
        "similarity": SimilarityPartitioner,
        "natural": NaturalIdPartitioner,
    }
)


def make_partitioner(name: str, constants: Mapping[str, Any] = MappingProxyType({})) -> Partitioner:
    """Make a partitioner by its name in a job file, with its constants as keys.

    >>> make_partitioner("dirichlet", {"alpha": 0.1})
    DirichletPartitioner(alpha=0.1, min_partition_size=10)
    """
    kind = PARTITIONERS.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, PARTITIONERS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"no partitioner named {name!r}, expected one of {', '.join(PARTITIONERS)}{hint}")
    if unknown := sorted(set(constants) - set(constants_of(name))):
        takes = ", ".join(constants_of(name)) or "no constants"
        raise InputError(f"the partitioner {name!r} takes {takes}, got {', '.join(unknown)}")
    try:
        return decode(kind, dict(constants), defaults=True)
    except FieldError as error:
        raise InputError(f"partitioner {name!r}: {error}") from None


def constants_of(name: str) -> list[str]:
    """List the keys that a partitioner takes."""
    return [field.name for field in fields(PARTITIONERS[name])]  # type: ignore[arg-type]


def label_counts(parts: Sequence[Numbers], labels: Numbers, num_classes: int) -> Numbers:
    """Count the samples of each class that a device has, devices × classes."""
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts]).astype(np.int64)


def _prepare(labels: Numbers, num_partitions: int, seed: int, each: int = 1) -> np.random.Generator:
    """Check what is asked for and return a source of chance; there must be at least `each` samples for every device."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(f"expected one integer label per sample, got {labels.dtype} {labels.shape}")
    if num_partitions < 1:
        raise InputError(f"expected at least one device, got {num_partitions}")
    if seed < 0:
        raise InputError(f"seed: expected 0 or more, got {seed}")
    if len(labels) < num_partitions * max(each, 1):
        raise DataError(
            f"{len(labels)} samples are too few for {num_partitions} devices with at least {max(each, 1)} each"
        )
    return np.random.Generator(np.random.PCG64(seed))


def _by_label(labels: Numbers, rng: np.random.Generator) -> Numbers:
    """Sort all sample numbers by label, in a random order within each."""
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def _fill(dealt: list[list[int]], smallest: int) -> None:
    """Move samples from the devices that have most to those that have too few; the caller saw that there are enough."""
    most = [(-len(part), device) for device, part in enumerate(dealt)]
    heapq.heapify(most)
    for part in dealt:
        while len(part) < smallest:
            size, donor = heapq.heappop(most)
            if -size == len(dealt[donor]) > smallest:  # else it is out of date
                part.append(dealt[donor].pop())
                heapq.heappush(most, (-len(dealt[donor]), donor))


def _sorted(parts: Sequence[Numbers]) -> list[Numbers]:
    return [np.sort(part).astype(np.int64) for part in parts]
