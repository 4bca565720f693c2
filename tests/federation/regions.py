"""Regions and what they are in plain numpy: for every parameter a mask. For tests of whatever works on regions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from federation.region import Region, box, channel_part, of_layers, whole
from federation.space import Kind, Parameter, ParameterSpace, Vector

Masks = dict[str, NDArray[np.bool_]]  # by parameter
DIMENSION = st.integers(1, 4)
SHAPE = st.lists(DIMENSION, max_size=4).map(tuple)


@dataclass(frozen=True)
class Known:
    """A region and the masks that say the same."""

    space: ParameterSpace
    region: Region
    masks: Masks

    @property
    def places(self) -> NDArray[np.int64]:
        """Which elements of the flat vector, in order."""
        return np.flatnonzero(flat_mask(self.space, self.masks))

    def __and__(self, other: Known) -> Known:
        masks = {name: mask & other.masks[name] for name, mask in self.masks.items()}
        return Known(self.space, self.region & other.region, masks)

    def only(self, kind: Kind) -> Known:
        kinds = {p.name: p.kind for p in self.space}
        masks = {name: mask & (kinds[name] == kind) for name, mask in self.masks.items()}
        return Known(self.space, self.region.only(kind), masks)


def flat_mask(space: ParameterSpace, masks: Masks) -> NDArray[np.bool_]:
    return np.concatenate([np.zeros(0, np.bool_), *(masks[parameter.name].ravel() for parameter in space)])


@st.composite
def spaces(draw: st.DrawFn) -> ParameterSpace:
    """One to four layers; in each weights and behind them statistics, or nothing."""
    layers = []
    for index in range(draw(st.integers(1, 4))):
        shapes = draw(st.lists(SHAPE, max_size=3))
        weights = draw(st.integers(0, len(shapes)))
        kinds: list[Kind] = ["weight"] * weights + ["statistic"] * (len(shapes) - weights)
        layers.append([Parameter(f"p{index}.{n}", kind, shape) for n, (kind, shape) in enumerate(zip(kinds, shapes))])
    return ParameterSpace(layers)


def everything(space: ParameterSpace) -> Known:
    return Known(space, whole(space), {p.name: np.ones(p.shape, np.bool_) for p in space})


def some_layers(space: ParameterSpace, layers: set[int]) -> Known:
    masks = {}
    for index, layer in enumerate(space.layers):
        masks |= {p.name: np.full(p.shape, index in layers) for p in layer}
    return Known(space, of_layers(space, layers), masks)


def part_of(space: ParameterSpace, part: int, parts: int) -> Known:
    masks = {}
    for parameter in space:
        mask = np.zeros(parameter.shape or (1,), np.bool_)
        rows = len(mask)
        mask[rows * part // parts : rows * (part + 1) // parts] = True
        masks[parameter.name] = mask.reshape(parameter.shape)
    return Known(space, channel_part(space, part, parts), masks)


@st.composite
def boxes(draw: st.DrawFn, space: ParameterSpace) -> Known:
    shapes, masks = [], {}
    for layer in space.layers:
        narrow = []
        for p in layer:
            shape = tuple(draw(st.integers(1, n)) if axis < 2 else n for axis, n in enumerate(p.shape))
            masks[p.name] = np.zeros(p.shape, np.bool_)
            masks[p.name][tuple(slice(n) for n in shape)] = True
            narrow.append(shape)
        shapes.append(narrow)
    return Known(space, box(space, shapes), masks)


@st.composite
def regions(draw: st.DrawFn, space: ParameterSpace) -> Known:
    """Layers, a part of the channels, a box, or what two of these have in common."""
    kind = draw(st.sampled_from(["layers", "part", "box", "both"]))
    if kind == "layers":
        return some_layers(space, draw(st.sets(st.integers(0, len(space.layers) - 1))))
    if kind == "part":
        parts = draw(st.integers(1, 5))
        return part_of(space, draw(st.integers(0, parts - 1)), parts)
    if kind == "box":
        return draw(boxes(space))
    return draw(regions(space)) & draw(regions(space))


def vector_of(space: ParameterSpace) -> Vector:
    """Every element another value."""
    return np.arange(1, space.size + 1, dtype=np.float32)
