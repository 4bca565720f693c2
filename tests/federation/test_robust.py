"""Median and trimmed mean over stored bodies, against numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import save

from federation import robust
from federation.errors import InputError
from federation.layout import layers_layout
from federation.robust import robust_moves
from federation.space import Parameter, ParameterSpace, Vector
from federation.wire import CheckedTrack, Limits, UpdateDecoder, encode_layers

SPACE = ParameterSpace(
    [[Parameter("z", "weight", (3, 2))], [Parameter("a", "weight", (5,)), Parameter("b", "statistic", (2,))]]
)


@dataclass(frozen=True)
class Body:
    """In memory."""

    data: bytes

    def values(self, offset: int, count: int) -> Vector:
        return np.frombuffer(self.data, "<f4", count, offset)


Bodies = list[tuple[CheckedTrack, Body]]


def bodies(rows: list[np.ndarray], foreign: bool = False) -> Bodies:
    """Bodies of updates; rows that are shorter than the model begin at the second layer."""
    found = []
    for row in rows:
        first = 0 if row.size == SPACE.size else 1
        if foreign:  # the safetensors library: sorted by name, so another order than the vector's
            views = SPACE.views(row, start=SPACE.layer(first).start)
            data = save({name: np.ascontiguousarray(view) for name, view in views.items()})
        else:
            data = b"".join(map(bytes, encode_layers(SPACE, first, row)))
        decoder = UpdateDecoder(layers_layout(SPACE, first), Limits())
        decoder.feed(data)
        found.append((decoder.finish().model, Body(data)))
    return found


def combined(updates: Bodies, combine: str, trim: float = 0.1) -> np.ndarray:
    out = np.full(SPACE.size, np.nan)
    for move in robust_moves(updates, combine, trim):  # type: ignore[arg-type]
        assert np.isnan(out[move.at]).all() and move.trained is None
        assert move.kind == ("statistic" if move.at.start >= 11 else "weight")
        out[move.at] = move.values
    return out


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("most", [1, 7, 1 << 21])
def test_against_numpy(monkeypatch: pytest.MonkeyPatch, most: int, foreign: bool) -> None:
    monkeypatch.setattr(robust, "MOST_ELEMENTS", most)
    rows = list(np.random.default_rng(2).normal(size=(5, SPACE.size)).astype(np.float32))
    updates = bodies(rows, foreign)
    np.testing.assert_array_equal(combined(updates, "median"), np.median(np.array(rows, np.float64), axis=0))
    ordered = np.sort(np.array(rows, np.float64), axis=0)
    np.testing.assert_allclose(combined(updates, "trimmed_mean", 0.2), ordered[1:-1].mean(axis=0), rtol=1e-15)
    np.testing.assert_allclose(combined(updates, "trimmed_mean", 0.0), ordered.mean(axis=0), rtol=1e-15)


def test_each_layer_is_combined_over_those_who_have_it() -> None:
    rows = [np.full(13, value, np.float32) for value in (1, 5)] + [np.full(7, 2, np.float32)]
    found = combined(bodies(rows), "median")
    assert (found[:6] == 3).all() and (found[6:] == 2).all()


def test_a_share_means_what_it_says() -> None:
    """0.29 of 100 are 29, although the product is a little less."""
    rows = [np.full(13, 1e3 if number < 29 else -1e3 if number < 58 else 1.0, np.float32) for number in range(100)]
    assert (combined(bodies(rows), "trimmed_mean", 0.29) == 1).all()


def test_no_other_rule() -> None:
    with pytest.raises(InputError, match="krum"):
        combined(bodies([np.zeros(13, np.float32)]), "krum")
