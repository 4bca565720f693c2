"""Corners of tensors: what a narrow model is in the wide one's flat vector."""

from __future__ import annotations

import numpy as np
import pytest

from federation.errors import InputError
from federation.narrow import corner, corners, fits, narrow_space, take_corners
from federation.space import Parameter, ParameterSpace

WIDE = ParameterSpace(
    [
        [Parameter("k", "weight", (4, 3, 2, 2)), Parameter("m", "statistic", (4,))],
        [Parameter("d", "weight", (5, 16)), Parameter("b", "weight", (5,))],
    ]
)
THIN = narrow_space(WIDE.layers, [[(2, 3, 2, 2), (2,)], [(5, 8), (5,)]])


def test_a_corner_holds_the_elements_with_small_indices() -> None:
    vector = np.arange(WIDE.size, dtype=np.float32)
    wide, found = WIDE.views(vector), THIN.views(take_corners(WIDE, vector, THIN))
    for name, tensor in found.items():
        for index in np.ndindex(tensor.shape):  # element by element
            assert tensor[index] == wide[name][index]
    assert [p.kind for p in THIN] == [p.kind for p in WIDE]


def test_corners_are_views() -> None:
    vector = np.zeros(WIDE.size, np.float32)
    for _, view in corners(WIDE, vector, THIN):
        view[...] = 1
    assert vector.sum() == THIN.size
    tensor = np.zeros((3, 3), np.float32)
    corner(tensor, (2, 1))[...] = 1
    assert tensor.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("narrow", "wide", "good"),
    [
        ((2, 3), (4, 3), True),
        ((), (), True),
        ((0,), (0,), True),
        ((0,), (4,), False),
        ((5,), (4,), False),
        ((2, 2, 3), (2, 2, 4), False),
        ((2,), (2, 1), False),
    ],
)
def test_what_may_be_a_corner(narrow: tuple[int, ...], wide: tuple[int, ...], good: bool) -> None:
    assert fits(narrow, wide) is good


def test_every_parameter_needs_a_shape() -> None:
    with pytest.raises(InputError, match="expected narrow shapes for 2 layers, got 1"):
        narrow_space(WIDE.layers, [[(2, 3, 2, 2), (2,)]])
    with pytest.raises(InputError, match=r"d: .* is no corner of"):
        narrow_space(WIDE.layers, [[(2, 3, 2, 2), (2,)], [(6, 8), (5,)]])
