"""The server's step against closed forms and the published listings; statistics are means, whatever the rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation import server_step as stepping
from federation.accumulate import Accumulator
from federation.algorithm import Algorithm
from federation.axes.local import ControlVariate, Momentum
from federation.axes.serve import Adagrad, Adam, Average, RoundFacts, ServerHeavyBall, ServeRule, Yogi
from federation.decode import decode, encode
from federation.errors import InputError
from federation.job import Serve
from federation.layout import MODEL
from federation.region import Region, box, of_layers, of_parameters, whole
from federation.server_step import Change, mean_moves, server_step, spread, track_step
from federation.space import Parameter, ParameterSpace, Vector
from tests.oracles import fedopt

SPACE = ParameterSpace(
    [
        [Parameter("a", "weight", (5, 2)), Parameter("a.var", "statistic", (3,))],
        [Parameter("b", "weight", (4,))],
    ]
)
FACTS = RoundFacts(0.1)
RULES: list[ServeRule] = [
    Average(0.5),
    ServerHeavyBall(0.9, 0.7),
    Adam(0.1),
    Yogi(0.1, 0.8, 0.95, 0.01),
    Adagrad(0.1, initial=0.5),
]


def total_of(rows: list[tuple[Region, Vector, float]]) -> Accumulator:
    total = Accumulator(SPACE, max_value=100, max_weight=100)
    for region, values, weight in rows:
        done, blocks = 0, []
        for run in region.runs:
            blocks.append((run, values[done : done + run.size]))
            done += run.size
        squares = {p.name: float(np.square(weight_of(region, values, p.name)).sum()) for p in weights_of(region)}
        total.fold(region, blocks, weight, squares, largest=float(np.abs(values).max(initial=0)))
    return total


def weights_of(region: Region) -> list[Parameter]:
    return [p for p in region.space if p.kind == "weight"]


def weight_of(region: Region, values: Vector, name: str) -> Vector:
    """What a region has of a weight, as doubles."""
    return (region & of_parameters(SPACE, {name})).inside(region).gather(values).astype(np.float64)


def after(before: dict[str, Vector], changes: Iterator[Change]) -> dict[str, Vector]:
    found = {name: vector.copy() for name, vector in before.items()}
    for name, at, values in changes:
        found[name][at] = values
    return found


def beginning(algorithm: Algorithm) -> dict[str, Vector]:
    model = np.random.default_rng(0).normal(size=SPACE.size).astype(np.float32)
    return {MODEL: model, **algorithm.first_vectors(SPACE.size)}


STATISTICS = np.concatenate([np.zeros(10, bool), np.ones(3, bool), np.zeros(4, bool)])


@pytest.mark.parametrize("block", [3, 1 << 14])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_statistics_are_the_mean_of_what_devices_saw(
    rule: ServeRule, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "BLOCK", block)
    values = beginning(Algorithm(serve=rule))
    rng = np.random.default_rng(1)
    for _ in range(3):
        rows = [(whole(SPACE), rng.normal(size=17).astype(np.float32), 1.0) for _ in range(2)]
        total = total_of(rows)
        mean = (rows[0][1].astype(np.float64) + rows[1][1]) / 2
        new = after(values, server_step(rule, mean_moves(total, SPACE), values, FACTS))
        np.testing.assert_allclose(new[MODEL][STATISTICS], (values[MODEL] + mean)[STATISTICS], rtol=2e-7)
        assert (np.abs(new[MODEL] - values[MODEL] - mean)[~STATISTICS] > 1e-6).all()  # weights have another step
        for name in rule.vectors:
            assert (new[name][STATISTICS] == values[name][STATISTICS]).all()
        values = new


@pytest.mark.parametrize(("kind", "rule"), [("adam", Adam), ("yogi", Yogi), ("adagrad", Adagrad)])
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(1e-3, 1),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 1),
    tau=st.floats(1e-4, 0.1),
    initial=st.none() | st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_adaptive_servers_against_the_listing(
    kind: str, rule: type[Adam], seed: int, rate: float, beta1: float, beta2: float, tau: float, initial: float | None
) -> None:
    """The oracle's devices take one step of rate 1 along a gradient that is minus the update."""
    deltas = np.random.default_rng(seed).normal(size=(4, 6))
    start = [{"w": np.random.default_rng(seed + 1).normal(size=6)}]
    rounds = fedopt.run(
        kind,
        start,
        lambda device, model, step: [{"w": -deltas[step]}],
        [[0]] * 4,
        1,
        1.0,
        rate,
        beta1,
        beta2,
        tau,
        initial,
    )
    made = rule(rate, beta1, beta2, tau, initial)
    x, state = start[0]["w"].copy(), {name: np.full(6, made.first(name)) for name in made.vectors}
    for delta, expected in zip(deltas, rounds):
        x = x + made.step(delta.copy(), state, FACTS)
        np.testing.assert_allclose(x, expected.model[0]["w"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(state["first_moment"], expected.first[0]["w"], rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(state["second_moment"], expected.second[0]["w"], rtol=1e-9, atol=1e-15)


@given(factor=st.floats(0, 0.99), rate=st.floats(0.01, 2), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_server_momentum_is_a_sum_of_all_updates(factor: float, rate: float, seed: int) -> None:
    """After n rounds x has moved by α Σ_k Δ_k (1 + μ + ... + μ^(n-1-k))."""
    deltas = np.random.default_rng(seed).normal(size=(5, 3))
    rule, x, state = ServerHeavyBall(factor, rate), np.zeros(3), {"server_momentum": np.zeros(3)}
    for delta in deltas:
        x += rule.step(delta.copy(), state, FACTS)
    times = [sum(factor**power for power in range(5 - k)) for k in range(5)]
    np.testing.assert_allclose(x, rate * (np.array(times)[:, None] * deltas).sum(axis=0), rtol=1e-9, atol=1e-12)


def test_when_the_local_rate_changes_the_gradients_in_the_momentum_stay() -> None:
    """m is in units of gradients: with rates η_k and Δ_k = -η_k g_k the paper's x ← x - η_k m_k comes out."""
    rates, gradients, factor = [0.1, 0.1, 0.02, 0.4], [1.0, -2.0, 3.0, 0.5], 0.9
    rule, state, x, m, expected = ServerHeavyBall(factor), {"server_momentum": np.zeros(1)}, 0.0, 0.0, 0.0
    for rate, gradient in zip(rates, gradients):
        x += float(rule.step(np.array([-rate * gradient]), state, RoundFacts(rate))[0])
        m = factor * m + gradient
        expected -= rate * m
        assert x == pytest.approx(expected, rel=1e-12)


def test_degenerate_cases() -> None:
    move = np.array([1.0, -2.0])
    assert ServerHeavyBall(0.0, 0.5).step(move.copy(), {"server_momentum": np.ones(2)}, FACTS).tolist() == [0.5, -1.0]
    assert Average().step(move.copy(), {}, FACTS).tolist() == [1.0, -2.0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_what_nobody_trained_stays_bit_by_bit_and_its_state_too(rule: ServeRule) -> None:
    algorithm = Algorithm(serve=rule)
    values = {name: v + np.float32(0.125) for name, v in beginning(algorithm).items()}
    narrow = box(SPACE, [[(3, 1), (2,)], [(2,)]])
    total = total_of([(narrow, np.full(narrow.size, 0.5, np.float32), 2.0)])
    new = after(values, server_step(rule, mean_moves(total, SPACE), values, FACTS))
    trained = np.zeros(SPACE.size, bool)
    trained[[0, 2, 4, 10, 11, 13, 14]] = True
    for name, vector in values.items():
        assert (new[name][~trained] == vector[~trained]).all()
    assert (new[MODEL][trained] != values[MODEL][trained]).all()


def test_scaffolds_control_is_divided_by_all_devices_and_has_no_statistics() -> None:
    algorithm = Algorithm((ControlVariate(),))
    assert algorithm.tracks == algorithm.vectors == ("control",)
    values = beginning(algorithm)
    rows = [(of_layers(SPACE, [0]), np.full(13, v, np.float32), 1.0) for v in (1.0, 3.0)]
    new = after(values, track_step(ControlVariate(), "control", total_of(rows), SPACE, values, 8))["control"]
    assert new.tolist() == [0.5] * 10 + [0.0] * 7


def test_averaged_momenta_are_the_mean_and_replace() -> None:
    algorithm = Algorithm((Momentum(0.9, between="average"),))
    values = {**beginning(algorithm), "momentum": np.full(17, 7, np.float32)}
    rows = [(of_layers(SPACE, [0]), np.full(13, v, np.float32), 1.0) for v in (1.0, 4.0)]
    new = after(values, track_step(algorithm.rules[0], "momentum", total_of(rows), SPACE, values, 8))["momentum"]
    assert new.tolist() == [2.5] * 10 + [7.0] * 7


@given(seed=st.integers(0, 1000), devices=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_the_spread_is_the_mean_squared_distance_from_the_mean(seed: int, devices: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(devices, 17)).astype(np.float32)
    total = total_of([(whole(SPACE), row, 1.0) for row in rows])
    for layer, where in enumerate((slice(0, 10), slice(13, 17))):
        mine = rows[:, where].astype(np.float64)
        expected = np.square(mine - mine.mean(axis=0)).sum() / devices
        assert spread(total, of_layers(SPACE, [layer])) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    both = sum(spread(total, of_layers(SPACE, [layer])) or 0.0 for layer in range(2))
    assert spread(total, whole(SPACE)) == pytest.approx(both, rel=1e-12)
    assert spread(Accumulator(SPACE, max_value=1, max_weight=1), whole(SPACE)) is None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rules_survive_the_way_through_a_table(rule: ServeRule) -> None:
    assert decode(Serve, encode(Serve(rule))) == Serve(rule)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rule": "sgd"}, "^serve.rule: expected average, momentum, adam, yogi, adagrad, got 'sgd'"),
        ({"rate": 0}, r"^serve.rate: expected a number in \(0, 1000\], got 0"),
        ({"rate": float("nan")}, "^serve.rate: expected a number"),
        ({"rule": "momentum", "factor": 1}, r"^serve.factor: expected a number in \[0, 1\), got 1"),
        ({"rule": "adam", "beta1": 1}, r"^serve.beta1: expected a number in \[0, 1\), got 1"),
        ({"rule": "yogi", "beta2": 1.5}, r"^serve.beta2: expected a number in \[0, 1\], got 1.5"),
        ({"rule": "adagrad", "tau": 0}, r"^serve.tau: expected a number above 0 and below 10\^6, got 0"),
        ({"rule": "adam", "initial": -1}, r"^serve.initial: expected a number in \[0, 10\^6\), got -1"),
        (
            {"rule": "average", "factor": 0.9},
            "^serve.factor: not a constant of the rule 'average', which has only rate",
        ),
    ],
)
def test_tables_that_are_no_rule(table: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(Serve, table, "serve", defaults=True)
