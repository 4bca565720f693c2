"""Local rules by name: JSON, and words of the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import federation.axes.local as local
from federation.axes.local import (
    ControlVariate,
    LocalRule,
    Momentum,
    Proximal,
    ServerMomentum,
    WeightDecay,
    decode_rules,
    encode_rules,
    parse_rule,
)
from federation.errors import InputError

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
