"""Rules of the server's step by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from federation.axes.names import decode_choice, encode_choice
from federation.axes.serve.adaptive import Adagrad, Adam, Yogi
from federation.axes.serve.average import Average
from federation.axes.serve.momentum import ServerHeavyBall
from federation.axes.serve.rule import ServeRule

SERVE: Final[Mapping[str, type[Any]]] = {
    "average": Average,
    "momentum": ServerHeavyBall,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
}


def decode_serve(table: Any) -> ServeRule:
    choice: ServeRule = decode_choice(SERVE, table, "serve", "average")
    return choice


def encode_serve(rule: ServeRule) -> dict[str, Any]:
    return encode_choice(SERVE, rule)
