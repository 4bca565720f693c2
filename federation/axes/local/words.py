"""Local rules as words of the command line: `momentum=0.9`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from federation.axes.local.adam import Adam, AdamW
from federation.axes.local.momentum import Momentum
from federation.axes.local.proximal import Proximal
from federation.axes.local.rule import LocalRule
from federation.axes.local.weight_decay import WeightDecay
from federation.errors import FieldError, InputError

# Rules that need vectors from the server are no choice of their own: an algorithm brings them.
_WORDS: Final[Mapping[str, Callable[[float], LocalRule]]] = {
    "adamw": lambda decay: AdamW(decay=decay),
    "momentum": Momentum,
    "nesterov": lambda factor: Momentum(factor, nesterov=True),
    "proximal": Proximal,
    "weight_decay": WeightDecay,
}


_BARE: Final[Mapping[str, LocalRule | None]] = {"sgd": None, "adam": Adam(), "adamw": AdamW()}


def parse_rule(text: str) -> LocalRule | None:
    """Read a rule: `momentum=0.9`, `nesterov=0.9`, `proximal=0.01`, `weight_decay=1e-4`, `adam`, `adamw=0.01`.

    `adamw` has its usual decay; `sgd` is no rule at all: None.
    """
    if text.strip() in _BARE:
        return _BARE[text.strip()]
    word, _, number = (part.strip() for part in text.partition("="))
    build = _WORDS.get(word)
    if build is None:
        expected = ", ".join(f"{known}=NUMBER" for known in _WORDS)
        raise InputError(f"rule {text!r}: expected {', '.join(_BARE)}, {expected}")
    try:
        constant = float(number)
    except ValueError:
        raise InputError(f"rule {text!r}: expected {word}=NUMBER, such as {word}=0.01") from None
    try:
        return build(constant)
    except FieldError as error:
        raise error.below(word) from None
