"""Sums over updates of different regions and lengths, against exact arithmetic element by element."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.accumulate import MOST_PARTS, Accumulator
from federation.errors import InputError
from federation.region import Region, Span, box, channel_part
from federation.space import Parameter, ParameterSpace, Vector
from tests.federation.regions import Known, everything, flat_mask, part_of, regions, spaces

MAX_VALUE, MAX_WEIGHT = 100.0, 64.0


class Update(NamedTuple):
    known: Known
    values: Vector  # of the region, in order
    weight: float
    length: float


class Exact(NamedTuple):
    """Of one element, over the updates that have it."""

    count: int
    weight: Fraction
    lengths: Fraction  # Σ w·a
    total: Fraction  # Σ (w/a)·x
    size: Fraction  # Σ (w/a)·|x|

    @property
    def mean(self) -> Fraction:
        return self.lengths / self.weight * self.total / self.weight if self.weight else Fraction(0)


@st.composite
def updates(draw: st.DrawFn, space: ParameterSpace) -> Update:
    known = draw(regions(space))
    seed, largest = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([1e-3, 1.0, MAX_VALUE]))
    values = np.random.default_rng(seed).uniform(-largest, largest, known.places.size).astype(np.float32)
    length = draw(st.just(1.0) | st.floats(1, 50) | st.integers(1, 50).map(float))
    return Update(known, np.clip(values, -MAX_VALUE, MAX_VALUE), draw(st.floats(0, 6) | st.integers(0, 6)), length)


def fold(total: Accumulator, update: Update, block: int = 5) -> None:
    region, done, blocks = update.known.region, 0, []
    for run in region.runs:
        for chunk in run.chunks(block):
            blocks.append((chunk, update.values[done : done + chunk.size]))
            done += chunk.size
    space = update.known.space
    squares = {}
    for parameter in (p for p in space if p.kind == "weight"):
        own = space.slice_of(parameter.name)
        mine = (own.start <= update.known.places) & (update.known.places < own.stop)
        squares[parameter.name] = math.fsum(update.values[mine].astype(np.float64) ** 2)
    largest = float(np.abs(update.values).max(initial=0))
    total.fold(region, blocks, update.weight, squares, largest=largest, length=update.length)


def folded(space: ParameterSpace, updates: Iterable[Update], block: int = 5) -> Accumulator:
    total = Accumulator(space, max_value=MAX_VALUE, max_weight=MAX_WEIGHT)
    for update in updates:
        fold(total, update, block)
    return total


def exact(space: ParameterSpace, updates: Iterable[Update]) -> list[Exact]:
    found = [Exact(0, Fraction(0), Fraction(0), Fraction(0), Fraction(0))] * space.size
    for update in updates:
        weight, length = Fraction(update.weight), Fraction(update.length)
        for place, value in zip(update.known.places, update.values):
            term = weight / length * Fraction(float(value))
            old = found[place]
            found[place] = Exact(
                old.count + 1,
                old.weight + weight,
                old.lengths + weight * length,
                old.total + term,
                old.size + abs(term),
            )
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_mean_is_over_those_who_have_the_element(data: st.DataObject) -> None:
    space = data.draw(spaces())
    given_ = data.draw(st.lists(updates(space), max_size=8))
    total, expected = folded(space, given_, data.draw(st.integers(1, 9))), exact(space, given_)
    mean = total.mean()
    for place, one in enumerate(expected):
        factor = one.lengths / one.weight**2 if one.weight else 0
        bound = factor * (one.count * Fraction(total.resolution) / 2 + one.size / 2**50) + abs(one.mean) / 2**50
        assert abs(Fraction(float(mean[place])) - one.mean) <= bound, place
    for layer in range(len(space.layers)):
        own = space.layer(layer)
        if own.start == own.stop:
            continue
        trained = total.trained(own)
        anybody = [bool(one.weight) for one in expected[own]]
        assert ([True] * len(anybody) if trained is None else trained.tolist()) == anybody
        middle = slice((own.start + own.stop) // 2, own.stop)
        rest = total.trained(middle)
        assert ([True] * (middle.stop - middle.start) if rest is None else rest.tolist()) == [
            bool(one.weight) for one in expected[middle]
        ]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_counts_weights_and_squares_of_layers(data: st.DataObject) -> None:
    space = data.draw(spaces())
    given_ = data.draw(st.lists(updates(space), max_size=8))
    total = folded(space, given_)
    for layer in range(len(space.layers)):
        own = space.layer(layer)
        had = [u for u in given_ if ((own.start <= u.known.places) & (u.known.places < own.stop)).any()]
        assert total.count(layer) == len(had)
        assert total.weight(layer) == float(sum((Fraction(u.weight) for u in had), Fraction(0)))
        weights = [p.name for p in space.layers[layer] if p.kind == "weight"]
        squares = 0.0
        for update in had:
            for own in map(space.slice_of, weights):
                mine = (own.start <= update.known.places) & (update.known.places < own.stop)
                squares += update.weight * float(np.square(update.values[mine].astype(np.float64)).sum())
        assert total.squares(weights) == pytest.approx(squares, rel=1e-12)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_neither_order_nor_blocks_nor_merging_change_a_bit(data: st.DataObject) -> None:
    space = data.draw(spaces())
    given_ = data.draw(st.lists(updates(space), max_size=8))
    order, at = data.draw(st.permutations(given_)), data.draw(st.integers(0, 8))
    one, other = folded(space, given_), folded(space, order, data.draw(st.integers(1, 9)))
    merged, rest = folded(space, order[:at]), folded(space, order[at:])
    merged.merge(rest)
    for found in (other, merged):
        assert found.mean().tobytes() == one.mean().tobytes()
        for layer in range(len(space.layers)):
            for fact in ("count", "weight"):
                assert getattr(found, fact)(layer) == getattr(one, fact)(layer)
        for weight in (p.name for p in space if p.kind == "weight"):
            assert found.squares([weight]) == one.squares([weight])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_going_on_in_another_process_changes_nothing(data: st.DataObject) -> None:
    space = data.draw(spaces())
    given_, at = data.draw(st.lists(updates(space), max_size=8)), data.draw(st.integers(0, 8))
    header, sums = folded(space, given_[:at]).dump()
    total, copied = Accumulator.load(space, json.loads(json.dumps(header)), sums), sums.copy()
    for update in given_[at:]:
        fold(total, update)
    np.testing.assert_array_equal(sums, copied)
    one = folded(space, given_)
    assert json.dumps(total.dump()[0]) == json.dumps(one.dump()[0])
    assert total.dump()[1].tobytes() == one.dump()[1].tobytes() and total.mean().tobytes() == one.mean().tobytes()


def test_the_sums_of_another_model_are_refused() -> None:
    space, other = (ParameterSpace([[Parameter("w", "weight", (size,))]]) for size in (3, 4))
    header, sums = Accumulator(space, max_value=1, max_weight=1).dump()
    for wrong, array in ((other, sums), (ParameterSpace([*space.layers, []]), sums), (space, sums[:2])):
        with pytest.raises(InputError, match="those of another model"):
            Accumulator.load(wrong, header, array)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_mean_in_pieces_is_the_mean(data: st.DataObject) -> None:
    space = data.draw(spaces())
    total = folded(space, data.draw(st.lists(updates(space), max_size=5)))
    whole_mean, step = total.mean(), data.draw(st.integers(1, 9))
    pieces = [total.mean(slice(at, min(at + step, space.size))) for at in range(0, space.size, step)]
    assert np.concatenate([np.zeros(0), *pieces]).tobytes() == whole_mean.tobytes()


def test_the_parts_of_a_rotation_come_together() -> None:
    """Every part once, with equal weights, is one whole update."""
    space = ParameterSpace([[Parameter("w", "weight", (7, 3)), Parameter("b", "weight", (5,))]])
    values = np.random.default_rng(0).normal(size=space.size).astype(np.float32)
    total = Accumulator(space, max_value=MAX_VALUE, max_weight=MAX_WEIGHT)
    for part in range(4):
        known = part_of(space, part, 4)
        fold(total, Update(known, values[known.places], 2.0, 1.0))
    np.testing.assert_allclose(total.mean(), values, rtol=1e-12)
    assert total.count(0) == 4 and total.trained(slice(0, 26)).all()


def test_equal_lengths_are_the_plain_mean() -> None:
    space = ParameterSpace([[Parameter("w", "weight", (50,))]])
    rows = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)
    plain, walked = ([Update(everything(space), row, w, a) for row, w in zip(rows, (1, 2, 3))] for a in (1.0, 7.5))
    np.testing.assert_allclose(folded(space, walked).mean(), folded(space, plain).mean(), rtol=1e-12)


def test_fednova_by_hand() -> None:
    """Two devices, 1 and 3 steps, weights 1 and 1: (1+3)/2 · (x/1 + y/3)/2."""
    space = ParameterSpace([[Parameter("w", "weight", (1,))]])
    rows = [Update(everything(space), np.array([v], np.float32), 1.0, a) for v, a in ((1.0, 1.0), (6.0, 3.0))]
    assert folded(space, rows).mean() == pytest.approx([2 * (1 + 2) / 2], rel=1e-14)


def test_too_many_different_parts_are_refused() -> None:
    space = ParameterSpace([[Parameter("w", "weight", (MOST_PARTS + 1,))]])
    total = Accumulator(space, max_value=1, max_weight=MAX_WEIGHT)
    for part in range(MOST_PARTS + 1):
        region = channel_part(space, part, MOST_PARTS + 1)
        total.fold(region, [(region.runs[0], np.ones(1, np.float32))], 0.5, {}, largest=1)
        if part == MOST_PARTS - 1:
            assert total.mean().tolist() == [1.0] * MOST_PARTS + [0.0]
    with pytest.raises(InputError, match=f"expected at most {MOST_PARTS}"):
        total.mean()


def test_only_a_slice_of_one_layer_can_be_asked_about() -> None:
    space = ParameterSpace([[Parameter("v", "weight", (2,))], [Parameter("w", "weight", (3,))]])
    total = Accumulator(space, max_value=1, max_weight=1)
    with pytest.raises(InputError, match="not part of one layer"):
        total.trained(slice(1, 3))
    with pytest.raises(InputError, match="consecutive elements"):
        total.mean(slice(0, 4, 2))


@pytest.mark.parametrize(
    "blocks",
    [
        [Span(0, 2, 1, 3), Span(6, 2, 1, 3)],
        [Span(0, 1, 2, 2), Span(3, 1, 2, 2), Span(6, 1, 2, 2)],
        [Span(0, 2, 2, 3)],
        [Span(0, 3, 2, 3), Span(9, 1, 2, 2)],
        [Span(3, 2, 2, 3), Span(0, 1, 2, 3)],
    ],
    ids=["narrower", "rows as slices", "too few rows", "too many rows", "another order"],
)
def test_blocks_that_are_not_the_regions_are_refused(blocks: list[Span]) -> None:
    """Of a parameter of three rows of three, the first two columns."""
    space = ParameterSpace([[Parameter("w", "weight", (3, 3))]])
    mask = np.zeros((3, 3), np.bool_)
    mask[:, :2] = True
    region = _columns(space, 2)
    np.testing.assert_array_equal(region.gather(np.arange(9, dtype=np.float32)), np.flatnonzero(mask))
    total = Accumulator(space, max_value=1, max_weight=4)
    with pytest.raises(InputError):
        total.fold(region, [(run, np.ones(run.size, np.float32)) for run in blocks], 1, {}, largest=1)
    with pytest.raises(InputError, match="in part only"):
        total.mean()


def _columns(space: ParameterSpace, columns: int) -> Region:
    return box(space, [[(p.shape[0], columns) for p in layer] for layer in space.layers])


def test_a_narrow_update_leaves_the_rest_to_others() -> None:
    """HeteroFL's mean, by hand: the common corner over both, the rest over the wide one alone."""
    space = ParameterSpace([[Parameter("w", "weight", (2, 3))]])
    narrow = _columns(space, 1)
    corner = Known(space, narrow, {"w": np.array([[True, False, False]] * 2)})
    assert np.array_equal(narrow.gather(np.arange(6, dtype=np.float32)), corner.places)
    wide = Update(everything(space), np.array([1, 2, 3, 4, 5, 6], np.float32), 1.0, 1.0)
    total = folded(space, [wide, Update(corner, np.array([5, 8], np.float32), 3.0, 1.0)])
    assert total.mean().tolist() == [4, 2, 3, 7, 5, 6]
    assert flat_mask(space, corner.masks).tolist() == [True, False, False, True, False, False]
