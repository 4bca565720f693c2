"""One local step: every rule in turn, then x ← x − rate·g, block by block.

The arithmetic is cheap and memory is slow: a vector of a few million elements fits no cache, and every numpy
operation over the whole of it fetches it again. So all rules are applied to one block before the next is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from federation.axes.local.rule import LocalRule, Start, check_constant
from federation.errors import FieldError, InputError
from federation.space import ParameterSpace, Vector

BLOCK = 32768  # elements: x, g, scratch and one buffer of it are 512 kB, a common second-level cache


class LocalStep:
    """The chained rules at work on one task.

    `weights` and `statistics` are the runs of the suffix that hold trained weights and statistics; rules see and move
    weights only. `start.x` is moved in place, and so is the gradient that a step is given.
    """

    def __init__(
        self,
        rules: Sequence[LocalRule],
        start: Start,
        weights: Sequence[slice],
        statistics: Sequence[slice],
        *,
        block: int = BLOCK,
    ) -> None:
        check_rules(rules)
        rest = _rest(weights, statistics, start.x.size)
        if block < 1:
            raise InputError(f"block: expected at least 1 element, got {block}")
        self.x = start.x
        self.rates = 0.0  # sum over the steps run so far
        self.steps = 0
        self._received = start.origin
        before = [self.x[run].copy() for run in rest]
        self._rules = [rule.begin(start) for rule in rules]
        for run, values in zip(rest, before):  # a rule that moved x does not know which elements are trained weights
            self.x[run] = values
        self._weights = tuple(weights)
        self._statistics = tuple(statistics)
        scratch = np.empty(min(block, max((run.stop - run.start for run in weights), default=0)), np.float32)
        self._blocks = [(at, self.x[at], scratch[: at.stop - at.start]) for at in _blocks(weights, block)]

    def step(self, gradients: Vector, rate: float) -> None:
        """One step. `gradients` holds gradients of the weights, which are changed, and new values of the statistics."""
        if gradients.shape != self.x.shape or gradients.dtype != np.float32:
            raise InputError(f"gradients: expected float32 {self.x.shape}, got {gradients.dtype} {gradients.shape}")
        check_constant("rate", rate)
        with np.errstate(over="ignore", invalid="ignore"):  # the trainer watches the loss, and reports divergence once
            for rule in self._rules:
                rule.begin_step()
            for at, x, scratch in self._blocks:
                g = gradients[at]
                for rule in self._rules:
                    rule.direct(at, g, x, scratch)
                np.multiply(g, rate, out=scratch)
                np.subtract(x, scratch, out=x)
        self._count(gradients, rate)

    def _count(self, gradients: Vector, rate: float) -> None:
        """Take new statistics, and note that a step was made."""
        for run in self._statistics:
            self.x[run] = gradients[run]
        self.rates += rate
        self.steps += 1

    def update(self, out: Vector | None = None) -> Vector:
        """What the device reports: how far x is from the server's, without the movement that was the server's.

        `out` is memory for it, such as that of the gradients, which are not needed any more.
        """
        moved: Vector = np.subtract(self.x, self._received, out=out)
        for rule in self._rules:
            unreported = rule.unreported(self.rates)
            if unreported is not None:
                for run in self._weights:
                    moved[run] -= unreported[run]
        return moved

    def state(self) -> dict[str, Vector]:
        """The rules' buffers to keep or to send, by name."""
        return {name: buffer for rule in self._rules for name, buffer in rule.state().items()}


def check_rules(rules: Sequence[LocalRule]) -> None:
    """Refuse a rule or a track that appears twice, and rules in an order that means nothing."""
    kinds = [type(rule) for rule in rules]
    for kind in kinds:
        if kinds.count(kind) > 1:
            times = kinds.count(kind)
            raise FieldError("rules", f"expected every rule at most once, got {kind.__name__} {times} times")
    for rule in rules[:-1]:
        if rule.stands_last:
            order = ", ".join(kind.__name__ for kind in kinds)
            raise FieldError("rules", f"expected {type(rule).__name__} to stand last, got {order}")
    scaling = [type(rule).__name__ for rule in rules if rule.rescales]
    if len(scaling) > 1:
        raise FieldError("rules", f"expected one rule that scales steps, got {', '.join(scaling)}")
    for place, rule in enumerate(rules):
        behind = next((type(other).__name__ for other in rules[place:] if other.rescales), None)
        if rule.measures_steps and behind:
            name = type(rule).__name__
            raise FieldError("rules", f"expected {name} behind {behind}: it adds steps, and {behind} takes gradients")
    names = [track.name for rule in rules for track in rule.tracks]
    if len(set(names)) != len(names):
        raise FieldError("rules", f"expected every track at most once, got {', '.join(names)}")


def working_vectors(rules: Sequence[LocalRule]) -> int:
    """Count the vectors that rules hold while they work; one at least, which every prediction of memory allows."""
    return max(1, sum(rule.buffers for rule in rules))


def runs(space: ParameterSpace, first_layer: int, trained: range | None = None) -> tuple[list[slice], list[slice]]:
    """Where weights and where statistics lie in the suffix that begins with a layer; neighbours are one run.

    `trained`: of these layers only; all others stay as they are.

    >>> from federation.space import Parameter
    >>> w, b, mean = Parameter("w", "weight", (2,)), Parameter("b", "weight", (2,)), Parameter("m", "statistic", (2,))
    >>> runs(ParameterSpace([[w], [b, mean]]), 0)
    ([slice(0, 4, None)], [slice(4, 6, None)])
    """
    if not 0 <= first_layer < len(space.layers):
        raise InputError(f"first_layer: expected 0 to {len(space.layers) - 1}, got {first_layer}")
    found: dict[str, list[slice]] = {"weight": [], "statistic": []}
    end = 0
    numbered = enumerate(space.layers[first_layer:], first_layer)
    for index, parameter in ((index, parameter) for index, layer in numbered for parameter in layer):
        start, end = end, end + parameter.size
        same = found[parameter.kind]
        if trained is not None and index not in trained:
            continue
        if same and same[-1].stop == start:
            same[-1] = slice(same[-1].start, end)
        elif start < end:
            same.append(slice(start, end))
    return found["weight"], found["statistic"]


def _blocks(weights: Sequence[slice], block: int) -> Iterator[slice]:
    for run in weights:
        for start in range(run.start, run.stop, block):
            yield slice(start, min(start + block, run.stop))


def _rest(weights: Sequence[slice], statistics: Sequence[slice], size: int) -> list[slice]:
    """Everything but the weights; refuses runs that overlap or leave the vector."""
    end = 0
    for run in sorted((*weights, *statistics), key=lambda run: (run.start, run.stop)):
        if not end <= run.start <= run.stop <= size or run.step is not None:
            raise InputError(f"runs: expected disjoint runs of a vector of {size} elements, got {run}")
        end = run.stop
    ends = [0, *(edge for run in sorted(weights, key=lambda run: run.start) for edge in (run.start, run.stop)), size]
    return [slice(start, stop) for start, stop in zip(ends[::2], ends[1::2]) if start < stop]
