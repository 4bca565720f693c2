"""Local rules as words of the command line."""

from __future__ import annotations

import pytest

import federation.axes.local as local
from federation.axes.local import Adam, AdamW, LocalRule, Momentum, Proximal, WeightDecay, parse_rule
from federation.errors import InputError


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("sgd", None),
        ("adam", Adam()),
        ("adamw", AdamW()),
        ("adamw=0.1", AdamW(decay=0.1)),
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
        ("adam=1", "rule 'adam=1': expected sgd, adam, adamw, adamw=NUMBER, momentum=NUMBER, "),
        ("", "rule '': expected sgd, adam"),
        ("sgd=1", "rule 'sgd=1': expected sgd, adam"),
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
    assert local.__all__ == sorted(local.__all__, key=lambda name: (not name.isupper(), name))  # as ruff sorts them
