"""ParameterSpace: every parameter of a model as a slice of ONE flat float32 vector.

Layers are contiguous and stand input side first, so "the last layers" is a suffix of the vector: what a weak
device trains, sends and stores is one slice. Inside a layer trained weights come first, statistics (batch-norm
running mean and variance) last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError

Vector = NDArray[np.float32]
Kind = Literal["weight", "statistic"]


@dataclass(frozen=True)
class Parameter:
    """One named tensor; a `weight` has a gradient, a `statistic` gets a new value from every training step."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0:
            raise InputError(f"parameter {self.name!r} has the impossible shape {self.shape}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterSpace:
    """The order of all parameters, layer by layer.

    >>> space = ParameterSpace([[Parameter("w", "weight", (2, 3))], [Parameter("b", "weight", (4,))]])
    >>> space.size, space.slice_of("b"), space.suffix(1)
    (10, slice(6, 10, None), slice(6, 10, None))
    """

    layers: Sequence[Sequence[Parameter]]
    _slices: Mapping[str, slice] = field(init=False, repr=False, compare=False)
    _starts: Sequence[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slices: dict[str, slice] = {}
        starts, offset = [], 0
        for layer in self.layers:
            starts.append(offset)
            for parameter in layer:
                if parameter.name in slices:
                    raise InputError(f"parameter {parameter.name!r} appears twice; each belongs to one layer")
                slices[parameter.name] = slice(offset, offset + parameter.size)
                offset += parameter.size
        object.__setattr__(self, "_slices", slices)
        object.__setattr__(self, "_starts", (*starts, offset))

    @property
    def size(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Parameter]:
        for layer in self.layers:
            yield from layer

    def slice_of(self, name: str) -> slice:
        """Find one parameter in the flat vector."""
        try:
            return self._slices[name]
        except KeyError:
            raise InputError(f"no parameter named {name!r} in this model") from None

    def layer(self, index: int) -> slice:
        """Find one layer in the flat vector."""
        return slice(self._starts[index], self._starts[index + 1])

    def suffix(self, first_layer: int) -> slice:
        """Find everything from one layer to the output: what a device that starts there trains."""
        return slice(self._starts[first_layer], self.size)

    def views(self, vector: Vector, *, start: int = 0) -> dict[str, Vector]:
        """View a flat vector that begins at element `start` of the space as named tensors; nothing is copied."""
        end = start + vector.size
        if vector.ndim != 1 or vector.dtype != np.float32 or end > self.size:
            raise InputError(
                f"expected a flat float32 vector of at most {self.size - start} elements, "
                f"got {vector.dtype} {vector.shape}"
            )
        found: dict[str, Vector] = {}
        for parameter in self:
            where = self._slices[parameter.name]
            if start <= where.start and where.stop <= end:
                found[parameter.name] = vector[where.start - start : where.stop - start].reshape(parameter.shape)
        return found

    def flatten(self, tensors: Mapping[str, Vector]) -> Vector:
        """Join named tensors to the flat vector; all must be there and have their shapes."""
        vector = np.empty(self.size, np.float32)
        for parameter in self:
            tensor = tensors.get(parameter.name)
            if tensor is None or tensor.shape != parameter.shape:
                got = "nothing" if tensor is None else str(tensor.shape)
                raise InputError(f"parameter {parameter.name!r}: expected shape {parameter.shape}, got {got}")
            vector[self._slices[parameter.name]] = tensor.ravel()
        return vector
