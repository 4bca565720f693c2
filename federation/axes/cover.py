"""What a device trains: everything, or as much of the output side as it can.

Lee et al., Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, 2024: a weak
device trains the last layers, so a layer near the input is trained by strong devices only. If the draw of a round
happens to have none of them, that layer stands still; `ensure_coverage` puts one in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from federation.axes.participate import Slot
from federation.capacity import predicted_memory
from federation.errors import InputError, OutOfMemory
from federation.manifest import Boundary, Manifest


@dataclass(frozen=True)
class DeviceProfile:
    """What a device says about itself. The boundary it measured counts most, then its tier, then its memory."""

    memory: int | None = None  # bytes for training, beside the idle process; None: enough for everything
    tier: str | None = None  # fixed by whoever runs the fleet
    boundary: str | None = None  # nearest to the input that the device can train, as it measured
    threads: int = 1
    runtime: str = ""
    engines: tuple[str, ...] = ("portable",)

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise InputError(f"profile.memory: expected bytes above 0, got {self.memory}")
        if self.threads < 1:
            raise InputError(f"profile.threads: expected at least 1, got {self.threads}")
        if not self.engines:
            raise InputError("profile.engines: expected at least one, got none")


class Cover(Protocol):
    """A rule for what a device trains."""

    def choose(self, manifest: Manifest, profile: DeviceProfile) -> Boundary:
        """Where the device trains from; OutOfMemory if it cannot do what the rule asks for."""


@dataclass(frozen=True)
class OutputSide:
    """EmbracingFL: from the boundary nearest to the input that the device can train, to the output.

    With devices that can train everything this is FedAvg.
    """

    batch: int | None = None  # for which memory is predicted; None: the batch of the manifest

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise InputError(f"output_side.batch: expected at least 1, got {self.batch}")

    def choose(self, manifest: Manifest, profile: DeviceProfile) -> Boundary:
        told = profile.boundary or profile.tier
        if told:
            boundary = manifest.boundary(told)
            if not _has_graph(boundary, profile):
                raise InputError(f"boundary {boundary.name!r} has no graph for the engines {profile.engines}")
            return boundary
        ordinary = (b for b in manifest.boundaries if b.narrow is None and _has_graph(b, profile))
        usable = sorted(ordinary, key=_nearest_to_the_input)
        if not usable:
            raise InputError(f"{manifest.name!r} has no training graph for the engines {profile.engines}")
        need = 0
        for boundary in usable:
            need = predicted_memory(manifest, boundary, self.batch).total
            if profile.memory is None or need <= profile.memory:
                return boundary
        raise OutOfMemory(
            f"no boundary of {manifest.name!r} fits {profile.memory} bytes; {usable[-1].name!r} takes {need}"
        )


@dataclass(frozen=True)
class Everything:
    """Every device trains the whole model; one that cannot does not take part."""

    batch: int | None = None

    def __post_init__(self) -> None:
        OutputSide(self.batch)

    def choose(self, manifest: Manifest, profile: DeviceProfile) -> Boundary:
        most = OutputSide(self.batch).choose(manifest, profile)
        if most.layer > 0 or most.last_steps is not None:
            raise OutOfMemory(f"everything is to be trained, and the device can train from {most.name!r} on")
        return most


def trained_layers(manifest: Manifest, boundary: Boundary) -> range:
    """Indices of the layers that training from a boundary changes."""
    return range(boundary.layer, len(manifest.layers))


def uncovered_layers(manifest: Manifest, boundaries: Iterable[Boundary]) -> list[str]:
    """Names of the layers that nobody of a cohort trains, input side first; layers without parameters need nobody."""
    return [manifest.layers[index].name for index in _without_trainer(manifest, boundaries)]


def ensure_coverage(
    manifest: Manifest,
    slots: Sequence[Slot],
    boundaries: Mapping[str, Boundary],
    reserve: Sequence[str],
    *,
    fixed: Collection[str] = (),
) -> list[Slot]:
    """The same slots, with as few devices swapped as it takes for every layer to have a trainer, where that can be.

    `boundaries` has what every available device trains, `reserve` those that were not drawn, in their random order,
    and `fixed` the devices that must stay, such as those of a window that has begun. While a layer has no trainer, the
    device of the reserve that trains the most such layers takes the place of the one drawn last of those that can be
    spared; among equals the first. A swap makes the draw a little less even, towards devices that train more, so
    `Participation.balance` turns it off. A draw with replacement is left as it is: there an update's count is part
    of the estimate.
    """
    kept, waiting = list(slots), [device for device in reserve if device in boundaries]
    if any(slot.count > 1 for slot in kept):
        return kept
    while lacking := _without_trainer(manifest, (boundaries[slot.device] for slot in kept)):
        # Thousands of devices share a handful of boundaries: the gain is computed once for each of these.
        layers = {b.name: trained_layers(manifest, b) for b in boundaries.values()}
        gains = {name: sum(index in trained for index in lacking) for name, trained in layers.items()}
        best = max(waiting, key=lambda device: gains[boundaries[device].name], default=None)
        if best is None or not gains[boundaries[best].name]:
            break
        place = _spared(manifest, kept, boundaries, best, fixed)
        if place is None:
            break
        kept[place] = replace(kept[place], device=best)
        waiting.remove(best)
    return kept


def _spared(
    manifest: Manifest, slots: Sequence[Slot], boundaries: Mapping[str, Boundary], comer: str, fixed: Collection[str]
) -> int | None:
    """The last place whose device can go without leaving a layer to nobody, if the newcomer takes it."""
    trainers = Counter(index for slot in slots for index in trained_layers(manifest, boundaries[slot.device]))
    trainers.update(trained_layers(manifest, boundaries[comer]))
    for place, slot in reversed(list(enumerate(slots))):
        mine = (i for i in trained_layers(manifest, boundaries[slot.device]) if manifest.layers[i].parameters)
        if slot.device not in fixed and all(trainers[index] > 1 for index in mine):
            return place
    return None


def _without_trainer(manifest: Manifest, boundaries: Iterable[Boundary]) -> list[int]:
    trained = {index for boundary in boundaries for index in trained_layers(manifest, boundary)}
    return [index for index, layer in enumerate(manifest.layers) if layer.parameters and index not in trained]


def _has_graph(boundary: Boundary, profile: DeviceProfile) -> bool:
    return bool(
        ("portable" in profile.engines and boundary.train)
        or ("ort-training" in profile.engines and boundary.ort_training)
    )


def _nearest_to_the_input(boundary: Boundary) -> tuple[int, int]:
    """Of boundaries at the same layer the one that keeps more: it backpropagates through more steps."""
    return boundary.layer, -boundary.activations
