"""Dataclasses from parsed JSON or TOML, following their own annotations; an error names the field it is about."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from federation.errors import InputError

T = TypeVar("T")
# Metadata of a field that was added to a format later: it may be absent, and then has its default.
ABSENT = types.MappingProxyType({"absent": True})


def decode(kind: type[T], value: Any, where: str, error: type[InputError] = InputError, *, defaults: bool = False) -> T:
    """Build `kind`. `defaults`: a field that is not given has its default; else every field must be given."""
    return typing.cast(T, _Decoder(error, defaults).any(kind, value, where))


class _Decoder:
    def __init__(self, error: type[InputError], defaults: bool) -> None:
        self._error = error
        self._defaults = defaults

    def any(self, kind: Any, value: Any, where: str) -> Any:
        origin, args = get_origin(kind), get_args(kind)
        if is_dataclass(kind):
            return self._dataclass(kind, value, where)
        if origin is tuple:
            self._expect(isinstance(value, list), where, "a list", value)
            return tuple(self.any(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if origin is dict:
            self._expect(isinstance(value, dict), where, "an object", value)
            return {str(key): self.any(args[1], item, f"{where}.{key}") for key, item in value.items()}
        if origin is Literal:
            self._expect(value in args, where, " or ".join(map(repr, args)), value)
            return value
        if origin in (types.UnionType, typing.Union):
            return self._union(args, value, where)
        if kind is Any:
            return value
        if kind is float:
            self._expect(isinstance(value, (int, float)) and not isinstance(value, bool), where, "a number", value)
            return float(value)
        self._expect(type(value) is kind, where, kind.__name__, value)
        if kind is int:
            self._expect(abs(value) < 2**62, where, "an integer below 2^62", value)
        return value

    def _union(self, args: tuple[Any, ...], value: Any, where: str) -> Any:
        """X | None; or float | int, where 1.0 and 1 mean different things."""
        if value is None and types.NoneType in args:
            return None
        if {float, int} <= set(args) and type(value) is int:
            return self.any(int, value, where)
        return self.any(args[0], value, where)

    def _dataclass(self, kind: Any, value: Any, where: str) -> Any:
        self._expect(isinstance(value, dict), where, "an object", value)
        hints = hints_of(kind)
        known = {f.name: f for f in fields(kind) if f.init}
        unknown = sorted(set(value) - set(known))
        self._expect(not unknown, where, f"only the fields {', '.join(sorted(known))}", unknown)
        optional = {name for name, f in known.items() if f.metadata == ABSENT or (self._defaults and _has_default(f))}
        missing = sorted(set(known) - set(value) - optional)
        self._expect(not missing, where, f"the fields {', '.join(missing)}", "nothing")
        return kind(**{name: self.any(hints[name], value[name], f"{where}.{name}") for name in known if name in value})

    def _expect(self, good: bool, where: str, expected: str, got: Any) -> None:
        if not good:
            raise self._error(f"{where}: expected {expected}, got {str(got)[:80]!r}")


def _has_default(known: Field[Any]) -> bool:
    return known.default is not MISSING or known.default_factory is not MISSING


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Annotations are text until somebody asks; asking takes longer than decoding."""
    return get_type_hints(kind)
