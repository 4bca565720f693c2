"""The oracles against facts that do not come from their code: PyTorch, closed forms, degenerate constants."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.oracles import (
    combined,
    domo,
    embracing,
    fedavg,
    fednova,
    fedopt,
    fedprox,
    fjord,
    heterofl,
    inclusivefl,
    scaffold,
    vrl_sgd,
)
from tests.oracles.model import Model, flat, mean, minus
from tests.oracles.problem import make_problem, make_quadratics, model_of, narrow_shapes, torch_module
from tests.oracles.setting import (
    DEVICES,
    EVERYONE,
    PROBLEM,
    RATE,
    SOME,
    START,
    STEPS,
    assert_same,
    assert_same_models,
    torch_loss,
)


def constant(*values: float):
    """Device i's loss is linear, so its gradient is everywhere the same."""

    def gradient(device: int, model: Model, step: int) -> Model:
        return [{name: np.full(value.shape, values[device]) for name, value in layer.items()} for layer in model]

    return gradient


ONE = [{"x": np.zeros(2)}]
FULL = {i: narrow_shapes(1.0) for i in DEVICES}
AS_FEDAVG = {
    **{
        f"domo.{method}": lambda who, method=method: domo.run(
            method, START, PROBLEM.gradient, who, STEPS, RATE, mu_server=0, mu_local=0, beta=0
        )
        for method in domo.METHODS
    },
    "domo.fedavg": lambda who: domo.run("fedavg", START, PROBLEM.gradient, who, STEPS, RATE),
    "embracing": lambda who: embracing.run(START, PROBLEM.gradient, who, dict.fromkeys(DEVICES, 0), STEPS, RATE),
    "inclusivefl": lambda who: inclusivefl.run(START, PROBLEM.gradient, who, dict.fromkeys(DEVICES, 3), STEPS, RATE),
    "heterofl": lambda who: heterofl.run(START, PROBLEM.gradient, who, FULL, STEPS, RATE),
    "fjord": lambda who: fjord.run(
        START,
        PROBLEM.gradient,
        who,
        {1.0: narrow_shapes(1.0)},
        dict.fromkeys(DEVICES, 1.0),
        {(i, step): 1.0 for i in DEVICES for step in range(len(who) * STEPS)},
        STEPS,
        RATE,
    ),
    "fedprox": lambda who: fedprox.run(START, PROBLEM.gradient, who, dict.fromkeys(DEVICES, STEPS), RATE, mu=0),
    "fednova": lambda who: fednova.run(START, PROBLEM.gradient, who, dict.fromkeys(DEVICES, STEPS), RATE),
    "combined": lambda who: combined.run(
        START,
        PROBLEM.gradient,
        who,
        len(DEVICES),
        ALL_TRAINED,
        dict.fromkeys(DEVICES, STEPS),
        {},
        combined.Rules(local_rate=RATE),
    ),
}
ALL_TRAINED = {i: [{n: np.ones(v.shape) for n, v in layer.items()} for layer in START] for i in DEVICES}


@pytest.mark.parametrize("who", [EVERYONE, SOME], ids=["everyone", "some"])
@pytest.mark.parametrize("name", AS_FEDAVG)
def test_degenerate_constants_are_fedavg(name, who):
    assert_same_models(AS_FEDAVG[name](who), fedavg.run(START, PROBLEM.gradient, who, STEPS, RATE))


def test_fedavg_with_one_step_is_gradient_descent_on_the_pooled_data():
    whole = make_problem()
    samples = dict(enumerate(whole.samples))
    rounds = fedavg.run(START, whole.gradient, EVERYONE, 1, RATE, weights=samples)
    module = torch_module(START)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    inputs, labels = torch.tensor(np.concatenate(whole.inputs)), torch.tensor(np.concatenate(whole.labels))
    for done in rounds:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), labels).backward()
        optimiser.step()
        assert_same(done.model, model_of(module))


def test_fedavg_rests_where_the_closed_form_says_and_not_at_the_optimum():
    q = make_quadratics()
    rounds = fedavg.run(q.start(), q.gradient, [[0, 1, 2, 3]] * 200, 5, 0.2)
    rest = flat(rounds[-1].model)
    np.testing.assert_allclose(rest, q.fedavg_fixed_point(5, 0.2), rtol=1e-10)
    assert np.abs(rest - q.optimum()).max() > 0.01


def test_fedavg_counts_a_device_as_often_as_it_was_drawn_and_scales_by_the_server_rate():
    (done,) = fedavg.run(ONE, constant(1.0, 4.0), [[0, 1, 0]], 2, 0.1, server_rate=3.0)
    np.testing.assert_allclose(flat(done.model), -3.0 * 0.1 * 2 * (1 + 4 + 1) / 3)


@pytest.mark.parametrize("boundary", [1, 2])
def test_embracing_is_training_the_output_side_on_stored_activations(boundary):
    """In PyTorch as the paper describes it: activations once, then a model of the last layers only."""
    rounds = embracing.run(START, PROBLEM.gradient, [[0, 1, 2]], {0: 0, 1: boundary, 2: boundary}, STEPS, RATE, 0.9)
    after = []
    for device in (0, 1, 2):
        module = torch_module(START)
        pieces = [torch.nn.Sequential(layer, torch.nn.Tanh()) for layer in (module.first, module.second)]
        first = 0 if device == 0 else boundary
        frozen = torch.nn.Sequential(*pieces[:first])
        trained = torch.nn.Sequential(*pieces[first:], module.head)
        optimiser = torch.optim.SGD(trained.parameters(), lr=RATE, momentum=0.9)
        batches = [PROBLEM.batch_of(device, step) for step in range(STEPS)]
        with torch.no_grad():
            stored = [frozen(torch.tensor(inputs)) for inputs, _ in batches]
        for activations, (_, labels) in zip(stored, batches):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(trained(activations), torch.tensor(labels)).backward()
            optimiser.step()
        after.append(model_of(module))
    for layer, name in [(0, "first.weight"), (1, "second.bias"), (2, "head.weight")]:
        who = after if layer >= boundary else after[:1]
        expected = np.mean([m[layer][name] for m in who], axis=0)
        np.testing.assert_allclose(rounds[0].model[layer][name], expected, rtol=1e-10)


def test_a_layer_that_nobody_trained_keeps_its_value():
    output_side = embracing.run(START, PROBLEM.gradient, [[0, 1]], {0: 1, 1: 2}, STEPS, RATE)[0].model
    input_side = inclusivefl.run(START, PROBLEM.gradient, [[0, 1]], {0: 1, 1: 2}, STEPS, RATE)[0].model
    changed = [[not np.array_equal(flat([a]), flat([b])) for a, b in zip(m, START)] for m in (output_side, input_side)]
    assert changed == [[False, True, True], [True, True, False]]


def test_local_momentum_is_that_of_torch():
    rounds = domo.run("fedavg_lm_z", START, PROBLEM.gradient, [[1]] * 2, STEPS, RATE, mu_local=0.6)
    module = torch_module(START)
    for r, done in enumerate(rounds):
        optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.6)  # a new buffer in every round
        for p in range(STEPS):
            optimiser.zero_grad()
            torch_loss(module, 1, r * STEPS + p).backward()
            optimiser.step()
        assert_same(done.model, model_of(module))


@pytest.mark.parametrize(("method", "steps"), [("fedavg_sm", 1), ("fedavg_lm", STEPS)])
def test_one_device_with_a_momentum_that_is_kept_is_sgd_with_momentum(method, steps):
    rounds = domo.run(method, START, PROBLEM.gradient, [[2]] * 4, steps, RATE, mu_server=0.7, mu_local=0.7)
    module = torch_module(START)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.7)
    for r, done in enumerate(rounds):
        for p in range(steps):
            optimiser.zero_grad()
            torch_loss(module, 2, r * steps + p).backward()
            optimiser.step()
        assert_same(done.model, model_of(module))


@pytest.mark.parametrize("method", ["domo", "domo_s"])
def test_domo_without_fusion_is_slm_z(method):
    without = domo.run(method, START, PROBLEM.gradient, EVERYONE, STEPS, RATE, beta=0)
    assert_same_models(without, domo.run("fedavg_slm_z", START, PROBLEM.gradient, EVERYONE, STEPS, RATE))


@pytest.mark.parametrize("method", domo.METHODS)
def test_the_server_momentum_can_be_inferred_from_two_versions(method):
    rounds = domo.run(method, START, PROBLEM.gradient, EVERYONE, STEPS, RATE, server_rate=0.8)
    for before, after in pairwise(rounds):
        assert_same(after.inferred, before.server_momentum, 1e-10)


def test_the_momenta_on_a_constant_gradient_have_their_closed_form():
    """v_p = (1 − μ_l^p)/(1 − μ_l) · g, m_r = (1 − μ_s^r)/(1 − μ_s) · d; the fusion is not in d."""
    for method in ("fedavg_slm_z", "domo", "domo_s"):
        rounds = domo.run(method, ONE, constant(3.0), [[0]] * 5, 4, 0.1, mu_server=0.9, mu_local=0.6, beta=0.9)
        buffers = [(1 - 0.6**p) / 0.4 * 3.0 for p in (1, 2, 3, 4)]
        position = 0.0
        for r, done in enumerate(rounds):
            m_r = (1 - 0.9**r) / 0.1 * np.mean(buffers)
            fused = 0.0 if method == "fedavg_slm_z" else 0.1 * 0.9 * 4 * m_r
            np.testing.assert_allclose(flat(done.local[0]), position - fused - 0.1 * sum(buffers))
            np.testing.assert_allclose(flat(done.directions[0]), np.mean(buffers))
            position -= 0.1 * 4 * (1 - 0.9 ** (r + 1)) / 0.1 * np.mean(buffers)
            np.testing.assert_allclose(flat(done.model), position)


def test_scaffold_and_vrl_sgd_reach_the_optimum_that_fedavg_misses():
    q = make_quadratics()
    everyone = [[0, 1, 2, 3]] * 400
    controlled = scaffold.run(q.start(), q.gradient, everyone, 4, 5, 0.2)
    reduced = vrl_sgd.run(q.start(), q.gradient, everyone, 4, 5, 0.2)
    for rounds in (controlled, reduced):
        np.testing.assert_allclose(flat(rounds[-1].model), q.optimum(), rtol=1e-8)
    np.testing.assert_allclose(flat(controlled[-1].control), 0.0, atol=1e-8)
    at_rest = [q.gradient(i, [{"x": q.optimum()}]) for i in range(4)]
    for i in range(4):
        assert_same(controlled[-1].controls[i], at_rest[i], 1e-7)
        assert_same(reduced[-1].corrections[i], at_rest[i], 1e-7)


def test_scaffold_with_some_of_the_devices_reaches_the_optimum_and_c_stays_the_mean_of_all():
    q = make_quadratics()
    rng = np.random.default_rng(3)
    some = [rng.choice(4, size=2, replace=False).tolist() for _ in range(600)]
    rounds = scaffold.run(q.start(), q.gradient, some, 4, 5, 0.1)
    np.testing.assert_allclose(flat(rounds[-1].model), q.optimum(), rtol=1e-6)
    for done in rounds[:20]:
        assert_same(done.control, mean(list(done.controls.values())))


def test_vrl_sgd_is_scaffold_when_everyone_takes_part():
    """Δ_i = c_i − c, as both papers' definitions give with server rate 1."""
    reduced = vrl_sgd.run(START, PROBLEM.gradient, EVERYONE, 4, STEPS, RATE)
    controlled = scaffold.run(START, PROBLEM.gradient, EVERYONE, 4, STEPS, RATE)
    assert_same_models(reduced, controlled)
    for mine, theirs in zip(reduced, controlled):
        for i in DEVICES:
            assert_same(mine.corrections[i], minus(theirs.controls[i], theirs.control), 1e-10)


def test_fedprox_is_sgd_on_the_proximal_loss():
    steps = {0: 2, 1: 5}
    (done,) = fedprox.run(START, PROBLEM.gradient, [[0, 1]], steps, RATE, mu=0.3)
    for device, count in steps.items():
        module = torch_module(START)
        received = [parameter.detach().clone() for parameter in module.parameters()]
        optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
        for k in range(count):
            optimiser.zero_grad()
            distance = sum(((p - q) ** 2).sum() for p, q in zip(module.parameters(), received))
            (torch_loss(module, device, k) + 0.15 * distance).backward()
            optimiser.step()
        assert_same(done.local[device], model_of(module))


def test_fednova_follows_the_mean_gradient_where_fedavg_follows_the_busiest_device():
    steps, weights = {0: 1, 1: 9}, {0: 3.0, 1: 1.0}
    (done,) = fednova.run(ONE, constant(1.0, -1.0), [[0, 1]], steps, 0.1, weights)
    effective = 0.75 * 1 + 0.25 * 9
    np.testing.assert_allclose(flat(done.model), -0.1 * effective * (0.75 * 1.0 - 0.25 * 1.0))


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_fednovas_norms_have_the_published_closed_forms(steps):
    rho, shrink = 0.9, 0.05
    momentum = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(sum(fednova.coefficients(steps, momentum=rho)), momentum)
    np.testing.assert_allclose(sum(fednova.coefficients(steps, shrink=shrink)), (1 - (1 - shrink) ** steps) / shrink)
    (done,) = fednova.run(ONE, constant(2.0), [[0]], {0: steps}, 0.1, momentum=rho)
    np.testing.assert_allclose(flat(done.normalised[0]), 2.0)


def test_fedadagrad_with_one_step_is_torchs_adagrad():
    rounds = fedopt.run("adagrad", START, PROBLEM.gradient, [[1]] * 5, 1, 1.0, 0.3, beta1=0.0, tau=1e-2)
    module = torch_module(START)
    optimiser = torch.optim.Adagrad(module.parameters(), lr=0.3, eps=1e-2, initial_accumulator_value=1e-4)
    for r, done in enumerate(rounds):
        optimiser.zero_grad()
        torch_loss(module, 1, r).backward()
        optimiser.step()
        assert_same(done.model, model_of(module))


def test_the_moments_of_a_constant_update_have_their_closed_form():
    tau, step = 0.5, 2.0
    adam = fedopt.run("adam", ONE, constant(-step), [[0]] * 6, 1, 1.0, 0.1, tau=tau)
    rising = fedopt.run("yogi", ONE, constant(-step), [[0]] * 6, 1, 1.0, 0.1, tau=tau)
    falling = fedopt.run("yogi", ONE, constant(-step), [[0]] * 6, 1, 1.0, 0.1, tau=tau, second_start=9.0)
    for t in range(6):
        for rounds in (adam, rising, falling):
            np.testing.assert_allclose(flat(rounds[t].first), (1 - 0.9 ** (t + 1)) * step)
        np.testing.assert_allclose(flat(adam[t].second), 0.99 ** (t + 1) * tau**2 + (1 - 0.99 ** (t + 1)) * step**2)
        np.testing.assert_allclose(flat(rising[t].second), tau**2 + (t + 1) * 0.01 * step**2)
        np.testing.assert_allclose(flat(falling[t].second), 9.0 - (t + 1) * 0.01 * step**2)
    moved = 0.1 * 0.1 * step / (np.sqrt(0.99 * tau**2 + 0.01 * step**2) + tau)
    np.testing.assert_allclose(flat(adam[0].model), moved)


def test_heterofl_takes_the_mean_over_the_devices_that_have_the_element():
    wide, narrow = [{"w": (2, 2)}], [{"w": (1, 2)}]
    start = [{"w": np.zeros((3, 2))}]
    (done,) = heterofl.run(start, constant(1.0, 5.0), [[0, 1]], {0: wide, 1: narrow}, 1, 1.0)
    np.testing.assert_array_equal(done.model[0]["w"], [[-3, -3], [-1, -1], [0, 0]])
    np.testing.assert_array_equal(done.count[0]["w"], [[2, 2], [1, 1], [0, 0]])


def test_fjord_changes_only_what_was_drawn_and_averages_over_all_that_hold_it():
    widths = {1.0: [{"w": (3,)}], 0.5: [{"w": (2,)}], 0.1: [{"w": (1,)}]}
    draws = {(0, 0): 1.0, (0, 1): 0.1, (1, 0): 0.1, (1, 1): 0.5}
    start = [{"w": np.zeros(3)}]
    (done,) = fjord.run(start, constant(1.0, 1.0), [[0, 1]], widths, {0: 1.0, 1: 0.5}, draws, 2, 1.0)
    np.testing.assert_array_equal(done.model[0]["w"], [-2, -1, -1])
    only_half = heterofl.run(START, PROBLEM.gradient, SOME, dict.fromkeys(DEVICES, narrow_shapes(0.5)), STEPS, RATE)
    always = {(i, step): 0.5 for i in DEVICES for step in range(len(SOME) * STEPS)}
    half = {0.5: narrow_shapes(0.5)}
    drawn = fjord.run(START, PROBLEM.gradient, SOME, half, dict.fromkeys(DEVICES, 0.5), always, STEPS, RATE)
    assert_same_models(drawn, only_half)
