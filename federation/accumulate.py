"""The one streaming accumulator: sum of w·x for every element, sum of w, of w·|x|² and a count for every layer.

Floating-point addition depends on the order of the terms. Here every w·x is rounded once, to a multiple of 2^-s, and
added as an integer, which is exact: whatever the order of the updates, and however partial sums are merged, the result
is the same bit for bit. So a round that was interrupted and folded again gives the same weights. The state is one int64
per element, twice the size of the model, however many updates there are.

s is the largest number for which max_weight · max_value · 2^s stays within 2^62. For max_value 2^10 and max_weight 2^20
the resolution 2^-s is 2^-32; for max_value 16 and 128 updates of weight 1 it is 2^-51. The mean of n updates of total
weight W differs from the exact one by at most

    (n / W) · 2^-(s+1)  +  2^-51 · largest |x|

where the first term is the rounding to the grid and the second that of products, division and result as doubles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError
from federation.space import ParameterSpace, Vector

Sums = NDArray[np.int64]
Doubles = NDArray[np.float64]

VERSION = 1  # of what `dump` gives
BITS = 62  # one bit less than int64 has: room for the roundings of 2^62 updates
STEP = 1 << 13  # elements at a time: what is computed in between stays in the cache
SMALLEST, LARGEST = 2.0**-64, 2.0**64  # of a declared bound: far from where doubles end

# A double of this size has a unit of one in its last place: adding it rounds to the nearest integer, ties to even,
# exactly as rint does, and leaves that integer in the low bits. Half the time of rint and a conversion.
ROUNDING = 1.5 * 2.0**52
ROUNDING_BITS = int(np.float64(ROUNDING).view(np.int64))
ROUNDING_RANGE = 2.0**51


class Accumulator:
    """Sums over updates that may cover different ranges of layers.

    `max_value` bounds the magnitude of every element, `max_weight` the sum of the weights in one layer.

    >>> from federation.space import Parameter
    >>> total = Accumulator(ParameterSpace([[Parameter("w", "weight", (2,))]]), max_value=8, max_weight=4)
    >>> for weight, values in (1, [1, 5]), (3, [1, 1]):
    ...     total.fold(0, [(slice(0, 2), np.array(values, np.float32))], weight, [0.0], largest=5)
    >>> total.mean(), total.weight(0)
    (array([1., 2.]), 4.0)
    """

    def __init__(self, space: ParameterSpace, *, max_value: float, max_weight: float) -> None:
        for name, bound in (("max_value", max_value), ("max_weight", max_weight)):
            if not SMALLEST <= bound <= LARGEST:
                raise InputError(f"{name} must be from 2^-64 to 2^64, got {bound}")
        self.max_value, self.max_weight = float(max_value), float(max_weight)
        self.shift = BITS - _bits(Fraction(self.max_value) * Fraction(self.max_weight))
        self._ends = [space.layer(index).stop for index in range(len(space.layers))]
        self._sums: Sums = np.zeros(space.size, np.int64)
        self._counts = [0] * len(self._ends)
        self._weights = [Fraction(0)] * len(self._ends)
        self._squares = [Fraction(0)] * len(self._ends)
        self._doubles: Doubles = np.empty(STEP)
        self._integers: Sums = np.empty(STEP, np.int64)
        self._whole = True

    @property
    def resolution(self) -> float:
        """The grid to which every w·x is rounded."""
        return math.ldexp(1.0, -self.shift)

    def fold(
        self,
        first_layer: int,
        blocks: Iterable[tuple[slice, Vector]],
        weight: float,
        squares: Sequence[float],
        *,
        largest: float,
    ) -> None:
        """Add an update of as many layers as there are `squares`; `largest` is the checked magnitude of its values.

        What cannot be added is refused before anything was. If `blocks` break off halfway, the sums cannot be mended:
        the accumulator then refuses everything, and has to be loaded or built again.
        """
        self._must_be_whole()
        layers = range(first_layer, first_layer + len(squares))
        if not 0 <= layers.start < layers.stop <= len(self._ends):
            raise InputError(f"no layers [{layers.start}, {layers.stop}) in a model of {len(self._ends)}")
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"a weight must be finite and not negative, got {weight}")
        if not 0 <= largest <= self.max_value:
            raise InputError(f"values up to {largest:.6g}; this round was declared with max_value {self.max_value:.6g}")
        if not all(math.isfinite(square) and square >= 0 for square in squares):
            raise InputError("sums of squares must be finite and not negative")
        exact = Fraction(float(weight))
        self._must_fit([exact] * len(layers), layers)
        self._whole = False
        self._add(blocks, slice(self._start(layers.start), self._ends[layers.stop - 1]), float(weight), largest)
        for layer, square in zip(layers, squares):
            self._counts[layer] += 1
            self._weights[layer] += exact
            self._squares[layer] += exact * Fraction(float(square))
        self._whole = True

    def merge(self, other: Accumulator) -> None:
        """Add everything that another one of the same model and bounds has folded."""
        self._must_be_whole()
        other._must_be_whole()
        if self._bounds() != other._bounds():
            raise InputError("only accumulators of the same layers, max_value and max_weight can be merged")
        self._must_fit(other._weights, range(len(self._ends)))
        self._sums += other._sums
        self._counts = [a + b for a, b in zip(self._counts, other._counts)]
        self._weights = [a + b for a, b in zip(self._weights, other._weights)]
        self._squares = [a + b for a, b in zip(self._squares, other._squares)]

    def count(self, layer: int) -> int:
        """Updates that had this layer."""
        return self._counts[layer]

    def weight(self, layer: int) -> float:
        """Sum of their weights; 0: nobody trained it, and `mean` is zero there."""
        return float(self._weights[layer])

    def squares(self, layer: int) -> float:
        """Sum of w·|x|² over them, rounded once from the exact sum."""
        return float(self._squares[layer])

    def mean(self, at: slice = slice(None), out: Doubles | None = None) -> Doubles:
        """Sum of w·x by sum of w for a slice of the flat vector; zeros where there is no weight."""
        self._must_be_whole()
        start, stop, step = at.indices(self._sums.size)
        if step != 1:
            raise InputError("a mean is taken over consecutive elements")
        stop = max(start, stop)
        out = np.empty(stop - start) if out is None else out
        for layer, weight in enumerate(self._weights):
            begin, end = max(start, self._start(layer)), min(stop, self._ends[layer])
            if begin < end and weight:
                divisor = float(weight * Fraction(2) ** self.shift)
                np.divide(self._sums[begin:end], divisor, out=out[begin - start : end - start])
            elif begin < end:
                out[begin - start : end - start] = 0
        return out

    def dump(self) -> tuple[dict[str, Any], dict[str, Sums]]:
        """The state as (JSON, arrays) to be written at once: the array is the live one."""
        self._must_be_whole()
        header = {
            **self._bounds(),
            "counts": list(self._counts),
            "weights": [str(weight) for weight in self._weights],
            "squares": [str(square) for square in self._squares],
        }
        return header, {"sums": self._sums}

    @classmethod
    def load(cls, space: ParameterSpace, header: Mapping[str, Any], arrays: Mapping[str, Sums]) -> Accumulator:
        """What was dumped; a writable array is taken over, not copied."""
        made = cls(space, max_value=header["max_value"], max_weight=header["max_weight"])
        sums, bounds = arrays["sums"], made._bounds()
        if {name: header.get(name) for name in bounds} != bounds or sums.shape != made._sums.shape:
            raise InputError("the saved sums are of another version or another model")
        made._sums = np.require(sums, np.int64, ["C", "W"])
        made._counts = [int(count) for count in header["counts"]]
        made._weights = [Fraction(weight) for weight in header["weights"]]
        made._squares = [Fraction(square) for square in header["squares"]]
        return made

    def _add(self, blocks: Iterable[tuple[slice, Vector]], whole: slice, weight: float, largest: float) -> None:
        factor = math.ldexp(weight, self.shift)
        fast = factor * largest < ROUNDING_RANGE
        position = whole.start
        for where, values in blocks:
            if where.start != position or where.stop > whole.stop or values.shape != (where.stop - where.start,):
                raise InputError(f"expected consecutive blocks of {whole}, got {values.shape} for {where}")
            for start in range(0, values.size, STEP):
                part = values[start : start + STEP]
                sums = self._sums[position : position + part.size]
                doubles = self._doubles[: part.size]
                np.copyto(doubles, part)
                np.multiply(doubles, factor, out=doubles)
                np.add(sums, self._rounded(doubles, fast), out=sums)
                position += part.size
        if position != whole.stop:
            raise InputError(f"the blocks end at element {position}; expected {whole.stop}")

    def _rounded(self, doubles: Doubles, fast: bool) -> Sums:
        """The nearest integers; the doubles are lost."""
        if fast:
            integers: Sums = doubles.view(np.int64)
            np.add(doubles, ROUNDING, out=doubles)
            return np.subtract(integers, ROUNDING_BITS, out=integers)
        integers = self._integers[: doubles.size]
        np.copyto(integers, np.rint(doubles, out=doubles), casting="unsafe")
        return integers

    def _start(self, layer: int) -> int:
        return self._ends[layer - 1] if layer else 0

    def _must_be_whole(self) -> None:
        if not self._whole:
            raise InputError("an update was added in part only; load the accumulator, or fold everything again")

    def _must_fit(self, weights: Sequence[Fraction], layers: range) -> None:
        for layer, weight in zip(layers, weights):
            if self._weights[layer] + weight > self.max_weight:
                total = float(self._weights[layer] + weight)
                raise InputError(f"layer {layer}: weights of {total:.6g}; declared was {self.max_weight:.6g} at most")

    def _bounds(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "max_value": self.max_value,
            "max_weight": self.max_weight,
            "layers": list(self._ends),
        }


def _bits(value: Fraction) -> int:
    """The smallest e with value <= 2^e."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if value <= Fraction(2) ** e else e + 1
