"""Divide the devices of a round among worker processes: stacks of small devices, and single ones.

Devices of a stack are trained at once (stacked_trainer.py), and a device's bits may depend on its stack. So stacks are
formed from the cohort's order alone, and given whole to one process or another: the number of processes changes
nothing but the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from federation.capacity import forward_macs
from federation.coverage import coverage
from federation.manifest import Manifest
from federation.messages import Task
from simulation.server import SeatTask

# Devices that are trained at once. 16 against a plain loop, at batch 32: logistic regression (0.25 million
# multiply-accumulates in a step) 2.9 times as quick, the digits (5) 1.8, two hidden layers (6.4) 1.4, the smallest CNN
# of the papers (120) 0.9. More than 16 gain nothing, and below four nothing is gained.
MOST_STACKED, LEAST_STACKED = 16, 4
MOST_MACS = 10_000_000  # multiply-accumulates of a step above which a device alone keeps a core busy
WORTH = 5e9  # multiply-accumulates that are worth a message of their own: some tenths of a second


def may_stack(manifest: Manifest, task: Task) -> bool:
    """Say whether devices with this task are to be stacked, if PyTorch can stack their model."""
    covered = coverage(manifest, task.boundary)
    boundary = covered.boundary
    macs = task.batch * sum(layer.macs for layer in manifest.layers[boundary.layer :])
    # Dropout and short memory are not PyTorch's own: torch_engine.Forward puts others in their place.
    plain = not manifest.uses_seed and boundary.last_steps is None
    whole = len(covered.graphs) == 1 and task.at_once == task.batch and not covered.measures
    return macs <= MOST_MACS and plain and whole and task.activations == "float32"


@dataclass(frozen=True)
class Assigner:
    """Divides the rounds of one run."""

    manifest: Manifest
    samples: Mapping[str, int]  # of every device
    stacks: bool  # whether the engine can
    workers: int

    def assign(self, seats: Sequence[SeatTask]) -> list[list[list[SeatTask]]]:
        """Put units into shares of about the same work, the largest first: one per process, more where they are long.

        What a device gives does not depend on the share that its unit is in.
        """
        units = self.units(seats)
        costs = {unit[0].slot: sum(map(self.macs, unit)) for unit in units}
        count = self.workers * max(1, int(sum(costs.values()) / WORTH / self.workers))
        loads = [0.0] * count
        shares: list[list[list[SeatTask]]] = [[] for _ in range(count)]
        for unit in sorted(units, key=lambda unit: -costs[unit[0].slot]):
            least = loads.index(min(loads))
            loads[least] += costs[unit[0].slot]
            shares[least].append(unit)
        order = sorted(range(count), key=lambda number: -loads[number])
        return [shares[number] for number in order if shares[number]]

    def units(self, seats: Sequence[SeatTask]) -> list[list[SeatTask]]:
        """Form what one process has to train as a whole: full stacks in the cohort's order, the rest of each kind."""
        kinds: dict[tuple[str, int, int], list[SeatTask]] = {}
        for seat in seats:
            kinds.setdefault(self._kind(seat), []).append(seat)
        found: list[list[SeatTask]] = []
        for same in kinds.values():
            size = MOST_STACKED if self.stacks and may_stack(self.manifest, same[0].task) else 1
            for start in range(0, len(same), size):
                unit = same[start : start + size]
                found += [unit] if len(unit) >= LEAST_STACKED else [[seat] for seat in unit]
        return found

    def _kind(self, seat: SeatTask) -> tuple[str, int, int]:
        """Name the kind of a device: those of different kinds are never stacked."""
        samples = self.samples[seat.device]
        task = seat.task.for_samples(samples)
        return task.boundary, task.steps, min(task.batch, samples)

    def macs(self, seat: SeatTask) -> float:
        """Estimate the multiply-accumulates that a device computes."""
        covered = coverage(self.manifest, seat.task.boundary)
        layers, start = self.manifest.layers, covered.boundary
        samples = self.samples[seat.device]
        task = seat.task.for_samples(samples)
        share = start.width**2 if start.width else 1.0
        frozen = forward_macs(self.manifest, start)
        trained = sum(layer.macs for layer in layers) - frozen
        seen = min(task.batch, samples) * task.steps
        passed = samples if covered.measures else min(samples, seen)
        return 3 * seen * share * trained + passed * frozen
