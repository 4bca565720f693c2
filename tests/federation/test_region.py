"""Regions against plain indexing of named tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from federation.errors import InputError
from federation.region import Span, box, channel_part, of_layers, whole
from federation.space import Parameter, ParameterSpace
from tests.federation.regions import boxes, everything, flat_mask, part_of, regions, spaces, vector_of

SPACE = ParameterSpace(
    [
        [Parameter("a", "weight", (4, 3, 2)), Parameter("a.mean", "statistic", (4,))],
        [],
        [Parameter("b", "weight", (3,)), Parameter("s", "weight", ())],
    ]
)


def places(run: Span) -> NDArray[np.int64]:
    """Which elements a run is."""
    rows = run.start + run.stride * np.arange(run.rows)
    return (rows[:, None] + np.arange(run.length)).ravel()


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_gathering_is_indexing(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known, vector = data.draw(regions(space)), vector_of(space)
    assert known.region.size == known.places.size
    np.testing.assert_array_equal(known.region.gather(vector), vector[known.places])
    origin = int(known.places[0]) if known.places.size else 0
    np.testing.assert_array_equal(known.region.gather(vector[origin:], origin), vector[known.places])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_scattering_is_assigning(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known, vector = data.draw(regions(space)), vector_of(space)
    values = -np.arange(1, known.places.size + 1, dtype=np.float32)
    expected = vector.copy()
    expected[known.places] = values
    origin = int(known.places[0]) if known.places.size else 0
    known.region.scatter(values, vector[origin:], origin)
    np.testing.assert_array_equal(vector, expected)
    with pytest.raises(InputError, match=f"expected {values.size} values"):
        known.region.scatter(np.zeros(values.size + 1, np.float32), vector)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_common_part_is_the_common_elements(data: st.DataObject) -> None:
    space = data.draw(spaces())
    one, other, vector = data.draw(regions(space)), data.draw(regions(space)), vector_of(space)
    both = one & other
    expected = vector[np.intersect1d(one.places, other.places)]
    np.testing.assert_array_equal(both.region.gather(vector), expected)
    np.testing.assert_array_equal((other & one).region.gather(vector), expected)
    assert (both & one).region == both.region


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_inside_another_region_it_is_the_same_elements(data: st.DataObject) -> None:
    space = data.draw(spaces())
    outer, vector = data.draw(regions(space)), vector_of(space)
    inner = outer & data.draw(regions(space))
    inside, gathered = inner.region.inside(outer.region), outer.region.gather(vector).copy()
    np.testing.assert_array_equal(inside.gather(gathered), vector[inner.places])
    inside.scatter(-vector[inner.places], gathered)
    outer.region.scatter(gathered, vector)
    assert (vector < 0).sum() == inner.places.size and (vector[inner.places] < 0).all()
    again = data.draw(regions(space)) & inner
    twice = again.region.inside(inner.region).gather(inside.gather(gathered))
    np.testing.assert_array_equal(twice, vector[again.places])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_what_does_not_lie_inside_is_refused(data: st.DataObject) -> None:
    space = data.draw(spaces())
    outer, other = data.draw(regions(space)), data.draw(regions(space))
    if not set(other.places.tolist()) <= set(outer.places.tolist()):
        with pytest.raises(InputError, match="does not lie in the other region"):
            other.region.inside(outer.region)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_as_tensors_it_has_the_shapes_of_the_slices(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known, vector = data.draw(regions(space)), vector_of(space)
    views = known.region.space.views(known.region.gather(vector).copy())
    tensors = space.views(vector)
    assert known.region.space.size == known.places.size
    for parameter in space:
        mask = known.masks[parameter.name]
        if mask.any():
            expected = tensors[parameter.name][np.ix_(*(mask.any(axis=_others(mask, a)) for a in range(mask.ndim)))]
            np.testing.assert_array_equal(views[parameter.name], expected if mask.ndim else tensors[parameter.name])


def _others(mask: NDArray[np.bool_], axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(mask.ndim) if other != axis)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_runs_ascend_and_are_the_elements(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known, size = data.draw(regions(space)), data.draw(st.integers(1, 7))
    runs = known.region.runs
    found = np.concatenate([np.zeros(0, int), *map(places, runs)])
    np.testing.assert_array_equal(found, known.places)
    assert all(run.size and run.stop == places(run)[-1] + 1 for run in runs)
    assert all(not (a.rows == b.rows == 1 and a.stop == b.start) for a, b in pairwise(runs))
    by_layer = [run for layer in known.region.layer_runs for run in layer]
    np.testing.assert_array_equal(np.concatenate([np.zeros(0, int), *map(places, by_layer)]), known.places)
    for run in runs:
        chunks = list(run.chunks(size))
        np.testing.assert_array_equal(np.concatenate([*map(places, chunks)]), places(run))
        assert all(chunk.size <= size or (chunk.rows == 1 and run.rows > 1) for chunk in chunks)
        np.testing.assert_array_equal(run.view(vector_of(space)).ravel(), vector_of(space)[places(run)])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_plain_is_a_slice_and_every_slice_is_plain(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known = data.draw(regions(space))
    consecutive = bool((np.diff(known.places) == 1).all())
    plain = known.region.plain
    assert (plain is not None) == consecutive
    if plain is not None:
        np.testing.assert_array_equal(np.arange(space.size)[plain], known.places)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_parts_together_are_everything_each_element_once(data: st.DataObject) -> None:
    space, parts = data.draw(spaces()), data.draw(st.integers(1, 7))
    known = [part_of(space, part, parts) for part in range(parts)]
    times = np.zeros(space.size, int)
    for part in known:
        np.add.at(times, part.region.gather(vector_of(space)).astype(int) - 1, 1)
    assert (times == 1).all()
    for parameter in space:
        rows = [len(np.flatnonzero(part.masks[parameter.name].reshape(-1, 1)[:, 0])) for part in known]
        row = max(1, parameter.size // (parameter.shape[0] if parameter.shape else 1))
        assert max(rows) - min(rows) <= row  # as even as rows can be


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_weights_and_statistics(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known, vector = data.draw(regions(space)), vector_of(space)
    for kind in ("weight", "statistic"):
        only = known.only(kind)
        np.testing.assert_array_equal(only.region.gather(vector), vector[only.places])


def test_a_box_of_the_whole_shapes_is_everything() -> None:
    shapes = [[p.shape for p in layer] for layer in SPACE.layers]
    assert box(SPACE, shapes).runs == whole(SPACE).runs == (Span(0, 1, SPACE.size, SPACE.size),)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_boxes_are_nested(data: st.DataObject) -> None:
    space = data.draw(spaces())
    one, other = data.draw(boxes(space)), data.draw(boxes(space))
    smaller = {name: one.masks[name] & other.masks[name] for name in one.masks}
    expected = vector_of(space)[flat_mask(space, smaller)]
    np.testing.assert_array_equal((one & other).region.gather(vector_of(space)), expected)
    assert (one & everything(space)).region == one.region


@pytest.mark.parametrize(
    "shapes",
    [
        [[(5, 3, 2), (4,)], [], [(3,), ()]],
        [[(4, 0, 2), (4,)], [], [(3,), ()]],
        [[(4, 3, 1), (4,)], [], [(3,), ()]],
        [[(4, 3), (4,)], [], [(3,), ()]],
        [[(4, 3, 2), (4,)], [], [(3,), (1,)]],
    ],
    ids=["wider", "nothing", "kernel", "flat", "scalar"],
)
def test_what_is_no_prefix_is_refused(shapes: Any) -> None:
    with pytest.raises(InputError, match="is not a prefix of the first two dimensions"):
        box(SPACE, shapes)


def test_other_layers_are_refused() -> None:
    with pytest.raises(ValueError):
        box(SPACE, [[(4, 3, 2), (4,)], []])
    with pytest.raises(ValueError):
        whole(SPACE) & whole(ParameterSpace(SPACE.layers[:2]))


@pytest.mark.parametrize(("part", "parts"), [(-1, 2), (2, 2), (0, 0)])
def test_parts_that_do_not_exist(part: int, parts: int) -> None:
    with pytest.raises(InputError, match=f"there is no part {part} of {parts}"):
        channel_part(SPACE, part, parts)


def test_nothing_is_nothing() -> None:
    nothing = of_layers(SPACE, ())
    assert (nothing.size, nothing.runs, nothing.plain) == (0, (), slice(0, 0))
    assert nothing.gather(vector_of(SPACE)).size == 0 and nothing.space.size == 0


def test_a_plain_slice_is_not_copied() -> None:
    vector = vector_of(SPACE)
    assert np.shares_memory(of_layers(SPACE, [2]).gather(vector), vector)
    assert not np.shares_memory(channel_part(SPACE, 0, 2).gather(vector), vector)
