"""Choices on an axis by name: a table of JSON or TOML with the name and the constants. The lists are closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from federation.decode import decode
from federation.errors import InputError

KEY = "rule"


def decode_choice(kinds: Mapping[str, type[Any]], table: Any, where: str, default: str) -> Any:
    """The choice that a table describes; what is not given has its default."""
    if not isinstance(table, Mapping):
        raise InputError(f"{where}: expected a table, got {str(table)[:80]!r}")
    name = table.get(KEY, default)
    if not isinstance(name, str) or name not in kinds:
        raise InputError(f"{where}.{KEY}: expected {', '.join(kinds)}, got {str(name)[:80]!r}")
    constants = [field.name for field in fields(kinds[name])]
    for key in table:
        if key not in (KEY, *constants):
            known = f"has only {', '.join(constants)}" if constants else "has none"
            raise InputError(f"{where}.{key}: not a constant of the rule {name!r}, which {known}")
    return decode(kinds[name], {key: value for key, value in table.items() if key != KEY}, where, defaults=True)


def encode_choice(kinds: Mapping[str, type[Any]], choice: Any) -> dict[str, Any]:
    """The table of a choice."""
    name = next(name for name, kind in kinds.items() if type(choice) is kind)
    return {KEY: name, **asdict(choice)}
