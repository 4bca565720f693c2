"""What a device trains, as text: a boundary, a tier, a narrow boundary, several of these, or the front of the model.

layer3.0              from there to the output
weak                  the boundary of that tier
stem@0.45             the first channels of every layer
stem@0.45|stem@0.2    in every step one of these widths, drawn anew; the first is the widest
..layer2.0            everything in front of layer2.0, with the graph of the whole model
layer3.0+statistics   from there to the output; and the batch-norm statistics in front of it are measured
"""

from __future__ import annotations

from dataclasses import dataclass

from federation.errors import BundleError
from federation.manifest import Boundary, Manifest

BEFORE, OR, STATISTICS = "..", "|", "+statistics"


@dataclass(frozen=True)
class Coverage:
    """The graph that is run, and the layers that it changes."""

    boundary: Boundary
    layers: range
    ordered: tuple[Boundary, ...] = ()  # one of these in every step, widest first; `boundary` is the first of them
    measures: bool = False  # the device reports statistics of the batch norms in front of the boundary, too

    @property
    def graphs(self) -> tuple[Boundary, ...]:
        """All graphs that a device needs for it."""
        return self.ordered or (self.boundary,)


def coverage(manifest: Manifest, text: str) -> Coverage:
    """What a text stands for in a bundle."""
    if OR in text:
        return _ordered(manifest, text)
    if not text.startswith(BEFORE):
        boundary = manifest.boundary(text.removesuffix(STATISTICS))
        measures = text.endswith(STATISTICS)
        return Coverage(boundary, range(boundary.layer, len(manifest.layers)), measures=measures)
    names = [layer.name for layer in manifest.layers]
    name = text.removeprefix(BEFORE)
    if name not in names[1:]:
        raise BundleError(f"coverage {text!r}: expected a layer behind the first: {', '.join(names[1:])}")
    return Coverage(manifest.whole, range(names.index(name)))


def width_of(boundary: Boundary) -> float:
    """The share of the channels that a boundary trains."""
    return 1.0 if boundary.width is None else boundary.width


def _ordered(manifest: Manifest, text: str) -> Coverage:
    found = tuple(manifest.boundary(name) for name in text.split(OR))
    widths = [width_of(boundary) for boundary in found]
    if not all(boundary.whole or boundary.narrow for boundary in found) or widths != sorted(set(widths), reverse=True):
        raise BundleError(f"coverage {text!r}: expected the whole model or narrow boundaries, widest first, each once")
    return Coverage(found[0], range(len(manifest.layers)), found)
