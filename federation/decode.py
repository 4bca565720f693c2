"""Values from parsed JSON or TOML and back, following the annotations of dataclasses.

Job files, tasks, settings, profiles and manifests are all read here. A dataclass is a table with a key for each field.
A choice on an axis is a table with the name of its rule and the rule's constants, {"rule": "proximal", "mu": 0.1}; the
names of an axis are a closed list. An error is a FieldError, whose path leads to the value that is wrong.
"""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from federation.errors import FieldError, InputError

T = TypeVar("T")
Resolve = Callable[[str], type[Any]]  # the class that 'file.py:Name' stands for
# Metadata of a field that was added to a format later: it may be absent, and then has its default.
ABSENT = types.MappingProxyType({"absent": True})
RULE: Final = "rule"  # the key with a rule's name
_REFERENCE = "__rule_reference__"  # of a class of a user's own: how a job file named it


@dataclass(frozen=True, eq=False)
class Axis:
    """The rules of one axis by name. A field `Annotated[Sync, SYNC]` holds one of them, or a rule of the user's own."""

    kinds: Mapping[str, type[Any]]
    default: str | None = None  # the rule of a table that names none


def decode(kind: type[T], value: Any, where: str = "", *, defaults: bool = False, resolve: Resolve | None = None) -> T:
    """Build `kind`; `where` is what the value is called in errors.

    `defaults`: a field that is not given has its default; else every field must be given. `resolve` finds rules of the
    user's own; without it they are refused, as a coordinator and its devices do.
    """
    try:
        return typing.cast(T, _codec(kind).read(value, _Reading(defaults, resolve)))
    except InputError as error:
        raise _at(error, *([where] if where else [])) from None


def encode(value: Any, *, own_rules: bool = False) -> Any:
    """Turn a dataclass into what JSON can say and `decode` reads.

    `own_rules`: name also rules that were written in Python, as module:Class, for processes that can import them.
    """
    return _codec(type(value)).write(value, own_rules)


@dataclass(frozen=True)
class _Reading:
    defaults: bool
    resolve: Resolve | None


class _Codec(Protocol):
    """Reads and writes what one annotation allows."""

    def read(self, value: Any, reading: _Reading) -> Any: ...

    def write(self, value: Any, own_rules: bool) -> Any: ...


def _make_codec(hint: Any) -> _Codec:
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _Table(hint)
    if origin is Annotated and isinstance(args[1], Axis):
        return _Choice(*args)
    if origin is tuple and args[1:] == (...,):
        return _List(_codec(args[0]))
    if origin in (dict, Mapping):
        return _Dict(_codec(args[1]))
    if origin is Literal:
        return _Literal(args)
    if origin in (types.UnionType, typing.Union):
        return _Union(args)
    if hint in (Any, bool, float, int, str):
        return _Plain(hint)
    raise InputError(f"a field of the type {hint} cannot be read from a table")


_codec: Callable[[Any], _Codec] = cache(_make_codec)  # asking for annotations takes longer than decoding


class _Plain:
    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def read(self, value: Any, reading: _Reading) -> Any:
        kind = self.kind
        if kind is float:
            _expect(type(value) in (int, float), "a number", value)
            _expect(type(value) is float or abs(value) <= sys.float_info.max, "a finite number", value)
            return float(value)
        if kind is not Any:
            _expect(type(value) is kind, "true or false" if kind is bool else kind.__name__, value)
        if kind is int:
            _expect(abs(value) < 2**62, "an integer below 2^62", value)
        return value

    def write(self, value: Any, own_rules: bool) -> Any:
        return value


class _Literal:
    def __init__(self, words: tuple[Any, ...]) -> None:
        self.words = words

    def read(self, value: Any, reading: _Reading) -> Any:
        _expect(value in self.words, " or ".join(map(repr, self.words)), value)
        return value

    def write(self, value: Any, own_rules: bool) -> Any:
        return value


class _Union:
    """X | None; or float | int, where 1.0 and 1 mean different things."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self.optional = types.NoneType in kinds
        self.first = _codec(kinds[0])
        self.integer = _codec(int) if {float, int} <= set(kinds) else self.first

    def read(self, value: Any, reading: _Reading) -> Any:
        if value is None and self.optional:
            return None
        return (self.integer if type(value) is int else self.first).read(value, reading)

    def write(self, value: Any, own_rules: bool) -> Any:
        return None if value is None else self.first.write(value, own_rules)


class _List:
    def __init__(self, item: _Codec) -> None:
        self.item = item

    def read(self, value: Any, reading: _Reading) -> Any:
        _expect(isinstance(value, (list, tuple)), "a list", value)
        return tuple(_inside(index, self.item, item, reading) for index, item in enumerate(value))

    def write(self, value: Any, own_rules: bool) -> Any:
        return [self.item.write(item, own_rules) for item in value]


class _Dict:
    def __init__(self, item: _Codec) -> None:
        self.item = item

    def read(self, value: Any, reading: _Reading) -> Any:
        _expect(isinstance(value, Mapping), "an object", value)
        return {str(key): _inside(str(key), self.item, item, reading) for key, item in value.items()}

    def write(self, value: Any, own_rules: bool) -> Any:
        return {key: self.item.write(item, own_rules) for key, item in value.items()}


class _Table:
    """A dataclass. A choice in a field called `rule` has its constants in the same table."""

    def __init__(self, kind: Any) -> None:
        hints = get_type_hints(kind, include_extras=True)
        known = [field for field in fields(kind) if field.init]
        self.kind = kind
        self.codecs = {field.name: _codec(hints[field.name]) for field in known}
        self.required = [field.name for field in known if not _has_default(field)]
        self.not_absent = [field.name for field in known if field.metadata != ABSENT]
        choice = self.codecs.get(RULE)
        self.choice = choice if isinstance(choice, _Choice) else None

    def read(self, value: Any, reading: _Reading) -> Any:
        if isinstance(value, self.kind):  # made in Python
            return value
        if self.choice is None:
            _expect(isinstance(value, Mapping), "an object", value)
            return self.build(value, reading)
        value = self.choice.table(value)
        own = {key: value[key] for key in self.codecs if key in value and key != RULE}
        rest = {key: item for key, item in value.items() if key not in own}
        return self.build(own, reading, rule=self.choice.read_table(rest, reading, self.codecs))

    def build(self, value: Mapping[str, Any], reading: _Reading, **read: Any) -> Any:
        """Make the dataclass of a table and of fields that were read already."""
        for key in value:
            if key not in self.codecs:
                near = _hint(key, self.codecs)
                raise FieldError(str(key), f"no such key; expected {', '.join(sorted(self.codecs))}{near}")
        for name in self.required if reading.defaults else self.not_absent:
            if name not in value and name not in read:
                raise FieldError(name, "required, and not given")
        for key, item in value.items():
            read[key] = _inside(key, self.codecs[key], item, reading)
        return self.kind(**read)

    def write(self, value: Any, own_rules: bool) -> Any:
        found: dict[str, Any] = {}
        for name, codec in self.codecs.items():
            written = codec.write(getattr(value, name), own_rules)
            found |= written if codec is self.choice else {name: written}
        return found


class _Choice:
    """A rule of an axis."""

    def __init__(self, base: Any, axis: Axis) -> None:
        self.base = base
        self.axis = axis
        self.names = {kind: name for name, kind in axis.kinds.items()}

    def read(self, value: Any, reading: _Reading) -> Any:
        return self.read_table(self.table(value), reading)

    def table(self, value: Any) -> Mapping[str, Any]:
        """Check that a value is a table; a rule that was made in Python is one by itself."""
        if _is_made(value):
            return {RULE: value}
        _expect(isinstance(value, Mapping), "a table", value)
        found: Mapping[str, Any] = value
        return found

    def read_table(self, table: Mapping[str, Any], reading: _Reading, others: Collection[str] = ()) -> Any:
        """Build the rule; `others` are the keys that stand in the same table and are not the rule's."""
        rule, constants = table.get(RULE, self.axis.default), {key: table[key] for key in table if key != RULE}
        made = _is_made(rule)
        kind = type(rule) if made else self._kind(rule, reading)
        if kind not in self.names:
            self._check(kind)
        codec = _codec(kind)
        assert isinstance(codec, _Table)
        known = [] if made else list(codec.codecs)
        for key in constants:
            if key not in known:
                name = self.names.get(kind, kind.__name__)
                only = f"has only {', '.join(known)}" if known else "has none"
                near = _hint(key, [*known, *others])
                raise FieldError(str(key), f"not a constant of the rule {name!r}, which {only}{near}")
        return rule if made else codec.build(constants, _Reading(True, reading.resolve))

    def _kind(self, name: Any, reading: _Reading) -> type[Any]:
        if isinstance(name, str) and name in self.axis.kinds:
            return self.axis.kinds[name]
        unknown = f"expected {', '.join(self.axis.kinds)}, got {shown(name)}"
        if not isinstance(name, str) or ":" not in name:
            raise FieldError(RULE, f"{unknown}{_hint(name, self.axis.kinds)}")
        if reading.resolve is None:
            raise FieldError(RULE, f"{unknown}; a coordinator and its devices run no code of a job, simulations do")
        try:
            kind = reading.resolve(name)
        except InputError as error:
            raise _at(error, RULE) from None
        if kind not in self.names:
            setattr(kind, _REFERENCE, name)
        return kind

    def _check(self, kind: Any) -> None:
        """Refuse a class that is no rule of this axis."""
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise FieldError(RULE, f"expected a frozen dataclass, and {kind.__name__} is none")
        if not issubclass(kind, self.base):
            raise FieldError(RULE, f"expected a class derived from {self.base.__name__}, and {kind.__name__} is none")
        if lacking := sorted(kind.__abstractmethods__):
            raise FieldError(RULE, f"{kind.__name__} lacks {', '.join(lacking)}")

    def write(self, value: Any, own_rules: bool) -> Any:
        kind = type(value)
        name = self.names.get(kind) or vars(kind).get(_REFERENCE)
        if name is None and not own_rules:
            raise InputError(
                f"{kind.__name__} is a rule of your own: a coordinator's devices cannot run its code, simulations can; "
                f"expected one of {', '.join(self.axis.kinds)}"
            )
        if name is None:
            self._check(kind)
            name = f"{kind.__module__}:{kind.__qualname__}"
        return {RULE: name, **_codec(kind).write(value, own_rules)}


def _inside(key: str | int, codec: _Codec, value: Any, reading: _Reading) -> Any:
    try:
        return codec.read(value, reading)
    except InputError as error:
        raise _at(error, key) from None


def _at(error: InputError, *keys: str | int) -> FieldError:
    """Return an error with the keys that lead to where it was raised."""
    return (error if isinstance(error, FieldError) else FieldError((), str(error))).below(*keys)


def _expect(good: bool, expected: str, got: Any) -> None:
    if not good:
        raise FieldError((), f"expected {expected}, got {shown(got)}")


def shown(value: Any) -> str:
    """Show what was found, in quotes and not all of it if it is long."""
    try:
        return repr(str(value)[:80])
    except ValueError:  # Python writes no integers of thousands of digits
        return "an integer of very many digits"


def _hint(word: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word[:80], list(known), 1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_made(value: Any) -> bool:
    """Whether a value is a dataclass already; no JSON is."""
    return is_dataclass(value) and not isinstance(value, type)


def _has_default(known: Field[Any]) -> bool:
    return known.default is not MISSING or known.default_factory is not MISSING
