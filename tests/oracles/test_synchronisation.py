"""FedLAMA and partial averaging: what is synchronised when, against hand-made cases, FedAvg and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracles import fedavg, fedlama, partial_averaging
from tests.oracles.model import Model, flat, mean, size, zeros
from tests.oracles.problem import model_of, torch_module
from tests.oracles.setting import (
    DEVICES,
    PROBLEM,
    RATE,
    SOME,
    START,
    STEPS,
    assert_same,
    assert_same_models,
    torch_loss,
)


@pytest.mark.parametrize("accelerate", [False, True])
def test_fedlama_with_factor_one_is_fedavg(accelerate):
    steps = fedlama.run(START, PROBLEM.gradient, SOME, STEPS, 1, RATE, accelerate)
    assert_same_models(steps[STEPS - 1 :: STEPS], fedavg.run(START, PROBLEM.gradient, SOME, STEPS, RATE))


def test_fedlama_stretches_the_interval_of_the_layers_up_to_the_crossing():
    found = fedlama.adjust([8.0, 0.1, 0.375], [10, 50, 40], 6, 2)  # d · dim = 80, 5, 15
    assert found.order == [1, 2, 0]
    np.testing.assert_allclose(found.delta, [0.05, 0.2, 1.0])
    np.testing.assert_allclose(found.lam, [0.5, 0.9, 1.0])
    assert found.intervals == [6, 12, 12]  # 1 − λ = 0.5, 0.1, 0: crossed at the second of the order
    assert fedlama.adjust([9.8, 0.01, 0.0375], [10, 50, 40], 6, 2).intervals == [12, 12, 12]  # δ = 0.005, 0.02, 1
    assert fedlama.adjust([4.0, 0.375, 3.0], [10, 80, 10], 6, 2).intervals == [6, 12, 6]  # δ = 0.3 > 1 − λ = 0.2
    # Descending: 1 − δ = 0.2, 0.05, 0 and λ = 0.1, 0.5, 1 cross at the second.
    assert fedlama.adjust([8.0, 0.1, 0.375], [10, 50, 40], 6, 2, accelerate=True).intervals == [6, 12, 6]


def test_accelerated_fedlama_synchronises_at_least_as_much():
    rng = np.random.default_rng(0)
    for _ in range(200):
        dims, d = rng.integers(1, 100, size=6).tolist(), rng.exponential(size=6).tolist()
        plain = fedlama.adjust(d, dims, 3, 2).intervals
        quick = fedlama.adjust(d, dims, 3, 2, accelerate=True).intervals
        assert all(mine <= theirs for mine, theirs in zip(quick, plain))
        # The complement of the first l layers has 1 − δ_l and 1 − λ_l: both rules find one crossing, and differ in
        # whether its layer is on the slow or the quick side.
        assert sum(mine < theirs for mine, theirs in zip(quick, plain)) <= 1


def test_fedlama_measures_what_it_synchronises_and_everyone_agrees_at_a_windows_end():
    steps = fedlama.run(START, PROBLEM.gradient, [[0, 1, 2], [1, 3]], 2, 3, RATE)
    last = steps[-1]
    assert last.synchronised == [0, 1, 2]
    assert_same(last.local[1], last.local[3])
    assert_same(last.local[1], last.model)
    first = steps[1]  # the first synchronisation, of plain SGD models
    trained = fedavg.run(START, PROBLEM.gradient, [[0, 1, 2]], 2, RATE)[0].local
    for layer in range(3):
        values = np.stack([flat([trained[i][layer]]) for i in (0, 1, 2)])
        np.testing.assert_allclose(first.discrepancy[layer], values.var(axis=0).mean() / 2)
    slow = [layer for layer in range(3) if steps[5].adjustment.intervals[layer] == 6]
    assert 0 < len(slow) < 3
    assert last.times_synchronised == [3 + (1 if layer in slow else 3) for layer in range(3)]
    dims = [size(layer) for layer in START]
    assert fedlama.cost(dims, [2, 2, 2]) == 2 * flat(START).size


BY_LAYER = partial_averaging.layer_parts(START, [[2], [0], [1]])
BY_CHANNEL = partial_averaging.channel_parts(START, 3)


@pytest.mark.parametrize("parts", [BY_LAYER, BY_CHANNEL], ids=["layer", "channel"])
def test_parts_are_disjoint_and_are_the_whole_model(parts):
    seen = [{name: np.zeros(value.shape) for name, value in layer.items()} for layer in START]
    for part in parts:
        for layer, name, first, end in part:
            seen[layer][name][first:end] += 1
    assert (flat(seen) == 1).all()


def test_partial_averaging_of_one_part_is_synchronous_sgd():
    one = partial_averaging.layer_parts(START, [[0, 1, 2]])
    steps = partial_averaging.run(START, PROBLEM.gradient, [[0, 1, 2, 3]], 6, one, RATE)
    module = torch_module(START)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    for k, step in enumerate(steps):
        optimiser.zero_grad()
        sum(torch_loss(module, device, k) / 4 for device in DEVICES).backward()
        optimiser.step()
        assert_same(step.average, model_of(module))
        assert_same(step.local[3], step.average)


@pytest.mark.parametrize("parts", [BY_LAYER, BY_CHANNEL], ids=["layer", "channel"])
def test_partial_averaging_synchronises_one_part_and_keeps_the_average(parts):
    steps = partial_averaging.run(START, PROBLEM.gradient, [[0, 1, 2]], 7, parts, RATE)
    assert [step.part for step in steps] == [1, 2, 0, 1, 2, 0, 1]
    for step in steps:
        assert_same(step.average, mean(list(step.before.values())))
        for number, part in enumerate(parts):
            equal = all(np.array_equal(step.local[0][a][n][f:e], step.local[2][a][n][f:e]) for a, n, f, e in part)
            assert equal == (number == step.part)


def first_three_only(device: int, model: Model, step: int) -> Model:
    """The gradient of the problem in the first three steps, 0 from then on."""
    return PROBLEM.gradient(device, model, step) if step < 3 else zeros(model)


def test_a_new_cohort_takes_over_local_or_averaged_models():
    for how in ("local", "averaged"):
        steps = partial_averaging.run(START, first_three_only, [[0, 1], [2, 3]], 3, BY_LAYER, RATE, how)
        before, after = steps[2], steps[3]
        handed = {2: before.local[0], 3: before.local[1]} if how == "local" else dict.fromkeys((2, 3), before.average)
        for i in (2, 3):
            assert_same(after.before[i], handed[i])
