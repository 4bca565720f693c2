"""Rules by name: as JSON in a task, as a word on the command line. The list is closed, nothing is looked up elsewhere.

[{"rule": "weight_decay", "factor": 0.0001}, {"rule": "momentum", "factor": 0.9, "nesterov": false}]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Final, Literal, get_args, get_origin

from federation.axes.local.chain import check_rules
from federation.axes.local.control_variate import ControlVariate
from federation.axes.local.momentum import Momentum
from federation.axes.local.proximal import Proximal
from federation.axes.local.rule import LocalRule
from federation.axes.local.server_momentum import ServerMomentum
from federation.axes.local.weight_decay import WeightDecay
from federation.decode import hints_of
from federation.errors import InputError

_RULES: Final[Mapping[str, Any]] = {
    "control_variate": ControlVariate,
    "momentum": Momentum,
    "proximal": Proximal,
    "server_momentum": ServerMomentum,
    "weight_decay": WeightDecay,
}
_NAMES: Final[Mapping[Any, str]] = {kind: name for name, kind in _RULES.items()}

# On the command line. Rules that need vectors from the server are no choice of their own: an algorithm brings them.
_WORDS: Final[Mapping[str, Callable[[float], LocalRule]]] = {
    "momentum": Momentum,
    "nesterov": lambda factor: Momentum(factor, nesterov=True),
    "proximal": Proximal,
    "weight_decay": WeightDecay,
}


def encode_rules(rules: Sequence[LocalRule]) -> list[dict[str, Any]]:
    """Rules as JSON objects, in their order."""
    check_rules(rules)
    found = []
    for rule in rules:
        name = _NAMES.get(type(rule))
        if name is None:
            raise InputError(f"{type(rule).__name__} has no name and cannot be sent; rules are {_listed(_RULES)}")
        found.append({"rule": name, **vars(rule)})
    return found


def decode_rules(data: object) -> list[LocalRule]:
    """Rules from parsed JSON; an InputError names the field that is wrong. What has a default may be left out."""
    if not isinstance(data, list):
        raise _unexpected("rules", "a list", data)
    rules = [_decode(item, f"rules[{index}]") for index, item in enumerate(data)]
    check_rules(rules)
    return rules


def parse_rule(text: str) -> LocalRule | None:
    """A rule as written on a command line: `momentum=0.9`, `nesterov=0.9`, `proximal=0.01`, `weight_decay=1e-4`.

    `sgd` is no rule at all: None.
    """
    if text.strip() == "sgd":
        return None
    word, _, number = (part.strip() for part in text.partition("="))
    build = _WORDS.get(word)
    if build is None:
        expected = ", ".join(f"{known}=NUMBER" for known in _WORDS)
        raise InputError(f"rule {text!r}: expected sgd, {expected}")
    try:
        constant = float(number)
    except ValueError:
        raise InputError(f"rule {text!r}: expected {word}=NUMBER, such as {word}=0.01") from None
    return build(constant)


def _decode(item: object, where: str) -> LocalRule:
    if not isinstance(item, dict):
        raise _unexpected(where, "an object", item)
    name = item.get("rule")
    if not isinstance(name, str) or name not in _RULES:
        raise _unexpected(f"{where}.rule", _listed(_RULES), name)
    kind = _RULES[name]
    known = {field.name: field.default is MISSING for field in fields(kind)}
    given = {key: value for key, value in item.items() if key != "rule"}
    if unknown := [str(key) for key in given if key not in known]:
        raise _unexpected(f"{where} ({name})", f"only {_listed(['rule', *known])}", _listed(unknown))
    if missing := [key for key, required in known.items() if required and key not in given]:
        raise _unexpected(f"{where} ({name})", _listed(missing), "nothing")
    hints = hints_of(kind)
    rule: LocalRule = kind(**{key: _value(hints[key], value, f"{where}.{key}") for key, value in given.items()})
    return rule


def _value(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise _unexpected(where, _listed(get_args(hint)), value)
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise _unexpected(where, "true or false", value)
        return value
    # Integers of JSON have no limit; those that no float can hold are refused here, NaN by the rule itself.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
        raise _unexpected(where, "a finite number", value)
    return float(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _unexpected(where: str, expected: str, got: object) -> InputError:
    return InputError(f"{where}: expected {expected}, got {str(got)[:80]!r}")
