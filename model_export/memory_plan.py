"""Write a training graph as a memory plan asks: what is made again, and which convolutions go through in parts.

A convolution by tiles holds several times its image for a moment. Near the turn from forward to backward, where most
values are alive, such a moment is the peak: there some rows of tiles follow the others. Every part has nodes of its
own, which take memory too, so parts are added where the peak lies, as long as the whole becomes smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx

from federation.manifest import MemoryPlan
from model_export.half_store import store_halves
from model_export.lifetimes import NODE_BYTES, Size, alive_during, sizes_of, touched
from model_export.recompute import AGAIN, SLOWER, choose_remade, remake
from model_export.shared_values import share_values

LOWER, ATTEMPTS = 0.92, 6  # the share of a peak that more parts shall reach, and how often that is tried
Parts = Mapping[str, int]  # by scope of nodes: in how many parts the tiles of a convolution go through
Write = Callable[[Parts, bool], onnx.ModelProto]  # the plain graph; True: with stored weights inside


@dataclass(frozen=True)
class Planned:
    """A training graph, and how it was made."""

    model: onnx.ModelProto
    parts: Parts
    complete: Callable[[], onnx.ModelProto]  # makes the same graph with its stored weights inside


def plan_memory(write: Write, batch: int, plan: MemoryPlan) -> Planned:
    """Find the graph that takes least memory at a batch size in the time that a plan gives."""
    best = _written(write, {}, batch, plan)
    if not SLOWER[plan]:
        return best
    sizes, size = _measured(best, batch)
    for _ in range(ATTEMPTS):
        parts = _more_parts(best, sizes, batch)
        if parts == best.parts:
            break
        other = _written(write, parts, batch, plan)
        other_sizes, other_size = _measured(other, batch)
        if other_size >= size:
            break
        best, sizes, size = other, other_sizes, other_size
    return best


def _written(write: Write, parts: Parts, batch: int, plan: MemoryPlan) -> Planned:
    def shared(alone: bool) -> onnx.ModelProto:
        plain = write(parts, alone)
        return share_values(plain, sizes_of(plain, lambda: write(parts, True)), batch)

    plain = shared(alone=False)
    remade = choose_remade(plain, batch, SLOWER[plan], lambda: shared(alone=True))

    def complete() -> onnx.ModelProto:
        return remake(shared(alone=True), remade)

    model = remake(plain, remade)
    if plan != "half":
        return Planned(model, parts, complete)
    sizes = sizes_of(model, complete)
    return Planned(store_halves(model, sizes, batch), parts, lambda: store_halves(complete(), sizes, batch))


def _measured(planned: Planned, batch: int) -> tuple[Mapping[str, Size], int]:
    sizes = sizes_of(planned.model, planned.complete)
    return sizes, touched(planned.model, sizes, batch) + NODE_BYTES * len(planned.model.graph.node)


def _more_parts(planned: Planned, sizes: Mapping[str, Size], batch: int) -> Parts:
    """Divide every convolution that passes a lower peak into so many parts that it should not."""
    alive = alive_during(planned.model, sizes, batch)
    aim = LOWER * max(alive, default=0)
    before: dict[str, int] = {}  # by scope: what was alive when it began
    most: dict[str, int] = {}
    for number, (node, used) in enumerate(zip(planned.model.graph.node, alive, strict=True)):
        scope = _scope(node)
        before.setdefault(scope, min(used, alive[number - 1] if number else 0))
        most[scope] = max(most.get(scope, 0), used)
    parts = dict(planned.parts)
    for scope, used in most.items():
        if used > aim:
            now = parts.get(scope, 1)
            spare = max(aim - before[scope], 1.0)
            parts[scope] = min(2 * now, math.ceil(now * (used - before[scope]) / spare))
    return parts


def _scope(node: onnx.NodeProto) -> str:
    """The scope that a node was written in, before it was made again."""
    scope = str(node.name.rsplit("/", 1)[0])
    return f"forward/{scope.removeprefix('backward/')}" if AGAIN in node.name else scope
