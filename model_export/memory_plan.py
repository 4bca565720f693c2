"""Write a training graph as a memory plan asks: what is made again, and which convolutions go through in parts.

A convolution by tiles holds several times its image for a moment. Near the turn from forward to backward, where most
values are alive, such a moment is the peak: there some tiles follow the others. Every part has nodes of its own,
which take memory and time, so parts are added where the peak lies, and taken back where they save nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from federation.manifest import MemoryPlan
from model_export.half_store import store_halves
from model_export.lifetimes import NODE_BYTES, Course, Size, not_in_arena, sizes_of, steps_of
from model_export.recompute import AGAIN, SLOWER, choose_remade, remake
from model_export.shared_values import share_values

# The share of a peak that more parts shall reach, how often that is tried, and how often in a row without any gain.
LOWER, ATTEMPTS, PATIENCE = 0.92, 8, 2
LARGE = 3000  # nodes of a graph that takes seconds to write: there the search ends at the first step without gain
Parts = Mapping[str, int]  # by scope of nodes: in how many parts the tiles of a convolution go through
Write = Callable[[Parts, bool], onnx.ModelProto]  # the plain graph; True: with stored weights inside


@dataclass(frozen=True)
class Planned:
    """A training graph, and how it was made."""

    model: onnx.ModelProto
    sizes: Mapping[str, Size]
    parts: Parts


@dataclass(frozen=True)
class _Trial:
    """A graph that was tried, and what it takes."""

    planned: Planned
    alive: Sequence[int]  # bytes that lie in the arena while each node runs
    size: int  # bytes that the arena has touched, and of the nodes
    lengths: Counter[str]  # by scope: how many nodes it has


def plan_memory(write: Write, batch: int, plan: MemoryPlan) -> Planned:
    """Find the graph that takes least memory at a batch size in the time that a plan gives."""
    plain = _written(write, {}, batch, plan)
    if not SLOWER[plan]:
        return plain

    def attempt(parts: Parts) -> _Trial:
        return _try(_written(write, parts, batch, plan), batch)

    first = _try(plain, batch)
    if len(plain.model.graph.node) > LARGE:
        return _divide(attempt, first, patience=1).planned
    return _join(attempt, _divide(attempt, first)).planned


def _divide(attempt: Callable[[Parts], _Trial], first: _Trial, patience: int = PATIENCE) -> _Trial:
    """Divide convolutions at the peak, then at the next one; a step that gains nothing may lead to one that does."""
    best = last = first
    idle = 0
    for _ in range(ATTEMPTS):
        trial = attempt(_more_parts(last.planned, last.alive))
        parts = {scope: n for scope, n in trial.planned.parts.items() if trial.lengths[scope] > first.lengths[scope]}
        if parts == last.planned.parts or idle == patience:
            break
        last = replace(trial, planned=replace(trial.planned, parts=parts))
        idle = 0 if last.size < best.size else idle + 1
        best = min(best, last, key=lambda one: one.size)
    return best


def _join(attempt: Callable[[Parts], _Trial], best: _Trial) -> _Trial:
    """Join parts again where that takes no more memory: their nodes cost time."""
    for scope in best.planned.parts:
        while best.planned.parts.get(scope, 1) > 1:
            fewer = {**best.planned.parts, scope: best.planned.parts[scope] // 2}
            trial = attempt({name: number for name, number in fewer.items() if number > 1})
            if trial.size > best.size:
                break
            best = trial
    return best


def _try(planned: Planned, batch: int) -> _Trial:
    nodes = planned.model.graph.node
    course = Course(steps_of(planned.model), not_in_arena(planned.model), planned.sizes)
    size = course.touched(batch) + NODE_BYTES * len(nodes)
    return _Trial(planned, course.alive_during(batch), size, Counter(map(_scope, nodes)))


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
