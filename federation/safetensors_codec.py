"""Write and read the header of a safetensors file: of weights, of updates, of what a device keeps.

    8 bytes   length of the header, little-endian
    header    JSON: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, blanks at its end;
              "__metadata__" -> {key: text}, if there are notes
    data      little-endian, one tensor behind the other; offsets are bytes and count from here

Weights and updates are float32 (F32); samples may have other types.

Tensors are written in the order in which they are given, with blanks so that the data begins at a multiple of some
bytes. The safetensors library sorts by name: any order can be read that leaves no holes. A header may come from
anywhere. Its length is checked before it is read, and then there is exactly one right entry for every tensor.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from federation.errors import InputError

DTYPE = "F32"
ITEM_BYTES = {"F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}  # by the format's names
NOTES = "__metadata__"
PREFIX = 8  # bytes in front of the header
MAX_DIMENSIONS = 32


class SafetensorsError(InputError):
    """A header that is not what it has to be."""


@dataclass(frozen=True)
class Header:
    """What a header says."""

    offsets: Mapping[str, int]  # where each tensor begins in the data, in bytes; in the order of the data
    shapes: Mapping[str, Sequence[int]]
    size: int  # of the data, in bytes
    notes: Mapping[str, str]
    dtypes: Mapping[str, str]


def encode_header(
    tensors: Iterable[tuple[str, Sequence[int]]],
    alignment: int,
    notes: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> bytes:
    """Write everything in front of the data: the length, then JSON padded to a multiple of `alignment` bytes."""
    dtypes = dtypes or {}
    entries: dict[str, object] = {} if notes is None else {NOTES: dict(notes)}
    end = 0
    for name, shape in tensors:
        if name == NOTES or name in entries:
            raise InputError(f"a tensor cannot be called {name!r}: the name has a meaning or is taken")
        dtype = dtypes.get(name, DTYPE)
        begin, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = _entry(dtype, shape, begin, end)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX + len(text)) % alignment)
    return len(text).to_bytes(PREFIX, "little") + text


def header_length(prefix: bytes | bytearray | memoryview, most: int) -> int:
    """Read how long the header is; refuse one that is longer than `most`."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) != PREFIX or not 2 <= length <= most:
        raise SafetensorsError(f"the header is said to have {length} bytes; expected from 2 to {most}")
    return length


def decode_header(
    text: bytes | bytearray | memoryview,
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    max_tensors: int = 10_000,
    max_name_length: int = 512,
    any_dtype: bool = False,
) -> Header:
    """Read a header and check all of it. With `shapes`, the tensors have to be these; else the header names them."""
    entries, notes = _parse(text)
    if len(entries) > max_tensors or max(map(len, entries), default=0) > max_name_length:
        raise SafetensorsError(f"more than {max_tensors} tensors, or a name above {max_name_length} characters")
    if shapes is None:
        shapes = {name: _shape(name, entry) for name, entry in entries.items()}
    elif shapes.keys() != entries.keys():
        missing, extra = sorted(shapes.keys() - entries.keys())[:3], sorted(entries.keys() - shapes.keys())[:3]
        raise SafetensorsError(f"the header lacks the names {missing}, and those of {extra} are not expected")
    # The claimed offsets give the order of the tensors, and the order gives the only right entries.
    try:
        order = sorted(shapes, key=lambda name: entries[name]["data_offsets"])
    except (TypeError, LookupError, RecursionError):
        raise SafetensorsError("the header must give every tensor two integers as its data_offsets") from None
    offsets, dtypes, end = {}, {}, 0
    for name in order:
        entry = entries[name]
        told = entry.get("dtype") if any_dtype else None
        dtypes[name] = told if isinstance(told, str) and told in ITEM_BYTES else DTYPE
        begin, end = end, end + ITEM_BYTES[dtypes[name]] * math.prod(shapes[name])
        expected = _entry(dtypes[name], shapes[name], begin, end)
        # JSON's true is no integer, although Python's is: seen only once the structure is known to be right.
        if entry != expected or bool in map(type, (*entry["shape"], *entry["data_offsets"])):
            raise SafetensorsError(f"{name!r} is described as {reprlib.repr(entry)}; expected {expected}")
        offsets[name] = begin
    return Header(offsets, shapes, end, notes, dtypes)


def _entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _parse(text: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, str]]:
    """Read (what is said of each tensor, notes)."""
    hooks: dict[str, Any] = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), _integer)
    try:
        found = json.loads(bytes(text).decode(), object_pairs_hook=_object, **hooks)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"the header is not JSON: {error}") from None
    notes = found.pop(NOTES, {}) if isinstance(found, dict) else None
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise SafetensorsError(f"the header must be an object, and its {NOTES} may have strings only")
    return found, notes


def _shape(name: str, entry: Any) -> list[int]:
    """Take the shape from an entry. The product of very many dimensions would take very long."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(isinstance(n, int) for n in shape):
        raise SafetensorsError(f"{name!r} is described as {reprlib.repr(entry)}; expected a shape and data_offsets")
    return shape


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise SafetensorsError("the header has the same name twice")
    return found


def _integer(text: str) -> int:
    """Every number of a header counts elements or bytes; the cap keeps the parsing of hostile ones quick."""
    if not text.isdecimal() or len(text) > 15:
        raise SafetensorsError(f"the header has the number {text[:40]}; expected integers from 0 to 10^15")
    return int(text)
