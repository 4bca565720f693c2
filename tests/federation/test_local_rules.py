"""Local rules against independent oracles: PyTorch's optimiser and autograd, and the papers' listings in float64."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import federation.axes.local as local
from federation.axes.local import (
    ControlVariate,
    LocalRule,
    LocalStep,
    Momentum,
    Proximal,
    Running,
    ServerMomentum,
    Start,
    WeightDecay,
    decode_rules,
    encode_rules,
    parse_rule,
    runs,
)
from federation.errors import InputError
from federation.space import Parameter, ParameterSpace, Vector

N, STEPS, RATE = 37, 25, 0.05


def draw(*shape: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


GRADIENTS = draw(STEPS, N, seed=1)


def work(rules: Sequence[LocalRule], gradients: Vector = GRADIENTS, *, block: int = 8, **start: Any) -> LocalStep:
    """Run the rules over the gradients, everything a weight; blocks are small and do not divide the length."""
    x = start.pop("x", draw(gradients.shape[1])).copy()
    begun = Start(x, len(gradients), RATE, **start)
    step = LocalStep(rules, begun, [slice(0, 5), slice(5, x.size)], [], block=block)
    for gradient in gradients:
        step.step(gradient.copy(), RATE)
    return step


def plain(gradients: Vector = GRADIENTS) -> Vector:
    x = draw(gradients.shape[1])
    for gradient in gradients:
        x -= np.float32(RATE) * gradient
    return x


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
        updates = [work(rules, batch, x=x, server_momentum=m if number else None).update() for batch in batches]
        m = (mu_s * m - np.mean(updates, axis=0) / (RATE * STEPS)).astype(np.float32)
        x = (x - alpha * RATE * STEPS * m).astype(np.float32)
    np.testing.assert_allclose(x, x64, atol=2e-5)


def test_a_rate_that_changes_within_the_task() -> None:
    """What every step adds is told by the rates that were used, the move before by the rate that was announced."""
    m_r, rates = draw(N, seed=5), np.linspace(0.1, 0.01, STEPS)
    sgd = draw(N).astype(np.float64) - rates @ GRADIENTS.astype(np.float64)
    for when, moved in (("every_step", rates.sum()), ("before", RATE * STEPS)):
        rule = ServerMomentum(0.5, when)
        step = LocalStep([rule], Start(draw(N), STEPS, RATE, server_momentum=m_r), [slice(0, N)], [])
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
    neither = slice(33, N)  # in no run: nobody may change it
    start = Start(draw(N), STEPS, RATE, **vectors(N))
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
    expected = work([*EVERY_RULE[:-1], last], GRADIENTS[:, alone], x=draw(N)[alone],
                    **{name: vector[alone] for name, vector in vectors(N).items()})  # fmt: skip
    assert np.array_equal(step.x[alone], expected.x)
    assert np.array_equal(step.update()[alone], expected.update())


@pytest.mark.parametrize("last", [ServerMomentum(0.8, "before"), ServerMomentum(0.8, "every_step")], ids=str)
def test_a_step_allocates_nothing(last: LocalRule) -> None:
    n = 200_000
    start = Start(draw(n), 3, RATE, **vectors(n))
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


class Doubling:
    """A rule of somebody else's: no base class needed."""

    def begin(self, start: Start) -> Running:
        return self

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        g *= 2

    def state(self) -> dict[str, Vector]:
        return {}

    def unreported(self, rates: float) -> Vector | None:
        return None


def test_a_foreign_rule_can_take_part_but_has_no_name() -> None:
    np.testing.assert_array_equal(work([Doubling()]).x, plain(2 * GRADIENTS))
    with pytest.raises(InputError, match="Doubling has no name and cannot be sent; rules are control_variate, mom"):
        encode_rules([Doubling()])


# -- where weights and statistics lie ----------------------------------------------------------------------------------

SPACE = ParameterSpace(
    [
        [Parameter("a", "weight", (2, 3)), Parameter("b", "weight", (3,)), Parameter("a.mean", "statistic", (2,))],
        [],
        [Parameter("c", "weight", (4,)), Parameter("empty", "weight", (0, 5))],
        [Parameter("d", "weight", ()), Parameter("d.mean", "statistic", (2,)), Parameter("d.var", "statistic", (2,))],
    ]
)


@pytest.mark.parametrize(
    ("first", "weights", "statistics"),
    [
        (0, [slice(0, 9), slice(11, 16)], [slice(9, 11), slice(16, 20)]),
        (1, [slice(0, 5)], [slice(5, 9)]),
        (2, [slice(0, 5)], [slice(5, 9)]),
        (3, [slice(0, 1)], [slice(1, 5)]),
    ],
)
def test_runs(first: int, weights: list[slice], statistics: list[slice]) -> None:
    assert runs(SPACE, first) == (weights, statistics)


@pytest.mark.parametrize("first", [-1, 4])
def test_runs_of_a_layer_that_does_not_exist(first: int) -> None:
    with pytest.raises(InputError, match=f"first_layer: expected 0 to 3, got {first}"):
        runs(SPACE, first)


def test_runs_agree_with_the_names() -> None:
    weights, _ = runs(SPACE, 0)
    vector = np.zeros(SPACE.size, np.float32)
    for run in weights:
        vector[run] = 1
    for parameter in SPACE:
        assert (vector[SPACE.slice_of(parameter.name)] == (parameter.kind == "weight")).all()


# -- bad input ---------------------------------------------------------------------------------------------------------


def read_only() -> Vector:
    return np.frombuffer(bytes(4 * N), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": draw(2, 2)}, r"x: expected a flat, writable float32 vector, got float32 \(2, 2\)"),
        ({"x": np.zeros(3)}, r"x: expected a flat, writable float32 vector, got float64 \(3,\)"),
        ({"x": read_only()}, r"x: expected a flat, writable float32 vector, got read-only float32 \(37,\)"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"rate": -0.1}, r"rate: expected a number in \[0, 3.4e\+38\), got -0.1"),
        ({"rate": float("nan")}, r"rate: expected .* got nan"),
        ({"momentum": draw(3)}, r"momentum: expected float32 \(37,\) like x, got float32 \(3,\)"),
        ({"control": np.zeros(N)}, r"control: expected float32 \(37,\) like x, got float64 \(37,\)"),
        ({"server_momentum": draw(1, N)}, r"server_momentum: expected float32 \(37,\) like x, got float32 \(1, 37\)"),
    ],
)
def test_a_start_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Start(**{"x": draw(N), "steps": 1, "rate": 0.1, **change})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: WeightDecay(-1), r"weight_decay.factor: expected a number in \[0, 3.4e\+38\), got -1"),
        (lambda: Proximal(float("inf")), "proximal.mu: expected .* got inf"),
        (lambda: Momentum(1.0), r"momentum.factor: expected a number in \[0, 1\), got 1.0"),
        (lambda: Momentum(float("nan")), "momentum.factor: .* got nan"),
        (lambda: ServerMomentum(-0.5, "before"), "server_momentum.beta: .* got -0.5"),
        (
            lambda: ServerMomentum(0.5, "later"),
            "server_momentum.when: expected 'before' or 'every_step', got 'later'",
        ),
    ],
)
def test_constants_that_make_no_sense(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


@pytest.mark.parametrize(
    ("weights", "statistics"),
    [
        ([slice(0, 10), slice(9, 20)], []),
        ([slice(0, 10)], [slice(5, 6)]),
        ([slice(0, N + 1)], []),
        ([slice(-3, 5)], []),
        ([slice(5, 3)], []),
        ([slice(0, 10, 2)], []),
    ],
)
def test_runs_must_be_disjoint_and_inside(weights: list[slice], statistics: list[slice]) -> None:
    with pytest.raises(InputError, match="runs: expected disjoint runs of a vector of 37 elements, got slice"):
        LocalStep([], Start(draw(N), 1, 0.1), weights, statistics)


@pytest.mark.parametrize("gradients", [draw(N - 1), np.zeros(N), draw(1, N)])
def test_gradients_must_fit(gradients: Vector) -> None:
    with pytest.raises(InputError, match=r"gradients: expected float32 \(37,\), got"):
        work([], GRADIENTS[:1]).step(gradients, 0.1)


def test_rates_and_blocks_must_make_sense() -> None:
    with pytest.raises(InputError, match="rate: expected"):
        work([], GRADIENTS[:1]).step(draw(N), float("inf"))
    with pytest.raises(InputError, match="block: expected at least 1 element, got 0"):
        work([], block=0)


def test_the_servers_momentum_stands_last() -> None:
    wrong = [ServerMomentum(0.9, "every_step"), Momentum(0.9)]
    message = "rules: expected ServerMomentum to stand last, got ServerMomentum, Momentum"
    for refuses in (work, encode_rules):
        with pytest.raises(InputError, match=message):
            refuses(wrong)
    with pytest.raises(InputError, match=message):
        decode_rules([*encode_rules(wrong[:1]), *encode_rules(wrong[1:])])


def test_no_rule_twice() -> None:
    with pytest.raises(InputError, match="rules: expected every rule at most once, got Momentum 2 times"):
        work([Momentum(0.9), WeightDecay(0.1), Momentum(0.5)])


# -- names -------------------------------------------------------------------------------------------------------------

CONSTANT = st.floats(0, 1e30)
CHAINS = st.tuples(
    st.permutations(
        [
            st.builds(WeightDecay, CONSTANT),
            st.builds(Proximal, CONSTANT),
            st.builds(Momentum, st.floats(0, 1, exclude_max=True), st.booleans()),
            st.just(ControlVariate()),
        ]
    ),
    st.integers(0, 4),
    st.lists(st.builds(ServerMomentum, CONSTANT, st.sampled_from(["before", "every_step"])), max_size=1),
).flatmap(lambda drawn: st.tuples(*drawn[0][: drawn[1]], *map(st.just, drawn[2])))


@given(CHAINS)
def test_rules_survive_the_way_through_json(rules: tuple[LocalRule, ...]) -> None:
    assert tuple(decode_rules(json.loads(json.dumps(encode_rules(rules))))) == rules


def test_golden_json() -> None:
    rules = [WeightDecay(0.0001), Momentum(0.9), ServerMomentum(0.9, "before")]
    golden = (
        '[{"rule": "weight_decay", "factor": 0.0001}, '
        '{"rule": "momentum", "factor": 0.9, "nesterov": false, "between": "reset"}, '
        '{"rule": "server_momentum", "beta": 0.9, "when": "before"}]'
    )
    assert json.dumps(encode_rules(rules)) == golden
    assert decode_rules(json.loads(golden.replace(', "between": "reset"', ""))) == rules  # as earlier programs wrote it


def test_what_has_a_default_may_be_left_out_and_integers_are_numbers() -> None:
    assert decode_rules([{"rule": "momentum", "factor": 0}]) == [Momentum(0.0)]
    assert decode_rules([]) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "rules: expected a list, got '{}'"),
        (["momentum"], r"rules\[0\]: expected an object, got 'momentum'"),
        ([{}], r"rules\[0\].rule: expected control_variate, momentum, proximal, server_momentum, weight_decay, got"),
        ([{"rule": ["momentum"]}], r"rules\[0\].rule: expected control_variate, .* got \"\['momentum'\]\""),
        ([{"rule": "adam"}], r"rules\[0\].rule: expected control_variate, .* got 'adam'"),
        ([{"rule": "proximal", "nu": 1}], r"rules\[0\] \(proximal\): expected only rule, mu, got 'nu'"),
        ([{"rule": "control_variate", "c": 1}], r"rules\[0\] \(control_variate\): expected only rule, origin, got 'c'"),
        (
            [{"rule": "control_variate", "origin": "mine"}],
            r"rules\[0\].origin: expected exchanged, own, got 'mine'",
        ),
        (
            [{"rule": "momentum", "factor": 0.9, "between": "lose"}],
            r"rules\[0\].between: expected reset, keep, average, got 'lose'",
        ),
        ([{"rule": "proximal"}], r"rules\[0\] \(proximal\): expected mu, got 'nothing'"),
        ([{"rule": "proximal", "mu": "1"}], r"rules\[0\].mu: expected a finite number, got '1'"),
        ([{"rule": "proximal", "mu": True}], r"rules\[0\].mu: expected a finite number, got 'True'"),
        ([{"rule": "proximal", "mu": None}], r"rules\[0\].mu: expected a finite number, got 'None'"),
        ([{"rule": "proximal", "mu": 10**400}], r"rules\[0\].mu: expected a finite number, got '1000"),
        ([{"rule": "proximal", "mu": float("nan")}], r"proximal.mu: expected a number in .* got nan"),
        ([{"rule": "proximal", "mu": -1}], r"proximal.mu: expected a number in .* got -1"),
        (
            [{"rule": "proximal", "mu": 1}, {"rule": "momentum", "factor": 0.9, "nesterov": 1}],
            r"rules\[1\].nesterov: expected true or false, got '1'",
        ),
        (
            [{"rule": "server_momentum", "beta": 1, "when": []}],
            r"rules\[0\].when: expected before, every_step, got '\[\]'",
        ),
        ([{"rule": "proximal", "mu": 1}] * 2, "every rule at most once, got Proximal 2 times"),
    ],
)
def test_json_that_is_no_rule(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_rules(data)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("sgd", None),
        ("momentum=0.9", Momentum(0.9)),
        ("nesterov=0.9", Momentum(0.9, nesterov=True)),
        ("weight_decay=1e-4", WeightDecay(1e-4)),
        (" proximal = 0.01 ", Proximal(0.01)),
    ],
)
def test_words_of_the_command_line(text: str, rule: LocalRule | None) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adam=1", "rule 'adam=1': expected sgd, momentum=NUMBER, nesterov=NUMBER, proximal=NUMBER, weight_decay="),
        ("", "rule '': expected sgd, momentum=NUMBER"),
        ("sgd=1", "rule 'sgd=1': expected sgd, momentum=NUMBER"),
        ("momentum", "rule 'momentum': expected momentum=NUMBER, such as momentum=0.01"),
        ("momentum=", "rule 'momentum=': expected momentum=NUMBER"),
        ("momentum=0.9=1", "rule 'momentum=0.9=1': expected momentum=NUMBER"),
        ("momentum=__import__('os')", "expected momentum=NUMBER"),
        ("momentum=1.5", r"momentum.factor: expected a number in \[0, 1\), got 1.5"),
        ("proximal=nan", "proximal.mu: expected a number in .* got nan"),
    ],
)
def test_words_that_are_no_rule(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_rule(text)


def test_public_names_are_sorted() -> None:
    assert local.__all__ == sorted(local.__all__)
