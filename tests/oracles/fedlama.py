"""FedLAMA: every layer has its own aggregation interval.

Lee, Zhang, Avestimehr: Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, Algorithms 1 and 2.
Line 4 of Algorithm 1 counts j from 0 to τ; here the steps of a window are 1 ... φτ', so that φ = 1 is FedAvg with
interval τ'. Line 9 of Algorithm 2 prints δ_l < λ_l; the text below it and figure 1 say that the two curves which cross
are δ_l and 1 − λ_l, and so it is done here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracles.model import Gradient, Model, copy, mean, plus, size, squared_distance


@dataclass(frozen=True)
class Adjustment:
    order: list[int]  # layers, sorted by d
    delta: list[float]  # δ_l, in that order
    lam: list[float]  # λ_l, in that order
    intervals: list[int]  # τ_l, by layer


@dataclass(frozen=True)
class Step:
    synchronised: list[int]  # the layers averaged after this step
    intervals: list[int]  # τ_l in force at this step
    discrepancy: list[float | None]  # d_l as last measured; None before a layer's first synchronisation
    times_synchronised: list[int]  # κ_l so far
    local: dict[int, Model]  # after the synchronisation
    model: Model  # u: every layer as of its last synchronisation
    adjustment: Adjustment | None  # at the end of a window


def adjust(d: list[float], dims: list[int], base: int, factor: int, accelerate: bool = False) -> Adjustment:
    """Algorithm 2. The layers of the smallest d, up to and including the crossing, get φτ', the others τ'.

    `accelerate` is the extension at the end of the paper's section: d descending, crossing of 1 − δ_l with λ_l. The
    layers of the largest d, up to and including the crossing, get τ', the others φτ'. Without any discrepancy (one
    device) nothing ever crosses, so all layers are on the near side.
    """
    order = sorted(range(len(d)), key=lambda layer: -d[layer] if accelerate else d[layer])  # lines 1, 2
    total_size = sum(dims)  # line 3
    total_discrepancy = sum(d[layer] * dims[layer] for layer in range(len(d)))  # line 4
    near, far = (base, factor * base) if accelerate else (factor * base, base)
    intervals = [far] * len(d)
    deltas: list[float] = []
    lams: list[float] = []
    crossed = False
    for position, layer in enumerate(order):  # line 5
        passed = order[: position + 1]
        part = sum(d[i] * dims[i] for i in passed)
        delta = part / total_discrepancy if total_discrepancy > 0 else 0.0  # line 6
        lam = sum(dims[i] for i in passed) / total_size  # line 7
        deltas.append(delta)
        lams.append(lam)
        if not crossed:
            intervals[layer] = near  # line 10
        if (1 - delta < lam) if accelerate else (1 - lam < delta):  # line 9
            crossed = True
    return Adjustment(order, deltas, lams, intervals)


def run(
    start: Model,
    gradient: Gradient,
    cohorts: list[list[int]],
    base: int,
    factor: int,
    rate: float,
    accelerate: bool = False,
) -> list[Step]:
    """`cohorts[t]` are the active devices of window t, which is φτ' steps long."""
    layers = len(start)
    dims = [size(layer) for layer in start]
    intervals = [base] * layers  # line 1
    window = base * factor  # line 2
    discrepancy: list[float | None] = [None] * layers
    times_synchronised = [0] * layers
    u = copy(start)
    steps: list[Step] = []
    for t, cohort in enumerate(cohorts):  # line 3
        local = {i: copy(u) for i in cohort}
        for j in range(1, window + 1):  # line 4
            for i in cohort:
                local[i] = plus(local[i], -rate, gradient(i, local[i], t * window + j - 1))  # line 5
            in_force = list(intervals)
            due = [layer for layer in range(layers) if j % intervals[layer] == 0]  # line 7
            u = copy(u)
            average = mean([local[i] for i in cohort])
            for layer in due:
                u[layer] = average[layer]  # line 8
                distance = sum(squared_distance(u[layer], local[i][layer]) for i in cohort) / len(cohort)
                discrepancy[layer] = distance / (intervals[layer] * dims[layer])  # line 9
                times_synchronised[layer] += 1
                for i in cohort:
                    local[i][layer] = {name: np.array(value) for name, value in u[layer].items()}  # line 10
            adjustment = None
            if j == window:
                measured = [value for value in discrepancy if value is not None]  # all are due at a window's end
                adjustment = adjust(measured, dims, base, factor, accelerate)  # line 11
                intervals = adjustment.intervals
            steps.append(
                Step(due, in_force, list(discrepancy), list(times_synchronised), dict(local), copy(u), adjustment)
            )
    return steps


def cost(dims: list[int], times_synchronised: list[int]) -> int:
    """C = Σ_l dim(u_l) · κ_l, the parameters one device sends."""
    return sum(dims[layer] * times_synchronised[layer] for layer in range(len(dims)))
