"""How a round is dealt to the processes: which devices are trained together, which can go anywhere.

Devices that are stacked get the bits of a stack, those that are trained alone the bits of a device alone; which of the
two is decided here and in group_engine.py from the cohort's order, and not from the number of processes. How large a
stack is makes no difference to a bit: group_engine.py makes sure of it, or trains one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from federation.axes.local import ControlVariate, Momentum
from federation.coverage import coverage
from federation.job import Plan
from federation.manifest import Manifest
from federation.messages import Task
from simulation.server import Seat

T = TypeVar("T")
GROUP = 16  # consecutive devices of a cohort among which those of a kind are stacked
# Multiply-accumulates of a step above which a device alone keeps a core busy. 16 devices against a plain loop, at batch
# 32: logistic regression (0.25 million) 2.9 times as quick, the digits (5) 1.8, two hidden layers (6.4) 1.4, the
# smallest CNN of the papers (120) 0.9. Below four devices nothing is gained.
MOST_MACS, LEAST = 10_000_000, 4
WORTH = 5e9  # multiply-accumulates that are worth a message of their own: some tenths of a second


def may_stack(manifest: Manifest, task: Task) -> bool:
    """Whether devices with this task are trained together, unless PyTorch cannot."""
    covered = coverage(manifest, task.boundary)
    boundary = covered.boundary
    macs = task.batch * sum(layer.macs for layer in manifest.layers[boundary.layer :])
    # Dropout and short memory are not PyTorch's own: torch_engine.Forward puts others in their place.
    plain = not manifest.uses_seed and boundary.last_steps is None
    return macs <= MOST_MACS and plain and len(covered.graphs) == 1 and task.activations == "float32"


def in_groups(cohort: Sequence[T], size: int = GROUP) -> list[list[T]]:
    """Consecutive devices of a cohort: the same groups whatever the number of processes."""
    return [list(cohort[start : start + size]) for start in range(0, len(cohort), size)]


@dataclass(frozen=True)
class Dealer:
    """Deals rounds of one run."""

    plan: Plan
    manifest: Manifest
    samples: Mapping[str, int]  # of every device
    stacks: bool  # whether the engine can
    workers: int

    def deal(self, seats: Sequence[Seat]) -> list[list[list[Seat]]]:
        """Shares of about the same work, the largest first: one for each process, more where they are long."""
        units = self.units(seats)
        costs = {unit[0].slot: sum(map(self._cost, unit)) for unit in units}
        count = self.workers * max(1, int(sum(costs.values()) / WORTH / self.workers))
        loads = [0.0] * count
        shares: list[list[list[Seat]]] = [[] for _ in range(count)]
        for unit in sorted(units, key=lambda unit: -costs[unit[0].slot]):
            least = loads.index(min(loads))
            loads[least] += costs[unit[0].slot]
            shares[least].append(unit)
        order = sorted(range(count), key=lambda number: -loads[number])
        return [shares[number] for number in order if shares[number]]

    def units(self, seats: Sequence[Seat]) -> list[list[Seat]]:
        """What one process has to train: stacks, and single devices."""
        stacks: list[list[Seat]] = []
        alone: list[list[Seat]] = []
        for group in in_groups(seats):
            kinds: dict[tuple[str, int, int], list[Seat]] = {}
            for seat in group:
                kinds.setdefault(self._kind(seat), []).append(seat)
            for same in kinds.values():
                if self.stacks and len(same) >= LEAST and may_stack(self.manifest, same[0].task):
                    stacks.append(same)
                else:
                    alone += [[seat] for seat in same]
        return self._spread(stacks) + alone

    def _kind(self, seat: Seat) -> tuple[str, int, int]:
        """Devices of different kinds are never stacked."""
        samples = self.samples[seat.device]
        task = seat.task.for_samples(samples)
        return task.boundary, task.steps, min(task.batch, samples)

    def _spread(self, stacks: list[list[Seat]]) -> list[list[Seat]]:
        """The stacks that would leave processes idle in smaller ones, none too small."""
        last = len(stacks) % self.workers
        if not last or not self._all_alike:
            return stacks
        found = stacks[: len(stacks) - last]
        for stack in stacks[len(stacks) - last :]:
            parts = max(1, min(self.workers // last, len(stack) // LEAST))
            ends = [len(stack) * part // parts for part in range(parts + 1)]
            found += [stack[start:end] for start, end in pairwise(ends)]
        return found

    @property
    def _all_alike(self) -> bool:
        """Whether devices of a kind bring the same vectors; who kept none is not stacked with those who did."""
        rules = self.plan.choices.rules
        momentum = any(isinstance(rule, Momentum) and rule.between == "keep" for rule in rules)
        return not momentum and not any(isinstance(rule, ControlVariate) and rule.origin == "own" for rule in rules)

    def _cost(self, seat: Seat) -> float:
        """About how many multiply-accumulates a device computes."""
        layers, start = self.manifest.layers, coverage(self.manifest, seat.task.boundary).boundary
        samples = self.samples[seat.device]
        task = seat.task.for_samples(samples)
        share = start.width**2 if start.width else 1.0
        trained, frozen = (sum(layer.macs for layer in part) for part in (layers[start.layer :], layers[: start.layer]))
        return 3 * task.steps * min(task.batch, samples) * share * trained + samples * frozen
