"""The accumulator: the same bits in every order, and the right mean."""

from __future__ import annotations

import io
import math
import tracemalloc
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.accumulate import ROUNDING_RANGE, Accumulator
from federation.errors import InputError
from federation.layout import layers_layout
from federation.region import Region, Span, of_layers, whole
from federation.space import Parameter, ParameterSpace, Vector
from federation.wire import Limits, UpdateDecoder, encode_layers, read_blocks

SIZES = (3, 0, 4, 2)
SPACE = ParameterSpace([[Parameter(f"w{i}", "weight", (size,))] for i, size in enumerate(SIZES)])
MAX_VALUE, MAX_WEIGHT = 100.0, 64.0


class Update(NamedTuple):
    first_layer: int
    values: Vector
    weight: float


def empty(space: ParameterSpace = SPACE, max_value: float = MAX_VALUE, max_weight: float = MAX_WEIGHT) -> Accumulator:
    return Accumulator(space, max_value=max_value, max_weight=max_weight)


def run(start: int, stop: int) -> Span:
    """A plain slice."""
    return Span(start, 1, stop - start, stop - start)


def suffix(first_layer: int, space: ParameterSpace = SPACE) -> Region:
    return of_layers(space, range(first_layer, len(space.layers)))


def cut(start: int, values: Vector, block: int) -> Iterator[tuple[Span, Vector]]:
    for at in range(0, values.size, block):
        part = values[at : at + block]
        yield run(start + at, start + at + part.size), part


def fold(total: Accumulator, update: Update, space: ParameterSpace = SPACE, block: int = 5) -> None:
    where = space.suffix(update.first_layer)
    doubles = update.values.astype(np.float64)
    squares = {}
    for layer in range(update.first_layer, len(space.layers)):
        own = space.layer(layer)
        squares[f"w{layer}"] = math.fsum(doubles[own.start - where.start : own.stop - where.start] ** 2)
    largest = float(np.abs(update.values).max(initial=0))
    region, blocks = suffix(update.first_layer, space), cut(where.start, update.values, block)
    total.fold(region, blocks, update.weight, squares, largest=largest)


def folded(updates: Iterable[Update], block: int = 5) -> Accumulator:
    total = empty()
    for update in updates:
        fold(total, update, block=block)
    return total


def state(total: Accumulator) -> tuple[Any, ...]:
    """Every bit of it."""
    return total._sums.tobytes(), [*map(dict, total._masses)], dict(total._squares)


def update_strategy() -> st.SearchStrategy[Update]:
    value = st.floats(-MAX_VALUE, MAX_VALUE, width=32)

    def of(first: int) -> st.SearchStrategy[Update]:
        size = sum(SIZES[first:])
        values = st.lists(value, min_size=size, max_size=size).map(lambda v: np.array(v, np.float32))
        return st.builds(Update, st.just(first), values, st.floats(0, 6) | st.integers(0, 6))

    return st.integers(0, len(SIZES) - 1).flatmap(of)


UPDATES = st.lists(update_strategy(), max_size=10)


@given(updates=UPDATES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_changes_no_bit(updates: list[Update], data: st.DataObject) -> None:
    order = data.draw(st.permutations(updates))
    one, other = folded(updates), folded(order, block=data.draw(st.integers(1, 9)))
    assert state(one) == state(other)
    assert one.mean().tobytes() == other.mean().tobytes()


@given(parts=st.tuples(*[st.lists(update_strategy(), max_size=3)] * 3))
@settings(max_examples=100, deadline=None)
def test_merging_is_associative_and_commutative_and_equal_to_folding(parts: tuple[list[Update], ...]) -> None:
    a, b, c = parts
    left, right, turned = folded(a), folded(b), folded(c)
    left.merge(folded(b))
    left.merge(folded(c))
    right.merge(folded(c))
    first = folded(a)
    first.merge(right)
    turned.merge(folded(b))
    turned.merge(folded(a))
    assert state(left) == state(first) == state(turned) == state(folded([*a, *b, *c]))


@given(updates=UPDATES)
@settings(max_examples=100, deadline=None)
def test_against_exact_arithmetic(updates: list[Update]) -> None:
    total = folded(updates)
    mean = total.mean()
    largest = max((float(np.abs(u.values).max()) for u in updates), default=0.0)
    for layer in range(len(SIZES)):
        had = [u for u in updates if u.first_layer <= layer and SIZES[layer]]
        weight = sum((Fraction(u.weight) for u in had), Fraction(0))
        assert (total.count(layer), total.weight(layer)) == (len(had), float(weight))
        own = SPACE.layer(layer)
        for element in range(own.start, own.stop):
            terms = [Fraction(u.weight) * Fraction(float(u.values[element - SPACE.size])) for u in had]
            exact = sum(terms, Fraction(0)) / weight if weight else Fraction(0)
            bound = len(had) * Fraction(total.resolution) / 2 / weight if weight else 0
            assert abs(Fraction(float(mean[element])) - exact) <= bound + Fraction(largest) / 2**51


def test_against_two_passes_of_numpy() -> None:
    space = ParameterSpace([[Parameter(f"w{i}", "weight", (40_000,))] for i in range(3)])
    generator = np.random.default_rng(0)
    total, stacks = empty(space, 2.0**10, 2.0**20), [np.zeros(space.size), np.zeros(space.size)]
    assert total.resolution == 2.0**-32
    updates = [
        Update(first, generator.standard_normal(40_000 * (3 - first)).astype(np.float32), float(weight))
        for first, weight in zip(generator.integers(0, 3, 20), generator.integers(1, 500, 20))
    ]
    for update in updates:
        fold(total, update, space, block=7001)
        where = space.suffix(update.first_layer)
        stacks[0][where] += update.weight * update.values.astype(np.float64)
        stacks[1][where] += update.weight
    expected = np.divide(stacks[0], stacks[1], out=np.zeros(space.size), where=stacks[1] > 0)
    lightest = min(total.weight(layer) / total.count(layer) for layer in range(3) if total.count(layer))
    assert np.abs(total.mean() - expected).max() <= 2.0**-33 / lightest + 1e-14
    for layer in range(3):
        own = space.layer(layer)
        squares = [
            u.weight
            * np.square(u.values[own.start - space.size : own.stop - space.size or None], dtype=np.float64).sum()
            for u in updates
            if u.first_layer <= layer
        ]
        assert total.squares([f"w{layer}"]) == pytest.approx(math.fsum(squares), rel=1e-13)


@pytest.mark.parametrize(
    ("max_value", "max_weight", "shift"),
    [(2**10, 2**20, 32), (16, 128, 51), (1, 1, 62), (1.5, 1, 61), (3, 3, 58), (2**-20, 1, 82), (2**60, 2**60, -58)],
)
def test_the_resolution_is_the_finest_that_cannot_overflow(max_value: float, max_weight: float, shift: int) -> None:
    total = empty(max_value=max_value, max_weight=max_weight)
    assert total.shift == shift
    assert total.resolution == 2.0**-shift
    product = Fraction(max_value) * Fraction(max_weight)
    assert product * Fraction(2) ** shift <= 2**62 < product * Fraction(2) ** (shift + 1)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("parts", [1, 4, 64])
def test_the_very_largest_sum_does_not_overflow(sign: int, parts: int) -> None:
    total = empty()
    for _ in range(parts):
        fold(total, Update(0, np.full(SPACE.size, sign * MAX_VALUE, np.float32), MAX_WEIGHT / parts))
    assert np.array_equal(total.mean(), np.full(SPACE.size, sign * MAX_VALUE))


@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=9, max_size=9),
    weight=st.floats(0, 1) | st.integers(0, 1),
    bound=st.sampled_from([1.0, 2.0**11, 2.0**30]),
)
@settings(max_examples=200, deadline=None)
def test_both_ways_of_rounding_give_the_same_integers(values: list[float], weight: float, bound: float) -> None:
    """Which one is taken depends on `largest` only, so a larger one must not change a bit."""
    sums = []
    for largest in (1.0, bound):
        total = empty(max_value=bound, max_weight=2.0)
        blocks = [(run(0, 9), np.array(values, np.float32))]
        total.fold(whole(SPACE), blocks, weight, {}, largest=largest)
        sums.append(total._sums)
    expected = [round(Fraction(math.ldexp(weight, total.shift) * float(np.float32(v)))) for v in values]
    assert sums[0].tolist() == sums[1].tolist() == expected


def test_both_ways_of_rounding_are_used() -> None:
    near = math.ldexp(1.0, empty(max_value=2.0**11, max_weight=2.0).shift)
    assert near < ROUNDING_RANGE <= near * 2.0**11


def test_a_layer_divides_by_the_weight_of_those_that_trained_it() -> None:
    total = empty()
    fold(total, Update(0, np.full(9, 1, np.float32), 1))
    fold(total, Update(2, np.full(6, 5, np.float32), 3))
    assert total.mean().tolist() == [1] * 3 + [4] * 6
    assert [total.weight(i) for i in range(4)] == [1, 0, 4, 4]  # the second has no parameters
    assert [total.count(i) for i in range(4)] == [1, 0, 2, 2]
    assert [total.squares([f"w{i}"]) for i in range(4)] == [3, 0, 4 + 3 * 100, 2 + 3 * 50]
    assert total.squares(["w0", "w3"]) == 3 + 2 + 3 * 50
    assert total.mean(slice(2, 5)).tolist() == [1, 4, 4]
    assert total.mean(slice(7, 3)).size == 0
    out = np.empty(2)
    assert total.mean(slice(2, 4), out) is out and out.tolist() == [1, 4]


def test_a_range_in_the_middle() -> None:
    total = empty()
    total.fold(of_layers(SPACE, [2]), [(run(3, 7), np.full(4, 2, np.float32))], 1, {"w2": 16.0}, largest=2)
    assert total.mean().tolist() == [0, 0, 0, 2, 2, 2, 2, 0, 0]
    assert [total.count(i) for i in range(4)] == [0, 0, 1, 0]


@pytest.mark.parametrize("updates", [[], [Update(0, np.full(9, 7, np.float32), 0)]], ids=["none", "weight zero"])
def test_without_weight_the_mean_is_zero(updates: list[Update]) -> None:
    total = folded(updates)
    assert total.mean().tolist() == [0] * 9
    assert [total.weight(i) for i in range(4)] == [0] * 4
    assert total.count(0) == len(updates)


ONES = np.ones(9, np.float32)
LARGER = ParameterSpace([[Parameter(f"w{i}", "weight", (4,))] for i in range(4)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": -1}, "finite and not negative, got -1"),
        ({"weight": math.nan}, "finite and not negative, got nan"),
        ({"weight": math.inf}, "finite and not negative, got inf"),
        ({"weight": MAX_WEIGHT}, "layer 0: weights of 65; declared was 64 at most"),
        ({"largest": 100.5}, "values up to 100.5; this round was declared with max_value 100"),
        ({"largest": math.nan}, "values up to nan"),
        ({"length": 0.5}, "a length must be a number from 1, got 0.5"),
        ({"length": math.inf}, "a length must be a number from 1, got inf"),
        ({"length": math.nan}, "a length must be a number from 1, got nan"),
        ({"squares": {"w0": 1.0, "w1": 1e300}}, "sums of squares of weights by name, from 0 to 2\\^700"),
        ({"squares": {"w0": 1.0, "w1": math.inf}}, "sums of squares of weights by name, from 0 to 2\\^700"),
        ({"squares": {"w0": math.nan}}, "sums of squares of weights by name, from 0 to 2\\^700"),
        ({"squares": {"w2": -1.0}}, "sums of squares of weights by name, from 0 to 2\\^700"),
        ({"squares": {"w4": 0.0}}, "sums of squares of weights by name"),
        ({"region": whole(ParameterSpace(SPACE.layers[1:]))}, "the region has 3 layers, the model 4"),
        ({"region": whole(LARGER)}, "the region has 4 layers, the model 4, or other sizes"),
    ],
)
def test_a_refused_update_changes_nothing(change: dict[str, Any], message: str) -> None:
    total = folded([Update(0, ONES, 1)])
    before = state(total)
    good: dict[str, Any] = {"region": whole(SPACE), "weight": 1, "squares": {"w0": 0.0}, "largest": 1.0}
    with pytest.raises(InputError, match=message):
        total.fold(blocks=[(run(0, 9), ONES)], **{**good, **change})
    assert state(total) == before
    total.fold(blocks=[(run(0, 9), ONES)], **good)


def breaking() -> Iterator[tuple[Span, Vector]]:
    yield run(0, 4), ONES[:4]
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        (breaking(), OSError),
        ([(run(0, 4), ONES[:4])], InputError),
        ([(run(0, 4), ONES[:4]), (run(5, 9), ONES[:4])], InputError),
        ([(run(0, 4), ONES[:4]), (run(4, 9), ONES[:4])], InputError),
        ([(run(0, 10), np.ones(10, np.float32))], InputError),
        ([(run(0, 9), ONES), (run(9, 10), ONES[:1])], InputError),
    ],
    ids=["breaks off", "too few", "hole", "other size", "too many", "one more"],
)
def test_half_an_update_is_never_taken_for_a_sum(blocks: Any, error: type[Exception]) -> None:
    total = folded([Update(0, ONES, 1)])
    with pytest.raises(error):
        total.fold(whole(SPACE), blocks, 1, {}, largest=1)
    uses = (total.mean, total.dump, lambda: total.sum(slice(0, 3)), lambda: empty().merge(total))
    for use in (*uses, lambda: fold(total, Update(0, ONES, 1))):
        with pytest.raises(InputError, match="added in part only"):
            use()


@pytest.mark.parametrize(
    "other",
    [
        empty(max_value=50),
        empty(max_weight=50),
        Accumulator(ParameterSpace(SPACE.layers[1:]), max_value=MAX_VALUE, max_weight=MAX_WEIGHT),
    ],
)
def test_only_what_belongs_together_is_merged(other: Accumulator) -> None:
    with pytest.raises(InputError, match="only accumulators of the same"):
        empty().merge(other)


def test_a_merge_that_is_too_heavy_changes_nothing() -> None:
    one, other = folded([Update(0, ONES, 40)]), folded([Update(2, ONES[:6], 25)])
    before = state(one)
    with pytest.raises(InputError, match="layer 2: weights of 65"):
        one.merge(other)
    assert state(one) == before


@pytest.mark.parametrize("bound", [0, -1, math.nan, math.inf, 2.0**65, 2.0**-65])
@pytest.mark.parametrize("name", ["max_value", "max_weight"])
def test_impossible_bounds(name: str, bound: float) -> None:
    with pytest.raises(InputError, match=f"{name} must be from"):
        Accumulator(SPACE, **{"max_value": 1, "max_weight": 1, name: bound})


@pytest.mark.parametrize("largest", [1.0, 100.0], ids=["fast", "wide"])
def test_folding_allocates_nothing_that_grows(largest: float) -> None:
    space = ParameterSpace([[Parameter("w", "weight", (1_000_000,))]])
    total, values = empty(space), np.ones(space.size, np.float32)

    def peak(times: int) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            total.fold(whole(space), cut(0, values, 1 << 16), 0.01, {"w": 1.0}, largest=largest)
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        peak(1)
        assert peak(30) < 20_000
    finally:
        tracemalloc.stop()


def test_from_bytes_to_the_mean() -> None:
    """The way of an update through the server: decoded in chunks, spooled, folded from the file."""
    total = empty()
    for first, value, weight in ((0, 1, 1), (2, 5, 3)):
        data = b"".join(encode_layers(SPACE, first, np.full(sum(SIZES[first:]), value, np.float32)))
        decoder = UpdateDecoder(layers_layout(SPACE, first), Limits(max_value=total.max_value))
        for at in range(0, len(data), 10):
            decoder.feed(data[at : at + 10])
        track = decoder.finish().model
        total.fold(track.region, read_blocks(io.BytesIO(data), track), weight, track.squares, largest=track.largest)
    assert total.mean().tolist() == [1] * 3 + [4] * 6
