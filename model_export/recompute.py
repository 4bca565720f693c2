"""Make values again in the backward pass instead of keeping them: less memory for some time, the same bits.

The peak of a training graph lies where the forward pass ends and everything is alive that the backward pass will read.
Of that, gathered tiles, activations, normalised values and, where memory is dear, products can be made a second time
from values that are kept. Each node that runs again is the same operator on the same values: gradients keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx
from onnx import NodeProto

from federation.manifest import MemoryPlan
from model_export.graph import attribute
from model_export.lifetimes import NODE_BYTES, Course, Size, Step, not_in_arena, steps_of

# By how much a step may become slower, by the model of time below.
SLOWER: Mapping[MemoryPlan, float] = {"fast": 0.0, "balanced": 0.05, "small": 0.25, "half": 0.05}

# Operators that give the same bits whenever they run on the same values.
FREE = frozenset({"Flatten", "Identity", "Reshape", "Shape", "Squeeze", "Unsqueeze"})
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
REPEATABLE = frozenset(
    {
        *("Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "HardSigmoid", "HardSwish", "LeakyRelu", "Log"),
        *("Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Sum", "Tanh"),
        *("Concat", "Expand", "Gather", "Pad", "Slice", "Transpose", "Where"),
        *("BatchNormalization", "LayerNormalization", "ReduceMean", "ReduceSum", "Softmax"),
        *FREE,
        *PRODUCTS,
    }
)
SMALL = 1 << 14  # bytes that may as well stay
NEAR = 128  # nodes: about what the backward pass of a block has
# Nodes without a reader, after which a value is rather made once more than kept, and from which share of time on.
FAR, MUCH_SLOWER = 24, 0.1
# What a core does in a second, about: bytes moved, multiplications. A ResNet20 step of 120 ms counts as 148.
MOVED, MULTIPLIED = 25e9, 70e9
AGAIN = ".again"


@dataclass(frozen=True)
class Remade:
    """Values in one piece of memory, and the nodes that make them again, by their first outputs and in order."""

    values: tuple[str, ...]
    nodes: tuple[str, ...]
    once: bool  # rather keep it than make it once more for readers that are far apart


@dataclass(frozen=True)
class _Candidate:
    """Something to make again, what that frees, and what it takes."""

    remade: Remade
    sources: frozenset[str]  # large values that it is made from
    freed: int
    seconds: float


def choose_remade(model: onnx.ModelProto, sizes: Mapping[str, Size], batch: int, slower: float) -> list[Remade]:
    """Choose what to make again, so that a step takes at most the share `slower` longer, by a rough model of time.

    What frees most in a second comes first. Late choices may not pay, because what they need then lives longer: of the
    beginnings of that list the best by the arena counts.
    """
    if not slower:
        return []
    search = _Search(model, sizes, batch, keeps=slower < MUCH_SLOWER)
    left = slower * search.step_seconds
    chosen: list[Remade] = []
    while found := [one for one in search.candidates() if one.seconds <= left]:
        best = max(found, key=lambda one: (one.freed / one.seconds, one.remade.values))
        chosen.append(best.remade)
        search.take(best)
        left -= best.seconds
    lengths = sorted({0, *(len(chosen) * part // 8 for part in range(1, 9))})
    return min((chosen[:length] for length in lengths), key=search.touched)


def remake(model: onnx.ModelProto, chosen: Sequence[Remade]) -> onnx.ModelProto:
    """The same graph, in which the backward pass reads second copies of the chosen values."""
    return with_nodes(model, [step.written() for step in _Writer(steps_of(model), chosen).write()])


def with_nodes(model: onnx.ModelProto, nodes: Sequence[NodeProto]) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def _again(name: str, number: int, copy: int) -> str:
    return f"{name}{AGAIN}{number}.{copy}" if copy else f"{name}{AGAIN}{number}"


def turn_of(steps: Sequence[Step]) -> int:
    """The number of the first node of the backward pass."""
    return next((i for i, step in enumerate(steps) if step.name.startswith("backward")), len(steps))


class _Writer:
    """Writes the nodes anew; what is made again comes in front of its readers, once more where they are far apart."""

    def __init__(self, steps: Sequence[Step], chosen: Sequence[Remade]) -> None:
        self._steps = steps
        self._chosen = chosen
        self._makers = {step.outputs[0]: step for step in steps}
        self._group = {name: number for number, one in enumerate(chosen) for name in one.values}
        self._copies: dict[int, int] = {}  # of a group, so far
        self._read: dict[int, int] = {}  # by group: where its last copy was read last
        self._place = 0
        self.written: list[Step] = []
        self.names: dict[str, str] = {}  # of copies: what they are copies of

    def write(self) -> list[Step]:
        turn = turn_of(self._steps)
        self.written = list(self._steps[:turn])
        for place, step in enumerate(self._steps[turn:]):
            self._place = place
            inputs = self._inputs(step, {})
            self.written.append(step if inputs == step.inputs else step.renamed(inputs, step.outputs, step.name))
        return self.written

    def _inputs(self, step: Step, own: Mapping[str, str]) -> tuple[str, ...]:
        """New names for the inputs of a node: `own`, or those of values that are made again, first of all."""
        return tuple(own.get(name) or self._latest(name) for name in step.inputs)

    def _latest(self, name: str) -> str:
        number = self._group.get(name)
        return name if number is None else _again(name, number, self._made(number))

    def _made(self, number: int) -> int:
        """Make a group unless a copy of it was read a moment ago; return the number of the copy to read."""
        near = number in self._read and (self._chosen[number].once or self._place - self._read[number] <= FAR)
        self._read[number] = self._place
        if near:
            return self._copies[number]
        copy = self._copies[number] = self._copies.get(number, -1) + 1
        steps = [self._makers[name] for name in self._chosen[number].nodes]
        own = {output: _again(output, number, copy) for step in steps for output in step.outputs if output}
        self.names |= {again: name for name, again in own.items()}
        for step in steps:
            inputs, outputs = self._inputs(step, own), tuple(own.get(name, name) for name in step.outputs)
            name = _again(f"backward/{step.name.removeprefix('forward/')}", number, copy)
            self.written.append(step.renamed(inputs, outputs, name))
        return copy


class _Search:
    """What could be made again, given what was chosen already."""

    def __init__(self, model: onnx.ModelProto, sizes: Mapping[str, Size], batch: int, keeps: bool) -> None:
        """`keeps`: what was made again stays until its last reader, however far apart readers are."""
        self._keeps = keeps
        self._batch = batch
        self._sizes = sizes
        self._steps = steps_of(model)
        self._seconds = [self._estimate(step) for step in self._steps]
        turn = turn_of(self._steps)
        self._maker = {name: number for number, step in enumerate(self._steps) for name in step.outputs if name}
        self._given = not_in_arena(model)
        self._alive = Course(self._steps, self._given, sizes, until=turn).alive()
        self._kept = {name for names in self._alive.values() for name in names}
        self._chosen: set[str] = set()
        self._fixed = {value.name for value in model.graph.output}
        self._reads: dict[str, list[int]] = {}  # by the backward pass: where
        for number, step in enumerate(self._steps[turn:]):
            for name in step.reads:
                self._reads.setdefault(name, []).append(number)
            self._fixed |= set(step.captured) - set(step.inputs)
        self._needed = {name: places[0] for name, places in self._reads.items()}  # first, with what is made again

    @property
    def step_seconds(self) -> float:
        return sum(self._seconds)

    def candidates(self) -> list[_Candidate]:
        found = (self._candidate(owner, names) for owner, names in self._alive.items())
        return [one for one in found if one is not None]

    def take(self, candidate: _Candidate) -> None:
        """Count a candidate as chosen; what it is made from is needed as early as it is."""
        self._chosen |= set(candidate.remade.values)
        first = min(self._needed[name] for name in candidate.remade.values)
        for name in candidate.sources:
            self._needed[name] = min(self._needed.get(name, first), first)

    def touched(self, chosen: Sequence[Remade]) -> int:
        """Follow every value through the arena."""
        writer = _Writer(self._steps, chosen)
        steps = writer.write()
        sizes = {**self._sizes, **{again: self._sizes[name] for again, name in writer.names.items()}}
        return NODE_BYTES * len(steps) + Course(steps, self._given, sizes).touched(self._batch)

    def _candidate(self, owner: str, names: Sequence[str]) -> _Candidate | None:
        size = self._sizes[owner].at(self._batch)
        if size <= SMALL or any(name in self._fixed or name in self._chosen or self._is_early(name) for name in names):
            return None
        numbers: set[int] = set()
        sources: set[str] = set()
        first = min(self._needed[name] for name in names)
        if not all(self._trace(name, set(names), first, numbers, sources) for name in names):
            return None
        once = self._keeps or any(self._steps[number].op_type in PRODUCTS for number in numbers)
        times = 1 if once else self._times(names)
        seconds = times * sum(self._seconds[number] for number in numbers)
        freed = size - NODE_BYTES * times * len(numbers)
        remade = Remade(tuple(names), tuple(self._steps[number].outputs[0] for number in sorted(numbers)), once)
        return _Candidate(remade, frozenset(sources), freed, seconds) if freed > 0 and seconds > 0 else None

    def _is_early(self, name: str, first: int | None = None) -> bool:
        """Whether a value, made again, would have to be there long before the backward pass itself reads it."""
        needed = self._needed[name] if first is None else min(first, self._needed[name])
        return self._reads.get(name, [len(self._steps)])[0] - needed > NEAR

    def _times(self, names: Sequence[str]) -> int:
        """Count how often values in one piece of memory would be made again: once for readers that are near."""
        places = sorted(place for name in names for place in self._reads.get(name, ()))
        return 1 + sum(later - earlier > FAR for earlier, later in pairwise(places))

    def _trace(self, name: str, wanted: set[str], first: int, numbers: set[int], sources: set[str]) -> bool:
        """Collect the nodes that make a value, back to what is there; whether all of them can run again."""
        number = self._maker[name]
        step = self._steps[number]
        if number in numbers:
            return True
        if step.op_type not in REPEATABLE:
            return False
        numbers.add(number)
        for source in filter(None, step.inputs):
            if source in self._given:
                continue
            if source in self._chosen:
                if self._is_early(source, first):
                    return False
                sources.add(source)
            elif source not in wanted and source in self._kept and not _overwrites(step, source):
                sources.add(source)
            elif source not in wanted and self._is_small(source) and not _overwrites(step, source):
                continue
            elif not self._trace(source, wanted, first, numbers, sources):
                return False
        return True

    def _is_small(self, name: str) -> bool:
        return self._sizes[name].at(self._batch) <= SMALL

    def _estimate(self, step: Step) -> float:
        """Estimate the seconds of a node."""
        if step.op_type in FREE:
            return 0.0
        outputs = [self._sizes[name] for name in step.outputs if name]
        inputs = [self._sizes[name] for name in step.reads if name in self._sizes]
        moved = sum(size.at(self._batch) for size in (*outputs, *inputs)) / MOVED
        return moved + _products(step.op_type, outputs[0], inputs, self._batch) / MULTIPLIED


def _overwrites(step: Step, name: str) -> bool:
    """Whether the runtime writes results over an input, which therefore has to be made again too."""
    trains = step.op_type == "BatchNormalization" and bool(attribute(step.node, "training_mode", 0))
    return trains and name in step.inputs[3:]


def _products(op_type: str, output: Size, inputs: Sequence[Size], batch: int) -> float:
    """Count the multiplications of a node."""
    if op_type not in PRODUCTS:
        return 0
    left, right, result = (size.at(batch) / size.item for size in (inputs[0], inputs[1], output))
    if op_type == "Gemm":
        return math.sqrt(left * right * result)  # of rows * inner * columns each number twice
    if op_type == "MatMul":
        return result * inputs[0].shapes[0][-1]
    return (result if op_type == "Conv" else left) * right / inputs[1].shapes[0][0]
