"""How much an update counts, and how far it walked: against the coefficients of FedNova's paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.axes.local import LocalRule, Momentum, Proximal, WeightDecay
from federation.axes.weigh import Weigh, effective_steps
from tests.oracles import fednova


@given(steps=st.integers(1, 200), momentum=st.floats(0, 0.99))
@settings(max_examples=200, deadline=None)
def test_with_momentum(steps: int, momentum: float) -> None:
    expected = sum(fednova.coefficients(steps, momentum))
    assert effective_steps([Momentum(momentum)], steps, 0.1) == pytest.approx(expected, rel=1e-9)


@given(steps=st.integers(1, 200), rate=st.floats(1e-4, 0.5), mu=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_with_pull_back(steps: int, rate: float, mu: float) -> None:
    expected = sum(fednova.coefficients(steps, shrink=rate * mu))
    assert effective_steps([Proximal(mu)], steps, rate) == pytest.approx(expected, rel=1e-9)


def walked(rules: str, steps: int, momentum: float, pull: float) -> float:
    """A device whose gradient is always 1 and whose rate is 1, but for the pull: written out, step by step."""
    x = v = 0.0
    for _ in range(steps):
        g = 1.0 - pull * x
        v = momentum * v + g
        x += g + momentum * v if rules == "nesterov" else v
    return x


@given(steps=st.integers(1, 100), momentum=st.floats(0, 0.95), pull=st.floats(0, 0.05))
@settings(max_examples=200, deadline=None)
def test_with_both(steps: int, momentum: float, pull: float) -> None:
    found = effective_steps([Proximal(pull), Momentum(momentum)], steps, 1.0)
    assert found == pytest.approx(max(1.0, walked("heavy ball", steps, momentum, pull)), rel=1e-9)


@given(steps=st.integers(1, 100), momentum=st.floats(0, 0.95), pull=st.just(0.0) | st.floats(0, 0.05))
@settings(max_examples=200, deadline=None)
def test_with_nesterov(steps: int, momentum: float, pull: float) -> None:
    found = effective_steps([Proximal(pull), Momentum(momentum, nesterov=True)], steps, 1.0)
    assert found == pytest.approx(max(1.0, walked("nesterov", steps, momentum, pull)), rel=1e-9)


@pytest.mark.parametrize("rules", [[], [Momentum(0.0)], [Proximal(0.0)], [WeightDecay(0.1)]], ids=str)
def test_plain_steps_are_steps(rules: list[LocalRule]) -> None:
    assert effective_steps(rules, 17, 0.1) == pytest.approx(17.0, rel=1e-15)


def test_weights_and_lengths() -> None:
    assert (Weigh().weight(50), Weigh(by="samples").weight(50)) == (1.0, 50.0)
    assert Weigh().length([Momentum(0.9)], 10, 0.1) == 1.0
    assert Weigh(normalise=True).length([], 10, 0.1) == 10.0
