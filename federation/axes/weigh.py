"""How much an update counts in the mean: all the same, by its samples, or normalised by how far it walked (FedNova)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from federation.axes.local import LocalRule, Pace


@dataclass(frozen=True)
class Weigh:
    """The weight w of an update, and its length a.

    `normalise` is FedNova (Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020): each update is divided by its effective number of steps, and the mean is multiplied by
    the mean number. Where all devices walk equally far this is the plain mean.
    """

    by: Literal["uniform", "samples"] = "uniform"
    normalise: bool = False

    def weight(self, samples: int) -> float:
        return float(samples) if self.by == "samples" else 1.0

    def length(self, rules: Sequence[LocalRule], steps: int, rate: float) -> float:
        return effective_steps(rules, steps, rate) if self.normalise else 1.0


def effective_steps(rules: Sequence[LocalRule], steps: int, rate: float) -> float:
    """‖a‖₁: how many times the first gradient is in the movement of `steps` local steps, with momentum and pull-back.

    >>> from federation.axes.local import Momentum
    >>> effective_steps([], 10, 0.1), effective_steps([Momentum(0.5)], 3, 0.1)
    (10.0, 4.25)
    """
    paces = [rule.pace for rule in rules]
    heavy = next((pace for pace in paces if pace.inertia), Pace())
    factor, ahead = heavy.inertia, heavy.inertia if heavy.nesterov else 0.0
    pull = rate * sum(pace.pull for pace in paces)
    if not pull:
        along = (steps - factor * (1 - factor**steps) / (1 - factor)) / (1 - factor)  # velocities, all together
        return steps + ahead * along if heavy.nesterov else along
    moved = velocity = 0.0
    for _ in range(steps):
        gradient = 1.0 - pull * moved
        velocity = factor * velocity + gradient
        moved += gradient + ahead * velocity if heavy.nesterov else velocity
    return max(1.0, moved)
