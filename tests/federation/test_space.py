"""One flat vector, layers contiguous, input side first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.errors import InputError
from federation.space import Parameter, ParameterSpace


@pytest.fixture
def space() -> ParameterSpace:
    return ParameterSpace(
        [
            [Parameter("z.weight", "weight", (2, 3)), Parameter("z.mean", "statistic", (3,))],
            [],
            [Parameter("a.weight", "weight", (4,)), Parameter("a.scale", "weight", ())],
        ]
    )


def test_the_order_is_the_layers_not_the_alphabet(space: ParameterSpace) -> None:
    assert [p.name for p in space] == ["z.weight", "z.mean", "a.weight", "a.scale"]
    assert space.size == 6 + 3 + 4 + 1
    assert space.slice_of("z.mean") == slice(6, 9)
    assert [space.layer(i) for i in range(3)] == [slice(0, 9), slice(9, 9), slice(9, 14)]
    assert [space.suffix(i) for i in range(3)] == [slice(0, 14), slice(9, 14), slice(9, 14)]


def test_views_share_memory(space: ParameterSpace) -> None:
    vector = np.zeros(space.size, np.float32)
    views = space.views(vector)
    assert {name: view.shape for name, view in views.items()} == {
        "z.weight": (2, 3),
        "z.mean": (3,),
        "a.weight": (4,),
        "a.scale": (),
    }
    views["a.weight"][2] = 7
    assert vector[11] == 7


def test_views_of_a_suffix_hold_only_its_parameters(space: ParameterSpace) -> None:
    vector = np.arange(5, dtype=np.float32)
    views = space.views(vector, start=9)
    assert list(views) == ["a.weight", "a.scale"]
    assert views["a.scale"] == 4


@pytest.mark.parametrize("vector", [np.zeros(14), np.zeros((2, 7), np.float32), np.zeros(15, np.float32)])
def test_views_refuse_what_is_not_such_a_vector(space: ParameterSpace, vector: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"expected a flat float32 vector of at most 14 elements, got"):
        space.views(vector)


def test_flatten_refuses_missing_and_misshapen_tensors(space: ParameterSpace) -> None:
    tensors = dict(space.views(np.zeros(space.size, np.float32)))
    with pytest.raises(InputError, match=r"'z.mean': expected shape \(3,\), got \(4,\)"):
        space.flatten({**tensors, "z.mean": np.zeros(4, np.float32)})
    del tensors["z.weight"]
    with pytest.raises(InputError, match=r"'z.weight': expected shape \(2, 3\), got nothing"):
        space.flatten(tensors)


def test_a_parameter_belongs_to_one_layer() -> None:
    with pytest.raises(InputError, match="'w' appears twice"):
        ParameterSpace([[Parameter("w", "weight", (1,))], [Parameter("w", "weight", (1,))]])


def test_an_unknown_name(space: ParameterSpace) -> None:
    with pytest.raises(InputError, match="no parameter named 'b'"):
        space.slice_of("b")


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(layers=st.lists(st.lists(shapes, max_size=3), max_size=4))
def test_flatten_and_views_are_inverse(layers: list[list[tuple[int, ...]]]) -> None:
    made = [[Parameter(f"{i}.{j}", "weight", s) for j, s in enumerate(layer)] for i, layer in enumerate(layers)]
    space = ParameterSpace(made)
    vector = np.arange(space.size, dtype=np.float32)
    assert np.array_equal(space.flatten(space.views(vector)), vector)
    assert sum(space.layer(i).stop - space.layer(i).start for i in range(len(layers))) == space.size
