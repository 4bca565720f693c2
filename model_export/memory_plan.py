"""Write a training graph as a memory plan asks: what is made again, and which convolutions go through in parts.

A convolution by tiles holds several times its image for a moment. Near the turn from forward to backward, where most
values are alive, such a moment is the peak: there some rows of tiles follow the others. Every part has nodes of its
own, which take memory too, so parts are added where the peak lies, as long as the whole becomes smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from federation.manifest import MemoryPlan
from model_export.half_store import store_halves
from model_export.lifetimes import NODE_BYTES, Course, Size, not_in_arena, sizes_of, steps_of
from model_export.recompute import AGAIN, SLOWER, choose_remade, remake
from model_export.shared_values import share_values

LOWER, ATTEMPTS = 0.92, 6  # the share of a peak that more parts shall reach, and how often that is tried
Parts = Mapping[str, int]  # by scope of nodes: in how many parts the tiles of a convolution go through
Write = Callable[[Parts, bool], onnx.ModelProto]  # the plain graph; True: with stored weights inside


@dataclass(frozen=True)
class Planned:
    """A training graph, and how it was made."""

    model: onnx.ModelProto
    sizes: Mapping[str, Size]
    parts: Parts


def plan_memory(write: Write, batch: int, plan: MemoryPlan) -> Planned:
    """Find the graph that takes least memory at a batch size in the time that a plan gives."""
    best = _written(write, {}, batch, plan)
    if not SLOWER[plan]:
        return best
    course = _course(best)
    size = _size(best, course, batch)
    for _ in range(ATTEMPTS):
        parts = _more_parts(best, course.alive_during(batch))
        if parts == best.parts:
            break
        other = _written(write, parts, batch, plan)
        course = _course(other)
        other_size = _size(other, course, batch)
        if other_size >= size:
            break
        best, size = other, other_size
    return best


def _written(write: Write, parts: Parts, batch: int, plan: MemoryPlan) -> Planned:
    def complete() -> onnx.ModelProto:
        return write(parts, True)

    plain = write(parts, False)
    sizes = sizes_of(plain, complete)
    shared = share_values(plain, sizes, batch)
    remade = choose_remade(shared, sizes, batch, SLOWER[plan])

    def again(model: onnx.ModelProto) -> onnx.ModelProto:
        return remake(share_values(model, sizes, batch), remade)

    model = remake(shared, remade)
    sizes_remade = sizes_of(model, lambda: again(complete()))
    if plan != "half":
        return Planned(model, sizes_remade, parts)
    halved = store_halves(model, sizes_remade, batch)
    sizes_halved = sizes_of(halved, lambda: store_halves(again(complete()), sizes_remade, batch))
    return Planned(halved, sizes_halved, parts)


def _course(planned: Planned) -> Course:
    return Course(steps_of(planned.model), not_in_arena(planned.model), planned.sizes)


def _size(planned: Planned, course: Course, batch: int) -> int:
    return course.touched(batch) + NODE_BYTES * len(planned.model.graph.node)


def _more_parts(planned: Planned, alive: Sequence[int]) -> Parts:
    """Divide every convolution that passes a lower peak into so many parts that it should not.

    `alive`: bytes that lie in the arena while each node runs.
    """
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
