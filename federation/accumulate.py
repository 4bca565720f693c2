"""The one streaming accumulator: sum of w·x for every element, of w·|x|² for every weight, of w and a count by layer.

An update covers a region (region.py), and a mean is taken over those that have an element: layers that weak devices do
not train, channels that narrow ones do not have. FedNova's normalisation is part of it: an update may be divided by its
own length a before it is summed, and the mean is multiplied by the mean of all lengths again,

    mean = (Σ w·a / Σ w) · (Σ (w/a)·x / Σ w)         a = 1 for all: the plain mean

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
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError
from federation.region import Region, Span
from federation.space import ParameterSpace, Vector

Sums = NDArray[np.int64]
Doubles = NDArray[np.float64]

BITS = 62  # one bit less than int64 has: room for the roundings of 2^62 updates
MOST_PARTS = 62  # of a layer: a bit for each
STEP = 1 << 13  # elements at a time: what is computed in between stays in the cache
SMALLEST, LARGEST = 2.0**-64, 2.0**64  # of a declared bound: far from where doubles end
SQUARE_BITS, LARGEST_SQUARE = 200, 2.0**700  # sums of squares are multiples of 2^-200

# A double of this size has a unit of one in its last place: adding it rounds to the nearest integer, ties to even,
# exactly as rint does, and leaves that integer in the low bits. Half the time of rint and a conversion.
ROUNDING = 1.5 * 2.0**52
ROUNDING_BITS = int(np.float64(ROUNDING).view(np.int64))
ROUNDING_RANGE = 2.0**51


@dataclass(frozen=True)
class Mass:
    """Of the updates that cover the same part of a layer: how many, Σ w and Σ w·a."""

    count: int = 0
    weight: Fraction = Fraction(0)
    lengths: Fraction = Fraction(0)

    def __add__(self, other: Mass) -> Mass:
        return Mass(self.count + other.count, self.weight + other.weight, self.lengths + other.lengths)

    def divisor(self, shift: int) -> float:
        """Compute by what a sum is divided: (Σ w)² / Σ w·a, on the grid."""
        return float(self.weight**2 / self.lengths * Fraction(2) ** shift)


Part = tuple[Span, ...]  # of a layer


class Accumulator:
    """Sums over updates that may cover different regions.

    `max_value` bounds the magnitude of every element, `max_weight` the sum of the weights in one layer.

    >>> from federation.region import whole
    >>> from federation.space import Parameter
    >>> space = ParameterSpace([[Parameter("w", "weight", (2,))]])
    >>> total = Accumulator(space, max_value=8, max_weight=4)
    >>> for weight, values in (1, [1, 5]), (3, [1, 1]):
    ...     total.fold(whole(space), [(Span(0, 1, 2, 2), np.array(values, np.float32))], weight, {}, largest=5)
    >>> total.mean(), total.weight(0)
    (array([1., 2.]), 4.0)
    """

    def __init__(self, space: ParameterSpace, *, max_value: float, max_weight: float) -> None:
        for name, bound in (("max_value", max_value), ("max_weight", max_weight)):
            if not SMALLEST <= bound <= LARGEST:
                raise InputError(f"{name} must be from 2^-64 to 2^64, got {bound}")
        self.max_value = float(max_value)
        self.max_weight = float(max_weight)
        self.shift = BITS - _bits(Fraction(self.max_value) * Fraction(self.max_weight))
        self._ends = [space.layer(index).stop for index in range(len(space.layers))]
        self._sums: Sums = np.zeros(space.size, np.int64)
        self._masses: list[dict[Part, Mass]] = [{} for _ in self._ends]
        self._squares = {parameter.name: 0 for parameter in space if parameter.kind == "weight"}
        self._doubles: Doubles = np.empty(STEP)
        self._integers: Sums = np.empty(STEP, np.int64)
        self._whole = True

    @property
    def resolution(self) -> float:
        """The grid to which every w·x is rounded."""
        return math.ldexp(1.0, -self.shift)

    def fold(
        self,
        region: Region,
        blocks: Iterable[tuple[Span, Vector]],
        weight: float,
        squares: Mapping[str, float],
        *,
        largest: float,
        length: float = 1.0,
    ) -> None:
        """Add an update of a region; `largest` is the checked magnitude of its values, `length` the a of FedNova.

        What cannot be added is refused before anything was. If `blocks` break off halfway, the sums cannot be mended:
        the accumulator then refuses everything, and has to be built again.
        """
        self._must_be_whole()
        if len(region.layers) != len(self._ends) or (region.runs and region.runs[-1].stop > self._sums.size):
            raise InputError(f"the region has {len(region.layers)} layers, the model {len(self._ends)}, or other sizes")
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"a weight must be finite and not negative, got {weight}")
        if not 1 <= length < math.inf:
            raise InputError(f"a length must be a number from 1, got {length}")
        if not 0 <= largest <= self.max_value:
            raise InputError(f"values up to {largest:.6g}; this round was declared with max_value {self.max_value:.6g}")
        good = all(0 <= square <= LARGEST_SQUARE for square in squares.values())
        if not (good and squares.keys() <= self._squares.keys()):
            raise InputError("expected sums of squares of weights by name, from 0 to 2^700")
        exact = Fraction(float(weight))
        mass = Mass(1, exact, exact * Fraction(float(length)))
        trained = [index for index, part in enumerate(region.layer_runs) if part]
        self._must_fit({index: exact for index in trained})
        self._whole = False
        self._add(region.runs, blocks, float(weight) / float(length), largest)
        for index in trained:
            own, part = self._masses[index], region.layer_runs[index]
            own[part] = own.get(part, Mass()) + mass
        for name, square in squares.items():
            self._squares[name] += int(math.ldexp(weight * square, SQUARE_BITS))
        self._whole = True

    def merge(self, other: Accumulator) -> None:
        """Add everything that another one of the same model and bounds has folded."""
        self._must_be_whole()
        other._must_be_whole()
        if self._bounds() != other._bounds():
            raise InputError("only accumulators of the same layers, max_value and max_weight can be merged")
        self._must_fit({index: other._mass(index).weight for index in range(len(self._ends))})
        self._sums += other._sums
        for own, more in zip(self._masses, other._masses):
            for part, mass in more.items():
                own[part] = own.get(part, Mass()) + mass
        self._squares = {name: square + other._squares[name] for name, square in self._squares.items()}

    def count(self, layer: int) -> int:
        """Count the updates that had this layer, or a part of it."""
        return self._mass(layer).count

    def weight(self, layer: int, end: int | None = None) -> float:
        """Return the sum of their weights; 0: no device trained it, and `mean` is zero there.

        Given an `end`, only of updates that had an element in front of that one.
        """
        return float(self._mass(layer, end).weight)

    def length(self, layer: int, end: int | None = None) -> float:
        """Compute the mean of the lengths of the same updates: Σ w·a / Σ w."""
        mass = self._mass(layer, end)
        return float(mass.lengths / mass.weight) if mass.weight else 1.0

    def squares(self, weights: Iterable[str]) -> float:
        """Return the sum of w·|x|² over some weights, rounded once from the exact sum."""
        return math.ldexp(float(sum(self._squares[name] for name in weights)), -SQUARE_BITS)

    def trained(self, at: slice) -> NDArray[np.bool_] | None:
        """Tell which elements of a slice of one layer were in an update; None: all of them."""
        layer = self._layer_at(at)
        masses = {part: mass for part, mass in self._masses[layer].items() if mass.weight}
        if any(self._is_whole(layer, part) for part in masses):
            return None
        return np.asarray(self._kinds(masses, at) > 0)

    def sum(self, at: slice, out: Doubles | None = None) -> Doubles:
        """Return the sum of w·x (of w·x/a, where lengths were given) for a slice of the flat vector."""
        self._must_be_whole()
        return np.multiply(self._sums[at], self.resolution, out=out)

    def mean(self, at: slice = slice(None), out: Doubles | None = None) -> Doubles:
        """Divide the sum of w·x by that of w for a slice of the flat vector; zeros where there is no weight."""
        self._must_be_whole()
        start, stop, step = at.indices(self._sums.size)
        if step != 1:
            raise InputError("a mean is taken over consecutive elements")
        stop = max(start, stop)
        out = np.empty(stop - start) if out is None else out
        for layer in range(len(self._ends)):
            begin, end = max(start, self._start(layer)), min(stop, self._ends[layer])
            if begin < end:
                self._divide(layer, slice(begin, end), out[begin - start : end - start])
        return out

    def dump(self) -> tuple[dict[str, Any], Sums]:
        """Return the state as (JSON, the live array), for another process to load."""
        self._must_be_whole()
        header = {
            "max_value": self.max_value,
            "max_weight": self.max_weight,
            "masses": [[_encoded(part, mass) for part, mass in own.items()] for own in self._masses],
            "squares": dict(self._squares),
        }
        return header, self._sums

    @classmethod
    def load(cls, space: ParameterSpace, header: Mapping[str, Any], sums: Sums) -> Accumulator:
        """Load what was dumped; the array is copied."""
        made = cls(space, max_value=header["max_value"], max_weight=header["max_weight"])
        if sums.shape != made._sums.shape or len(header["masses"]) != len(made._ends):
            raise InputError("the sums are those of another model")
        made._sums[:] = sums
        made._squares = {name: int(square) for name, square in header["squares"].items()}
        for own, parts in zip(made._masses, header["masses"]):
            for runs, count, weight, lengths in parts:
                own[tuple(Span(*run) for run in runs)] = Mass(count, Fraction(weight), Fraction(lengths))
        return made

    def _divide(self, layer: int, at: slice, out: Doubles) -> None:
        masses = {part: mass for part, mass in self._masses[layer].items() if mass.weight}
        if not masses:
            out[:] = 0
        elif all(self._is_whole(layer, part) for part in masses):
            np.divide(self._sums[at], self._mass(layer).divisor(self.shift), out=out)
        else:
            kinds, every = self._kinds(masses, at), list(masses.values())
            divisors = np.zeros(kinds.shape)
            for kind in np.unique(kinds):
                shared = [mass for bit, mass in enumerate(every) if kind >> bit & 1]
                divisors[kinds == kind] = sum(shared, Mass()).divisor(self.shift) if shared else np.inf
            np.divide(self._sums[at], divisors, out=out)

    def _kinds(self, masses: Mapping[Part, Mass], at: slice) -> Sums:
        """For every element, which parts cover it: bit k for the k-th of them."""
        if len(masses) > MOST_PARTS:
            raise InputError(f"updates cover {len(masses)} different parts of a layer; expected at most {MOST_PARTS}")
        kinds: Sums = np.zeros(at.stop - at.start, np.int64)
        layer = self._layer_at(at)
        begin, end = self._start(layer), self._ends[layer]
        for bit, part in enumerate(masses):
            kinds |= _covered(part, at, begin, end).astype(np.int64) << bit
        return kinds

    def _add(self, runs: Sequence[Span], blocks: Iterable[tuple[Span, Vector]], weight: float, largest: float) -> None:
        factor = math.ldexp(weight, self.shift)
        fast = factor * largest < ROUNDING_RANGE
        expected = iter(runs)
        rest: Span | None = None
        for block, values in blocks:
            rest = rest or next(expected, None)
            if rest is None or not _begins(rest, block) or values.shape != (block.size,):
                raise InputError(f"expected the next block of {rest}, got {values.shape} for {block}")
            self._add_run(block, values, factor, fast)
            rest = _without(rest, block)
        if rest or next(expected, None):
            raise InputError("the blocks end before the region does")

    def _add_run(self, run: Span, values: Vector, factor: float, fast: bool) -> None:
        done = 0
        for part in run.chunks(STEP):
            doubles = self._doubles[: part.size] if part.size <= STEP else np.empty(part.size)
            np.copyto(doubles, values[done : done + part.size])
            np.multiply(doubles, factor, out=doubles)
            sums = part.view(self._sums)
            np.add(sums, self._rounded(doubles, fast).reshape(sums.shape), out=sums)
            done += part.size

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

    def _must_fit(self, weights: Mapping[int, Fraction]) -> None:
        for layer, weight in weights.items():
            total = self._mass(layer).weight + weight
            if total > self.max_weight:
                raise InputError(
                    f"layer {layer}: weights of {float(total):.6g}; declared was {self.max_weight:.6g} at most"
                )

    def _mass(self, layer: int, end: int | None = None) -> Mass:
        own = self._masses[layer]
        return sum((mass for part, mass in own.items() if end is None or part[0].start < end), Mass())

    def _is_whole(self, layer: int, part: Part) -> bool:
        return len(part) == 1 and part[0].size == self._ends[layer] - self._start(layer)

    def _layer_at(self, at: slice) -> int:
        layer = bisect_right(self._ends, at.start)
        if not self._start(layer) <= at.start <= at.stop <= self._ends[layer]:
            raise InputError(f"{at} is not part of one layer")
        return layer

    def _bounds(self) -> tuple[float, float, list[int]]:
        return self.max_value, self.max_weight, self._ends


def _encoded(part: Part, mass: Mass) -> list[Any]:
    return [[astuple(run) for run in part], mass.count, str(mass.weight), str(mass.lengths)]


def _covered(part: Part, at: slice, begin: int, end: int) -> NDArray[np.bool_]:
    """Mark the elements of a slice that a part of the layer [begin, end) has."""
    if all(run.rows == 1 for run in part):
        found = np.zeros(at.stop - at.start, np.bool_)
        for run in part:
            found[max(run.start - at.start, 0) : max(run.stop - at.start, 0)] = True
        return found
    layer = np.zeros(end - begin, np.bool_)
    for run in part:
        run.view(layer, begin)[...] = True
    return layer[at.start - begin : at.stop - begin]


def _begins(run: Span, block: Span) -> bool:
    """Whether a block is the first part of a run."""
    if block.start != run.start:
        return False
    if run.rows == 1:
        return block.rows == 1 and block.length <= run.length
    return (block.length, block.stride) == (run.length, run.stride) and block.rows <= run.rows


def _without(run: Span, block: Span) -> Span | None:
    """What is left of a run behind its first part."""
    if run.rows == 1:
        length = run.length - block.length
        return Span(run.start + block.length, 1, length, length) if length else None
    rows = run.rows - block.rows
    return replace(run, start=run.start + block.rows * run.stride, rows=rows) if rows else None


def _bits(value: Fraction) -> int:
    """The smallest e with value <= 2^e."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if value <= Fraction(2) ** e else e + 1
