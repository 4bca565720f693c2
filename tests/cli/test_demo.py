"""`embrace demo`: the whole chain, and both devices learn something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Embrace = Callable[..., Any]


def test_both_devices_learn(embrace: Embrace) -> None:
    answer = embrace("demo", "--json")
    assert (answer.code, answer.err) == (0, "")
    strong, weak = answer.json["training"]
    assert (strong["tier"], strong["boundary"], weak["tier"], weak["boundary"]) == ("strong", "conv1", "weak", "dense")
    assert strong["accuracy_before"] < 0.3 < 0.85 < strong["accuracy_after"]
    assert weak["accuracy_before"] == strong["accuracy_after"] < weak["accuracy_after"]
    assert weak["trained"] < strong["trained"] and weak["memory"] < strong["memory"]
    assert strong["stored"] == 0 < weak["stored"]
    assert answer.json["verify"]["passed"]


def test_the_printed_demo_shows_every_stage(embrace: Embrace) -> None:
    answer = embrace("demo", "--epochs", 1)
    assert answer.code == 0
    for text in ("1. embrace export", "2. embrace inspect", "3. embrace verify", "PASS", "4. two devices", "held-out"):
        assert text in answer.out
