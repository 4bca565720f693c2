"""Width reduction (HeteroFL, FjORD): a narrow model keeps the first channels of every layer of the wide one.

Each of its tensors is the corner of a wide tensor where all indices are small. Only the first two dimensions, outputs
and inputs, may be shorter; behind a flatten the inputs of a channel are neighbours, so that the first channels are
the first columns there, too. A corner is thus a range of rows with a prefix of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError
from federation.space import Parameter, ParameterSpace, Vector

# Of every parameter of every layer, in the order of the space.
Shapes = Sequence[Sequence[tuple[int, ...]]]


def narrow_space(layers: Sequence[Sequence[Parameter]], shapes: Shapes) -> ParameterSpace:
    """Give the same parameters narrow shapes; an error if one does not fit into its corner, or none is given."""
    if len(shapes) != len(layers):
        raise InputError(f"expected narrow shapes for {len(layers)} layers, got {len(shapes)}")
    narrow = []
    for number, (layer, own) in enumerate(zip(layers, shapes, strict=True)):
        if len(own) != len(layer):
            raise InputError(f"layer {number} has {len(layer)} parameters, got {len(own)} narrow shapes")
        for parameter, shape in zip(layer, own, strict=True):
            if not fits(shape, parameter.shape):
                raise InputError(
                    f"{parameter.name}: {shape} is no corner of {parameter.shape}; expected as many dimensions, "
                    "the first two at most as large and at least 1, the others the same"
                )
        narrow.append([replace(p, shape=tuple(shape)) for p, shape in zip(layer, own, strict=True)])
    return ParameterSpace(narrow)


def fits(narrow: Sequence[int], wide: Sequence[int]) -> bool:
    """Tell whether a tensor may be the corner of another."""
    pairs = list(zip(narrow, wide, strict=False))
    return (
        len(narrow) == len(wide)
        and all(0 < small <= large or small == large for small, large in pairs[:2])
        and all(small == large for small, large in pairs[2:])
    )


def corner(tensor: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """View the part of a wide tensor that a narrow one is."""
    return tensor[tuple(slice(size) for size in shape)]


def corners(wide: ParameterSpace, vector: Vector, narrow: ParameterSpace) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every narrow parameter's name and its corner in a vector of the wide space, as a view."""
    views = wide.views(vector)
    for parameter in narrow:
        yield parameter.name, corner(views[parameter.name], parameter.shape)


def take_corners(wide: ParameterSpace, vector: Vector, narrow: ParameterSpace) -> Vector:
    """Make a vector of the narrow space with the wide one's values."""
    found = np.empty(narrow.size, np.float32)
    targets = narrow.views(found)
    for name, value in corners(wide, vector, narrow):
        targets[name][...] = value
    return found
