"""What hypothesis draws for the rules: shapes with and without a batch, operands that broadcast, data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from model_export.graph import Shape
from tests.model_export.autodiff.harness import Fill, normal

Draw = Callable[[st.SearchStrategy], object]


def examples(count: int) -> settings:
    """The same few examples in every run, however slow the machine."""
    return settings(max_examples=count, deadline=None, derandomize=True)


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Between 0.5 and 2."""
    return rng.uniform(0.5, 2.0, shape).astype(np.float32)


def nonzero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of either sign, at least 0.1 away from zero."""
    return (rng.uniform(0.1, 2.0, shape) * rng.choice([-1.0, 1.0], shape)).astype(np.float32)


def distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """No two elements equal, none zero: a maximum is never a tie."""
    count = int(np.prod(shape))
    return ((rng.permutation(count) + 0.5) / max(count, 1) * 4.0 - 2.0).astype(np.float32).reshape(shape)


def off(*kinks: float, fill: Fill = normal) -> Fill:
    """Data of a kind, moved away from places where a function has no derivative."""

    def moved(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = fill(rng, shape)
        for kink in kinks:
            near = np.abs(values - kink) < 0.02
            values = np.where(near, np.float32(kink + 0.05), values).astype(np.float32)
        return values

    return moved


def few(levels: int) -> Fill:
    """Small whole numbers: many ties."""

    def whole(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, levels, shape).astype(np.float32)

    return whole


def indices(size: int) -> Fill:
    """Valid positions along an axis, counted from either end."""

    def numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(-size, size, shape)

    return numbers


def booleans(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(bool)


def concrete(low: int = 1, high: int = 4) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 1, max_rank: int = 4, largest: int = 4) -> Shape:
    """A shape; at most one dimension, not always the first, follows the batch."""
    rank = draw(st.integers(min_rank, max_rank))
    shape: list[int | None] = [draw(concrete(1, largest)) for _ in range(rank)]
    batch_axis = draw(st.integers(-1, rank - 1))
    if batch_axis >= 0:
        shape[batch_axis] = None
    return tuple(shape)


@st.composite
def broadcast(draw: st.DrawFn, count: int, max_rank: int = 4) -> list[Shape]:
    """Shapes of operands that broadcast together; each may lack leading dimensions or have ones in them."""
    whole = draw(shapes(0, max_rank))
    found = []
    for _ in range(count):
        kept = draw(st.integers(0, len(whole)))
        tail = whole[len(whole) - kept :]
        found.append(tuple(1 if draw(st.booleans()) and draw(st.booleans()) else dim for dim in tail))
    return found


@st.composite
def axes_of(draw: st.DrawFn, rank: int, min_size: int = 1) -> list[int]:
    """Some axes, in any order, counted from either end."""
    chosen = draw(st.lists(st.integers(0, rank - 1), unique=True, min_size=min_size, max_size=rank))
    return [axis - rank if draw(st.booleans()) else axis for axis in chosen]


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)
