"""A trainer for every layer: devices of a drawn cohort are swapped where a layer would stand still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from federation.axes.participate import Slot
from federation.coverage import coverage, width_of
from federation.manifest import Manifest

# A part of a model that needs a trainer: a layer, up to one of the widths that there are.
Part = tuple[int, float]


def uncovered_layers(manifest: Manifest, covers: Iterable[str]) -> list[str]:
    """List the layers that no device of a cohort trains in full, input side first; without parameters none needs it."""
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
    """Swap as few devices as it takes for every layer to have a trainer, where that can be; return the slots.

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
    """Find the last place whose device can go and leaves no part without a trainer, if the newcomer takes it."""
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
