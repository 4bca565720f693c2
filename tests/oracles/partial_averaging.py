"""Partial model averaging: after every step another part of the model is averaged.

Lee, Sahu, He, Avestimehr: Partial Model Averaging in Federated Learning: Performance Guarantees and Benefits,
Algorithm 1; what happens when the active devices change is in its appendix, "Local Model Re-distribution".
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.model import Gradient, Layer, Model, copy, mean, plus

# A part of the model: (layer, name, first row, end row), rows of a parameter's dimension 0.
Part = list[tuple[int, str, int, int]]


@dataclass(frozen=True)
class Step:
    part: int  # j
    cohort: list[int]
    before: dict[int, Model]  # x^i_k before the averaging
    local: dict[int, Model]  # and after it
    average: Model  # u_k, the full average, which the algorithm itself computes at the end only (line 7)


def layer_parts(model: Model, groups: list[list[int]]) -> list[Part]:
    """Part j is the layers `groups[j]`."""
    return [[whole for layer in group for whole in _whole(layer, model[layer])] for group in groups]


def _whole(index: int, layer: Layer) -> Part:
    return [(index, name, 0, value.shape[0]) for name, value in layer.items()]


def channel_parts(model: Model, tau: int) -> list[Part]:
    """Part j is the j-th of τ slices of the rows of every parameter."""
    parts: list[Part] = []
    for j in range(tau):
        part: Part = []
        for index, layer in enumerate(model):
            for name, value in layer.items():
                rows = value.shape[0]
                part.append((index, name, j * rows // tau, (j + 1) * rows // tau))
        parts.append(part)
    return parts


def run(
    start: Model,
    gradient: Gradient,
    cohorts: list[list[int]],
    steps_per_cohort: int,
    parts: list[Part],
    rate: float,
    redistribute: str = "local",
) -> list[Step]:
    """The interval τ is the number of parts. The last step's `average` is what the listing returns.

    When the cohort changes, "averaged" gives the full average to everyone; "local" hands the models on as they are: the
    n-th device of the new cohort goes on from the model of the n-th of the old one.
    """
    tau = len(parts)
    steps: list[Step] = []
    local = {i: copy(start) for i in cohorts[0]}
    k = 0
    for change, cohort in enumerate(cohorts):
        if change > 0:
            handed_on = list(local.values())
            if redistribute == "averaged":
                handed_on = [mean(handed_on)] * len(cohort)
            local = {i: copy(model) for i, model in zip(cohort, handed_on, strict=True)}
        for _ in range(steps_per_cohort):
            k += 1  # line 1
            for i in cohort:
                local[i] = plus(local[i], -rate, gradient(i, local[i], k - 1))  # line 2
            before = {i: copy(local[i]) for i in cohort}
            j = k % tau  # line 3
            for layer, name, first, end in parts[j]:
                average = sum(before[i][layer][name][first:end] for i in cohort) / len(cohort)  # line 4
                for i in cohort:
                    local[i][layer][name][first:end] = average  # line 5
            after = {i: copy(local[i]) for i in cohort}
            steps.append(Step(j, list(cohort), before, after, mean([local[i] for i in cohort])))  # line 7
    return steps
