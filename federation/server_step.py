"""The server's step of a round, block by block: from the sums of the updates to new values of the model and the state.

What no device trained is not touched: neither the weights nor the server's state there. Statistics of batch norm are
means of what devices saw, whatever the rule: a rate or momentum for them would make variances negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from federation.accumulate import Accumulator
from federation.axes.local import LocalRule, TrackBlock
from federation.axes.serve import Doubles, RoundFacts, ServeRule
from federation.layout import MODEL
from federation.region import Region
from federation.space import Kind, ParameterSpace, Vector

BLOCK = 1 << 14  # elements: a few doubles for each fit the cache


class StoredVector(Protocol):
    """A vector of which a block is read at a time: an array, or a file."""

    def __getitem__(self, at: slice, /) -> Vector: ...


Vectors = Mapping[str, StoredVector]  # by name: the model and the server's state
Change = tuple[str, slice, Vector]  # new values of a block of a vector


@dataclass(frozen=True)
class Move:
    """The combined update of a block that lies in one layer."""

    at: slice
    kind: Kind
    values: Doubles
    trained: NDArray[np.bool_] | None = None  # which of the elements; None: all


def server_step(rule: ServeRule, moves: Iterable[Move], before: Vectors, facts: RoundFacts) -> Iterator[Change]:
    """Yield new values of the model and of the rule's state, for what was trained; good until the next block."""
    for move in moves:
        if move.kind == "statistic":
            yield MODEL, move.at, _moved(before[MODEL][move.at], move.values, move.trained)
            continue
        state = {name: before[name][move.at].astype(np.float64) for name in rule.vectors}
        distance = rule.step(move.values, state, facts)
        yield MODEL, move.at, _moved(before[MODEL][move.at], distance, move.trained)
        for name, values in state.items():
            yield name, move.at, _chosen(values, before[name][move.at], move.trained)


def track_step(
    rule: LocalRule, name: str, total: Accumulator, space: ParameterSpace, before: Vectors, devices: int
) -> Iterator[Change]:
    """Yield new values of the server's vector of a track, for weights that were trained; `devices` is SCAFFOLD's N."""
    for at, kind in trained_blocks(total, space):
        if kind == "weight":
            old = before[name][at]
            yield name, at, _chosen(rule.move_track(name, old, TrackBlock(total, at, devices)), old, total.trained(at))


def mean_moves(total: Accumulator, space: ParameterSpace) -> Iterator[Move]:
    """The mean over the devices that trained each element; layers that none trained do not appear."""
    buffer = np.empty(BLOCK)
    for at, kind in trained_blocks(total, space):
        yield Move(at, kind, total.mean(at, buffer[: at.stop - at.start]), total.trained(at))


def spread(total: Accumulator, region: Region) -> float | None:
    """(1/m)·Σ ‖u − x_i‖² over the weights of a region that each x_i has, u being the mean; None if no device has any.

    Σ w‖x‖² − Σ w·u² over the elements, where Σ w·u² is the sum of w·x times u. FedNova: x_i is as far as the mean
    length of all would have taken it, and squares are of x/a.
    """
    found, weights = [], region.only("weight")
    for layer, (pieces, runs) in enumerate(zip(weights.layers, weights.layer_runs)):
        end = runs[-1].stop if runs else 0  # updates without weights in front of it have statistics alone
        if runs and (weight := total.weight(layer, end)):
            length, squares = total.length(layer, end), total.squares(piece.parameter.name for piece in pieces)
            blocks = (slice(block.start, block.stop) for run in runs for block in run.chunks(BLOCK))
            common = sum(float(np.dot(total.sum(at), total.mean(at))) for at in blocks)
            found.append(max(0.0, length * (length * squares - common) / weight))
    return sum(found) if found else None


def trained_blocks(total: Accumulator, space: ParameterSpace) -> Iterator[tuple[slice, Kind]]:
    """Blocks of every layer that a device trained; none crosses from weights to statistics."""
    for layer in range(len(space.layers)):
        ends: dict[Kind, int | None] = {"weight": _border(space, layer), "statistic": None}
        for kind, end in ends.items():  # some devices have statistics of a layer and none of its weights
            if total.weight(layer, end):
                yield from ((at, kind) for at in _blocks(space, layer, kind))


def _blocks(space: ParameterSpace, layer: int, kind: Kind) -> Iterator[slice]:
    """Inside a layer weights come first, statistics last."""
    where, border = space.layer(layer), _border(space, layer)
    begin, end = (where.start, border) if kind == "weight" else (border, where.stop)
    for start in range(begin, end, BLOCK):
        yield slice(start, min(start + BLOCK, end))


def _border(space: ParameterSpace, layer: int) -> int:
    """Where the weights of a layer end and its statistics begin."""
    start: int = space.layer(layer).start
    return start + sum(p.size for p in space.layers[layer] if p.kind == "weight")


def _moved(old: Vector, distance: Doubles, trained: NDArray[np.bool_] | None) -> Vector:
    """x + distance, in double precision, rounded once."""
    return _chosen(distance + old, old, trained)


def _chosen(new: Doubles, old: Vector, trained: NDArray[np.bool_] | None) -> Vector:
    values: Vector = new.astype(np.float32)
    return values if trained is None else np.where(trained, values, old)
