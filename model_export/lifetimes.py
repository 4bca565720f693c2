"""Predict the memory of a training graph from its own shapes and lifetimes, before any device has run it.

The nodes run in the order of the file. A value lives from the node that makes it to the last one that reads it; the
runtime takes its memory from an arena (best fit, regions that double), which never gives any back. So the graph's peak
is what the arena has touched after its values have come and gone. Beside it the runtime has structures of its own for
every node, and copies of constants. tests/model_export/test_lifetimes.py compares the result with measured peaks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx
from onnx import NodeProto, helper, shape_inference

from model_export.graph import attribute, inputs_with_subgraphs
from model_export.shapes import run_everything
from model_export.training import LOSS, PREDICTIONS

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SIZED_AT = (2, 3)  # two batch sizes tell what of a value follows the batch
_FLOAT = 4
Shape = tuple[int, ...]

# Measured on onnxruntime 1.31, x86-64: what a node's own structures take, copies of a constant, what every session has,
# and scratch memory of kernels that no shape tells, as a share of the arena.
NODE_BYTES, CONSTANT_COPIES, SESSION_BYTES, SCRATCH = 4_000, 2.5, 60_000, 0.05

# Of edge_runtime/engine/session.py: the first region that graphs get, and the rest of a block worth keeping apart.
_FIRST_REGION, _SMALLEST, _WORTH_SPLITTING = 16 << 20, 256, 1 << 10

# Nothing else shares memory: without reuse of blocks, as training sessions are opened, the runtime does not write
# results over inputs either.
_SAME_BUFFER = frozenset({"Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten"})


@dataclass(frozen=True)
class Size:
    """Shape of a value for each of the two batch sizes, and bytes of one element."""

    shapes: tuple[Shape, Shape]
    item: int

    def at(self, batch: int) -> int:
        low, growth = self._elements
        return self.item * max(0, low + growth * (batch - _SIZED_AT[0]))

    @cached_property
    def _elements(self) -> tuple[int, int]:
        """Elements at the first of the two batch sizes, and by how many one more sample adds to them."""
        low, high = (math.prod(shape) for shape in self.shapes)
        return low, high - low


@dataclass(frozen=True)
class Step:
    """A node, or a copy of one under other names. Plans look at nodes so often that asking protobufs takes too long."""

    node: NodeProto
    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captured: tuple[str, ...]  # what bodies of loops read by its name

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return (*filter(None, self.inputs), *self.captured)

    def renamed(self, inputs: tuple[str, ...], outputs: tuple[str, ...], name: str) -> Step:
        return replace(self, inputs=inputs, outputs=outputs, name=name)

    def written(self) -> NodeProto:
        twin = NodeProto()
        twin.CopyFrom(self.node)
        twin.name = self.name
        twin.input[:] = self.inputs
        twin.output[:] = self.outputs
        return twin


def steps_of(model: onnx.ModelProto) -> list[Step]:
    """Read the nodes of a graph."""
    return [_step(node) for node in model.graph.node]


def _step(node: NodeProto) -> Step:
    inputs = tuple(node.input)
    captured = inputs_with_subgraphs(node)[sum(map(bool, inputs)) :] if node.attribute else ()
    return Step(node, node.name, node.op_type, inputs, tuple(node.output), tuple(captured))


def step_memory(
    model: onnx.ModelProto, sizes: Mapping[str, Size], stored: Collection[str] = ()
) -> tuple[tuple[int, int], ...]:
    """Predict (batch, bytes) for some batch sizes; `stored` constants will lie in a mapped file.

    Parameters, gradients, momentum and the batch itself are not in it: they are the caller's, outside the graph.
    """
    course = Course(steps_of(model), not_in_arena(model), sizes)
    constants = sum(math.prod(t.dims) * _FLOAT for t in model.graph.initializer if t.name not in stored)
    fixed = SESSION_BYTES + NODE_BYTES * len(model.graph.node) + int(CONSTANT_COPIES * constants)
    return tuple((batch, fixed + int((1 + SCRATCH) * course.touched(batch))) for batch in BATCHES)


def sizes_of(model: onnx.ModelProto, complete: Callable[[], onnx.ModelProto] | None = None) -> Mapping[str, Size]:
    """Find the shape of every value.

    `complete` makes the same model with its stored constants inside, where it has to be run to know its shapes.
    """
    low, high = (_shapes(model, batch, complete or (lambda: model)) for batch in _SIZED_AT)
    return {
        name: Size((shape, high[name][0]), item)
        for name, (shape, item) in low.items()
        if name in high and len(high[name][0]) == len(shape)
    }


def _shapes(
    model: onnx.ModelProto, batch: int, complete: Callable[[], onnx.ModelProto]
) -> dict[str, tuple[Shape, int]]:
    """Infer every shape with a number in the place of the batch: then shape arithmetic folds."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in [*fixed.graph.input, *fixed.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = batch
    graph = shape_inference.infer_shapes(fixed, data_prop=True).graph
    found: dict[str, tuple[Shape, int]] = {}
    for constant in graph.initializer:
        found[constant.name] = tuple(constant.dims), helper.tensor_dtype_to_np_dtype(constant.data_type).itemsize
    for value in [*graph.input, *graph.value_info, *graph.output]:
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            item = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).itemsize
            found[value.name] = tuple(dim.dim_value for dim in kind.shape.dim), item
    made = {name for node in model.graph.node for name in node.output if name}
    return found if made <= found.keys() else {**found, **_seen(complete(), found)}


def _seen(model: onnx.ModelProto, inputs: Mapping[str, tuple[Shape, int]]) -> dict[str, tuple[Shape, int]]:
    """Run the step to see its shapes, where they cannot be told from the graph: the masks of dropout count elements."""
    kinds = {v.name: helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input}
    values = run_everything(model, {name: np.zeros(inputs[name][0], kind) for name, kind in kinds.items()})
    return {name: (value.shape, value.itemsize) for name, value in values.items()}


def touched(model: onnx.ModelProto, sizes: Mapping[str, Size], batch: int) -> int:
    """Count the bytes that the arena has touched after two steps."""
    return Course(steps_of(model), not_in_arena(model), sizes).touched(batch)


def not_in_arena(model: onnx.ModelProto) -> set[str]:
    """Values that do not come from the arena: constants, inputs, and outputs that are bound to memory of the device."""
    graph = model.graph
    bound = {value.name for value in graph.output} - {PREDICTIONS}
    return {LOSS, *bound, *(t.name for t in graph.initializer), *(value.name for value in graph.input)}


class Course:
    """How the values of a step, or of its first nodes, come and go. The same at every batch size; only sizes grow."""

    def __init__(
        self, steps: Sequence[Step], outside: set[str], sizes: Mapping[str, Size], until: int | None = None
    ) -> None:
        """`outside`: what is not in the arena."""
        self._outside = outside
        self._sizes = sizes
        self._last = {name: number for number, step in enumerate(steps) for name in step.reads}
        self._buffer: dict[str, str | None] = {}  # value -> the value whose memory it has; None: memory from outside
        self._users: dict[str, int] = {}
        # Of each node: what it takes, its scratch memory, and what it gives back.
        self._events = [self._run(number, step) for number, step in enumerate(steps[:until])]

    def touched(self, batch: int) -> int:
        """Count the bytes that the arena has touched after two steps: the second finds the blocks of the first."""
        arena = _Arena()
        for _ in range(2):
            for _ in self._replay(arena, batch):
                pass
        return arena.touched

    def alive_during(self, batch: int) -> list[int]:
        """Count the bytes that lie in the arena while each node runs."""
        arena = _Arena()
        return [arena.used for _ in self._replay(arena, batch)]

    def alive(self) -> dict[str, list[str]]:
        """Find what is left in the arena: by the value whose memory it is, all that share it."""
        found: dict[str, list[str]] = {}
        for name, owner in self._buffer.items():
            if owner is not None:
                found.setdefault(owner, []).append(name)
        return found

    def _replay(self, arena: _Arena, batch: int) -> Iterator[None]:
        """Take and give back; stop while each node runs."""
        blocks: dict[str, int] = {}
        for taken, scratch, given in self._events:
            for name in taken:
                blocks[name] = arena.take(self._sizes[name].at(batch))
            block = arena.take(scratch) if scratch else None
            yield
            if block is not None:
                arena.give_back(block)
            for name in given:
                arena.give_back(blocks.pop(name))
        for left in blocks.values():
            arena.give_back(left)

    def _run(self, number: int, step: Step) -> tuple[list[str], int, list[str]]:
        outputs = [name for name in step.outputs if name and name not in self._outside]
        taken: list[str] = []
        given: list[str] = []
        for name in outputs:
            owner = self._buffer[name] = self._owner(step, name)
            if owner == name:
                taken.append(name)
            if owner is not None:
                self._users[owner] = self._users.get(owner, 0) + 1
        for name in {*step.reads, *outputs}:
            if name in self._buffer and name != PREDICTIONS and self._last.get(name, -1) <= number:
                owner = self._buffer.pop(name)
                if owner is not None:
                    self._users[owner] -= 1
                    if not self._users[owner]:
                        given.append(owner)
        return taken, _scratch(step, self._sizes), given

    def _owner(self, step: Step, name: str) -> str | None:
        """Find whose memory an output has: its own, or that of what it is another shape of."""
        if step.op_type not in _SAME_BUFFER:
            return name
        source = step.inputs[0]
        return None if source in self._outside else self._buffer[source]


def _scratch(step: Step, sizes: Mapping[str, Size]) -> int:
    """Bytes of the matrix into which a convolution spreads one group of one image."""
    if step.op_type not in ("Conv", "ConvTranspose"):
        return 0
    forward = step.op_type == "Conv"
    wide, narrow = (step.inputs[0], step.outputs[0]) if forward else (step.outputs[0], step.inputs[0])
    kernel = sizes[step.inputs[1]].shapes[0][2:]
    if forward and math.prod(kernel) == 1:
        return 0
    channels = sizes[wide].shapes[0][1] // int(attribute(step.node, "group", 1))
    return _FLOAT * channels * math.prod(kernel) * math.prod(sizes[narrow].shapes[0][2:])


class _Arena:
    """The runtime's allocator: the smallest free block that is large enough, split; neighbours join when freed."""

    def __init__(self) -> None:
        self._next = _FIRST_REGION
        self._regions: list[tuple[int, int]] = []  # start, and how far it was touched
        self._free: list[tuple[int, int]] = []  # size and start, sorted
        self._starts: dict[int, int] = {}  # free: start -> size
        self._ends: dict[int, int] = {}  # free: end -> start
        self._taken: dict[int, int] = {}  # start -> size
        self.used = 0  # bytes that are taken now

    @property
    def touched(self) -> int:
        return sum(end - start for start, end in self._regions)

    def take(self, size: int) -> int:
        """Take a block and return where it starts."""
        size = max(_SMALLEST, -(-size // _SMALLEST) * _SMALLEST)
        place = bisect.bisect_left(self._free, (size, -1))
        if place == len(self._free):
            self._grow(size)
            place = bisect.bisect_left(self._free, (size, -1))
        found, start = self._free[place]
        self._remove(start)
        if found >= 2 * size or found - size >= _WORTH_SPLITTING:
            self._add(start + size, found - size)
            found = size
        self._taken[start] = found
        self.used += found
        self._touch(start, start + size)
        return start

    def give_back(self, start: int) -> None:
        """Free a block; it joins free neighbours."""
        size = self._taken.pop(start)
        self.used -= size
        if start in self._ends:
            before = self._ends[start]
            size += self._remove(before)
            start = before
        if start + size in self._starts:
            size += self._remove(start + size)
        self._add(start, size)

    def _grow(self, size: int) -> None:
        while self._next < size:
            self._next *= 2
        start = (self._regions[-1][0] if self._regions else 0) + (1 << 48)  # regions are no neighbours
        self._regions.append((start, start))
        self._add(start, self._next)
        self._next *= 2

    def _touch(self, start: int, end: int) -> None:
        place = bisect.bisect_right(self._regions, (start, 1 << 62)) - 1
        first, reached = self._regions[place]
        self._regions[place] = first, max(reached, end)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._free, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._starts.pop(start)
        del self._ends[start + size]
        del self._free[bisect.bisect_left(self._free, (size, start))]
        return size
