"""Local rules against independent oracles: PyTorch's optimiser and autograd, and the papers' listings in float64."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import federation.axes.local as local
from federation.axes.local import (
    ControlVariate,
    LocalRule,
    LocalStep,
    Momentum,
    Plain,
    Proximal,
    Running,
    ServerMomentum,
    Start,
    WeightDecay,
)
from federation.errors import InputError
from federation.messages import Task, encode_task
from federation.space import Vector
from tests.federation.local_steps import GRADIENTS, RATE, STEPS, N, draw, plain, work

# -- each rule and its oracle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ([], {}),
        ([WeightDecay(0.01)], {"weight_decay": 0.01}),
        ([Momentum(0.9)], {"momentum": 0.9}),
        ([Momentum(0.9, nesterov=True)], {"momentum": 0.9, "nesterov": True}),
        ([WeightDecay(0.01), Momentum(0.6)], {"weight_decay": 0.01, "momentum": 0.6}),
        ([WeightDecay(0.1), Momentum(0.9, True)], {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
    ids=str,
)
def test_pytorch_goes_the_same_way(rules: list[LocalRule], options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    x = torch.nn.Parameter(torch.from_numpy(draw(N)))
    optimiser = torch.optim.SGD([x], lr=RATE, **options)
    ours = LocalStep(rules, Start(draw(N), STEPS, RATE), [slice(0, N)], [], block=10)
    for gradient in GRADIENTS:
        x.grad = torch.from_numpy(gradient.copy())
        optimiser.step()
        ours.step(gradient.copy(), RATE)
        np.testing.assert_allclose(ours.x, x.detach().numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ours.update(), ours.x - draw(N), atol=0)
    if "momentum" in options:
        np.testing.assert_allclose(ours.state()["momentum"], optimiser.state[x]["momentum_buffer"], atol=1e-6)


def test_fedprox_is_the_gradient_of_the_proximal_loss() -> None:
    torch = pytest.importorskip("torch")
    mu, data = 0.3, torch.from_numpy(draw(STEPS, N, seed=2))
    received = torch.from_numpy(draw(N))
    x = received.clone().requires_grad_()
    ours = LocalStep([Proximal(mu)], Start(draw(N), STEPS, RATE), [slice(0, N)], [], block=8)
    for sample in data:
        (gradient,) = torch.autograd.grad(torch.cosh(x @ sample / N), x)
        loss = torch.cosh(x @ sample / N) + mu / 2 * ((x - received) ** 2).sum()
        (proximal,) = torch.autograd.grad(loss, x)
        ours.step(gradient.numpy().copy(), RATE)
        with torch.no_grad():
            x -= RATE * proximal
    np.testing.assert_allclose(ours.x, x.detach().numpy(), atol=1e-6)


def test_scaffold_replaces_the_devices_part_of_the_gradient_by_the_fleets() -> None:
    c, c_i = draw(N, seed=3).astype(np.float64), draw(N, seed=4).astype(np.float64)
    y = draw(N).astype(np.float64)
    for g in GRADIENTS.astype(np.float64):
        y = y - RATE * (g - c_i + c)
    step = work([ControlVariate()], control=(c - c_i).astype(np.float32))
    np.testing.assert_allclose(step.x, y, atol=2e-6)
    # Option II needs the sum of the rates: c_i⁺ = c_i − c + (x − y)/(Kη).
    c_next = c_i - c - step.update() / step.rates
    np.testing.assert_allclose(c_next, GRADIENTS.astype(np.float64).mean(axis=0), atol=1e-5)


@dataclass
class Domo:
    """The device's half of DOMO (5 in the list of algorithms), word for word, in float64."""

    eta: float
    beta: float
    mu_l: float
    every_step: bool

    def __call__(self, x: Vector, m_r: Vector, gradients: Vector) -> tuple[Vector, Vector]:
        x, m, v, total = (np.array(a, np.float64) for a in (x, m_r, 0 * x, 0 * x))
        steps = len(gradients)
        if not self.every_step:
            x = x - self.eta * self.beta * steps * m
        for g in gradients.astype(np.float64):
            v = self.mu_l * v + g
            x = x - self.eta * v
            if self.every_step:
                x = x - self.eta * self.beta * m
            total = total + v
        return x, total / steps


@pytest.mark.parametrize("when", ["before", "every_step"])
@pytest.mark.parametrize("mu_l", [0.0, 0.6])
def test_domo_as_published_and_what_it_reports(when: Any, mu_l: float) -> None:
    m_r = draw(N, seed=5)
    x, d = Domo(RATE, 0.9, mu_l, when == "every_step")(draw(N), m_r, GRADIENTS)
    step = work([Momentum(mu_l), ServerMomentum(0.9, when)], server_momentum=m_r)
    np.testing.assert_allclose(step.x, x, atol=5e-6)
    np.testing.assert_allclose(-step.update() / (RATE * STEPS), d, atol=5e-6)


@pytest.mark.parametrize("when", ["before", "every_step"])
def test_the_server_can_do_domo_with_the_reported_update(when: Any) -> None:
    """Three rounds of two devices, the server's half too: x ← x − αηP·m with m from Δ or from d."""
    alpha, mu_s = 0.7, 0.9
    device = Domo(RATE, 0.9, 0.6, when == "every_step")
    x64, m64 = draw(N).astype(np.float64), np.zeros(N)
    x, m = draw(N), np.zeros(N, np.float32)
    for number in range(3):
        batches = [draw(STEPS, N, seed=10 * number + i) for i in range(2)]
        m64 = mu_s * m64 + np.mean([device(x64, m64, batch)[1] for batch in batches], axis=0)
        x64 = x64 - alpha * RATE * STEPS * m64
        rules = [Momentum(0.6), ServerMomentum(0.9, when)]
        brought = {"server_momentum": m} if number else {}
        updates = [work(rules, batch, x=x, **brought).update() for batch in batches]
        m = (mu_s * m - np.mean(updates, axis=0) / (RATE * STEPS)).astype(np.float32)
        x = (x - alpha * RATE * STEPS * m).astype(np.float32)
    np.testing.assert_allclose(x, x64, atol=2e-5)


def test_a_rate_that_changes_within_the_task() -> None:
    """What every step adds is told by the rates that were used, the move before by the rate that was announced."""
    m_r, rates = draw(N, seed=5), np.linspace(0.1, 0.01, STEPS)
    sgd = draw(N).astype(np.float64) - rates @ GRADIENTS.astype(np.float64)
    for when, moved in (("every_step", rates.sum()), ("before", RATE * STEPS)):
        rule = ServerMomentum(0.5, when)
        step = LocalStep([rule], Start(draw(N), STEPS, RATE, brought={"server_momentum": m_r}), [slice(0, N)], [])
        for gradient, rate in zip(GRADIENTS, rates):
            step.step(gradient.copy(), float(rate))
        np.testing.assert_allclose(step.x, sgd - moved * 0.5 * m_r, atol=5e-6)
        np.testing.assert_allclose(step.update(), sgd - draw(N), atol=5e-6)


def test_momentum_starts_where_it_is_told_and_leaves_that_vector_alone() -> None:
    first, second = GRADIENTS[:10], GRADIENTS[10:]
    whole = work([Momentum(0.9)])
    half = work([Momentum(0.9)], first)
    handed = half.state()["momentum"].copy()
    rest = work([Momentum(0.9)], second, x=half.x, momentum=handed)
    assert np.array_equal(rest.x, whole.x)
    assert np.array_equal(handed, half.state()["momentum"])


# -- degenerate cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        WeightDecay(0),
        Proximal(0),
        Momentum(0),
        Momentum(0, nesterov=True),
        ControlVariate(),
        ServerMomentum(0, "before"),
        ServerMomentum(0, "every_step"),
    ],
    ids=str,
)
def test_a_constant_of_zero_is_plain_sgd_to_the_bit(rule: LocalRule) -> None:
    extra = {} if isinstance(rule, ControlVariate) else {"server_momentum": draw(N, seed=5)}
    step = work([rule], **extra)
    assert step.x.tobytes() == plain().tobytes()
    assert step.update().tobytes() == (plain() - draw(N)).tobytes()


@pytest.mark.parametrize("when", ["before", "every_step"])
def test_in_the_first_round_there_is_no_server_momentum(when: Any) -> None:
    assert work([ServerMomentum(0.9, when)]).x.tobytes() == plain().tobytes()


def test_the_first_proximal_step_is_plain() -> None:
    assert np.array_equal(work([Proximal(5)], GRADIENTS[:1]).x, plain(GRADIENTS[:1]))


# -- the chain ---------------------------------------------------------------------------------------------------------

EVERY_RULE: tuple[LocalRule, ...] = (
    WeightDecay(0.01),
    Proximal(0.1),
    ControlVariate(),
    Momentum(0.9, nesterov=True),
    ServerMomentum(0.8, "every_step"),
)


def vectors(n: int) -> dict[str, Vector]:
    return {"momentum": draw(n, seed=6), "control": draw(n, seed=7), "server_momentum": draw(n, seed=8)}


@pytest.mark.parametrize("block", [1, 2, 3, 8, 36, 37, 1000, local.BLOCK])
def test_blocks_do_not_change_a_bit(block: int) -> None:
    one, other = (work(EVERY_RULE, block=size, **vectors(N)) for size in (block, 5))
    assert one.x.tobytes() == other.x.tobytes()
    assert one.state()["momentum"].tobytes() == other.state()["momentum"].tobytes()


def test_a_vector_of_several_blocks_of_the_real_size() -> None:
    n = 2 * local.BLOCK + 17
    assert np.array_equal(work([], draw(2, n)).x, plain(draw(2, n)))
    step, whole = (work(EVERY_RULE, draw(2, n), block=size, **vectors(n)) for size in (local.BLOCK, 10 * n))
    assert np.array_equal(step.x, whole.x)


def test_the_order_counts() -> None:
    """Behind the momentum, weight decay is decoupled: the velocity does not know it."""
    before, behind = work([WeightDecay(0.1), Momentum(0.9)]), work([Momentum(0.9), WeightDecay(0.1)])
    assert not np.allclose(before.x, behind.x)
    assert np.array_equal(behind.state()["momentum"], work([Momentum(0.9)]).state()["momentum"])


@pytest.mark.parametrize("last", [ServerMomentum(0.8, "before"), ServerMomentum(0.8, "every_step")], ids=str)
def test_statistics_are_replaced_and_no_rule_touches_them(last: LocalRule) -> None:
    weights, statistics = [slice(0, 10), slice(14, 30)], [slice(10, 14), slice(30, 33)]
    inner = np.r_[10:14, 30:33]
    neither = slice(33, N)  # in no run: no rule may change it
    start = Start(draw(N), STEPS, RATE, brought=vectors(N))
    step = LocalStep([*EVERY_RULE[:-1], last], start, weights, statistics, block=4)
    assert np.array_equal(step.x[inner], draw(N)[inner])  # before the first step too: the forward pass reads them
    for gradient in GRADIENTS:
        given_gradient = gradient.copy()
        step.step(given_gradient, RATE)
        assert np.array_equal(step.x[inner], gradient[inner])
        assert np.array_equal(given_gradient[inner], gradient[inner])
    assert np.array_equal(step.update()[inner], GRADIENTS[-1][inner] - draw(N)[inner])
    assert np.array_equal(step.x[neither], draw(N)[neither])
    assert not step.update()[neither].any()
    # The weights go the way they go without statistics between them.
    alone = np.r_[0:10, 14:30]
    expected = work(
        [*EVERY_RULE[:-1], last],
        GRADIENTS[:, alone],
        x=draw(N)[alone],
        **{name: vector[alone] for name, vector in vectors(N).items()},
    )
    assert np.array_equal(step.x[alone], expected.x)
    assert np.array_equal(step.update()[alone], expected.update())


@pytest.mark.parametrize("last", [ServerMomentum(0.8, "before"), ServerMomentum(0.8, "every_step")], ids=str)
def test_a_step_allocates_nothing(last: LocalRule) -> None:
    n = 200_000
    start = Start(draw(n), 3, RATE, brought=vectors(n))
    step = LocalStep([*EVERY_RULE[:-1], last], start, [slice(0, n - 100)], [slice(n - 100, n)])
    gradient = draw(n, seed=9)
    step.step(gradient, RATE)
    tracemalloc.start()
    try:
        probe = np.empty(n, np.float32)  # or this test would pass with a numpy that does not report
        assert tracemalloc.get_traced_memory()[1] >= probe.nbytes
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        step.step(gradient, RATE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 4096


def test_a_diverging_step_is_no_warning() -> None:
    step = LocalStep([WeightDecay(1e30)], Start(draw(N), 3, 1e30), [slice(0, N)], [])
    for gradient in GRADIENTS[:3]:
        step.step(gradient.copy(), 1e30)
    assert not np.isfinite(step.x).all()


class Doubling(LocalRule):
    """A rule of a user's own."""

    def begin(self, start: Start) -> Running:
        return _Doubling()


class _Doubling(Plain):
    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        g *= 2


def test_a_foreign_rule_can_take_part_but_has_no_name() -> None:
    np.testing.assert_array_equal(work([Doubling()]).x, plain(2 * GRADIENTS))
    with pytest.raises(
        InputError, match=r"Doubling is a rule of your own: .*; expected one of adam, adamw, control_variate, mom"
    ):
        encode_task(Task("stem", 1, 8, 0.1, (Doubling(),)))


def test_an_update_goes_into_memory_that_is_given():
    start = Start(np.linspace(-1, 1, 6, dtype=np.float32), 1, 0.1, received=np.zeros(6, np.float32))
    local = LocalStep((Momentum(0.9),), start, [slice(0, 4)], [slice(4, 6)])
    gradients = np.ones(6, np.float32)
    local.step(gradients, 0.1)
    expected = local.update()
    assert local.update(gradients) is gradients and np.array_equal(gradients, expected) and expected.any()
