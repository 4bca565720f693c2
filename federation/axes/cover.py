"""What a device trains: everything, or as much of the output side as it can.

Lee et al., Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, 2024: a weak
device trains the last layers, so a layer near the input is trained by strong devices only. If the draw of a round
happens to have none of them, that layer stands still; `ensure_coverage` puts one in. Other rules are in width.py
(fewer channels) and input_side.py (the first layers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from federation.axes.participate import Slot
from federation.capacity import predicted_memory
from federation.coverage import coverage, width_of
from federation.errors import InputError, OutOfMemory
from federation.manifest import Boundary, Manifest


@dataclass(frozen=True)
class DeviceProfile:
    """What a device says about itself. The boundary it measured counts most, then its tier, then its memory."""

    memory: int | None = None  # bytes for training, beside the idle process; None: enough for everything
    tier: str | None = None  # fixed by the administrator of the fleet
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

    def can_run(self, boundary: Boundary) -> bool:
        """Whether one of its engines has a graph for a boundary."""
        portable = "portable" in self.engines and boundary.train is not None
        return portable or ("ort-training" in self.engines and bool(boundary.ort_training))


class Cover(Protocol):
    """A rule for what a device trains."""

    def choose(self, manifest: Manifest, profile: DeviceProfile) -> Boundary:
        """The graph that the device runs; OutOfMemory if it cannot do what the rule asks for."""

    def cover(self, manifest: Manifest, profile: DeviceProfile) -> str:
        """What the device trains, as text: federation/coverage.py."""


def check_batch(rule: str, batch: int | None) -> None:
    """The batch for which a rule predicts memory; None: the batch of the manifest."""
    if batch is not None and batch < 1:
        raise InputError(f"{rule}.batch: expected at least 1, got {batch}")


@dataclass(frozen=True)
class OutputSide:
    """EmbracingFL: from the boundary nearest to the input that the device can train, to the output.

    With devices that can train everything this is FedAvg.
    """

    batch: int | None = None  # for which memory is predicted; None: the batch of the manifest

    def __post_init__(self) -> None:
        check_batch("output_side", self.batch)

    def cover(self, manifest: Manifest, profile: DeviceProfile) -> str:
        return self.choose(manifest, profile).name

    def choose(self, manifest: Manifest, profile: DeviceProfile) -> Boundary:
        told = profile.boundary or profile.tier
        if told:
            boundary = manifest.boundary(told)
            if not profile.can_run(boundary):
                raise InputError(f"boundary {boundary.name!r} has no graph for the engines {profile.engines}")
            return boundary
        ordinary = (b for b in manifest.boundaries if b.narrow is None and profile.can_run(b))
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
        check_batch("everything", self.batch)

    def cover(self, manifest: Manifest, profile: DeviceProfile) -> str:
        return self.choose(manifest, profile).name

    def choose(self, manifest: Manifest, profile: DeviceProfile) -> Boundary:
        most = OutputSide(self.batch).choose(manifest, profile)
        if not most.whole:
            raise OutOfMemory(f"everything is to be trained, and the device can train from {most.name!r} on")
        return most


# A part of a model that some device should train: a layer, up to one of the widths that there are.
Part = tuple[int, float]


def uncovered_layers(manifest: Manifest, covers: Iterable[str]) -> list[str]:
    """List the layers with parameters that no device of a cohort trains in full, input side first."""
    trained = frozenset[Part]().union(*(_parts(manifest, text) for text in set(covers)))
    return [manifest.layers[index].name for index in sorted({index for index, _ in _all_parts(manifest) - trained})]


def ensure_coverage(
    manifest: Manifest,
    slots: Sequence[Slot],
    covers: Mapping[str, str],
    reserve: Sequence[str],
    *,
    fixed: Collection[str] = (),
) -> list[Slot]:
    """The same slots, with as few devices swapped as it takes for every layer to have a trainer, where that can be.

    `covers` has what every available device trains, `reserve` those that were not drawn, in their random order,
    and `fixed` the devices that must stay, such as those of a window that has begun. While a layer has no trainer, the
    device of the reserve that trains the most such layers takes the place of the one drawn last of those that can be
    spared; among equals the first. A swap makes the draw a little less even, towards devices that train more, so
    `Participation.balance` turns it off. A draw with replacement is left as it is: there an update's count is part
    of the estimate.
    """
    kept, waiting = list(slots), [device for device in reserve if device in covers]
    if any(slot.count > 1 for slot in kept):
        return kept
    # Thousands of devices share a handful of texts: each is looked up once.
    known = {text: _parts(manifest, text) for text in set(covers.values())}
    parts = {device: known[text] for device, text in covers.items()}
    while lacking := _all_parts(manifest).difference(*(parts[slot.device] for slot in kept)):
        gains = {text: len(lacking & trained) for text, trained in known.items()}
        best = max(waiting, key=lambda device: gains[covers[device]], default=None)
        if best is None or not gains[covers[best]]:
            break
        place = _spared(kept, parts, best, fixed)
        if place is None:
            break
        kept[place] = replace(kept[place], device=best)
        waiting.remove(best)
    return kept


def _spared(
    slots: Sequence[Slot], parts: Mapping[str, frozenset[Part]], comer: str, fixed: Collection[str]
) -> int | None:
    """Find the last place whose device can go without leaving a part untrained, if the newcomer takes it."""
    trainers = Counter(part for slot in slots for part in parts[slot.device])
    trainers.update(parts[comer])
    for place, slot in reversed(list(enumerate(slots))):
        if slot.device not in fixed and all(trainers[part] > 1 for part in parts[slot.device]):
            return place
    return None


def _all_parts(manifest: Manifest) -> frozenset[Part]:
    return _up_to(manifest, range(len(manifest.layers)), 1.0)


def _parts(manifest: Manifest, text: str) -> frozenset[Part]:
    covered = coverage(manifest, text)
    return _up_to(manifest, covered.layers, width_of(covered.boundary))


def _up_to(manifest: Manifest, layers: range, width: float) -> frozenset[Part]:
    """A narrow model trains a layer up to its width; what lies beyond needs another device."""
    widths = {width_of(boundary) for boundary in manifest.boundaries} | {1.0}
    return frozenset((i, w) for i in layers if manifest.layers[i].parameters for w in widths if w <= width)


def _nearest_to_the_input(boundary: Boundary) -> tuple[int, int]:
    """Of boundaries at the same layer the one that keeps more: it backpropagates through more steps."""
    return boundary.layer, -boundary.activations
