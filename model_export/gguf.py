"""Read GGUF files: facts about a model, and its weights as float32, block by block as they were quantised.

    magic "GGUF", version, number of tensors, number of facts     all integers little-endian
    facts      name, type, value; text has its length in front, a list the type and number of its items
    tensors    name, sizes (the fastest first), kind, where its bytes begin in the data
    data       from the next multiple of the alignment on

A file may come from anywhere: every count, size and place is compared with the file before anything is made of it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from federation.errors import InputError

MAGIC, VERSIONS = b"GGUF", (2, 3)
BLOCK = 32  # neighbours with one scale
MOST_FACTS, MOST_TENSORS, MOST_ITEMS, MOST_DIMS, MOST_NAME = 4096, 1 << 16, 1 << 24, 4, 1024
MOST_DEPTH = 4  # lists in lists
_ALIGNMENT = "general.alignment"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True)
class Kind:
    """How a tensor's numbers are stored: in runs of some elements that take some bytes."""

    name: str
    elements: int
    bytes: int
    read: Callable[[np.ndarray], np.ndarray]  # bytes, one run a row -> float32, one run a row


def _half(runs: np.ndarray, start: int) -> np.ndarray:
    """The float16 that begins at a byte of every run, as a column."""
    return np.asarray(runs[:, start : start + 2].copy().view("<f2"), np.float32)


def _nibbles(runs: np.ndarray, start: int) -> np.ndarray:
    """Numbers from 0 to 15; the first half of a run lies in the low halves of the bytes."""
    packed = runs[:, start:]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


KINDS: Mapping[int, Kind] = {
    0: Kind("F32", 1, 4, lambda runs: runs.view("<f4").astype(np.float32)),
    1: Kind("F16", 1, 2, lambda runs: runs.view("<f2").astype(np.float32)),
    2: Kind("Q4_0", BLOCK, 18, lambda runs: (_nibbles(runs, 2) - 8) * _half(runs, 0)),
    3: Kind("Q4_1", BLOCK, 20, lambda runs: _nibbles(runs, 4) * _half(runs, 0) + _half(runs, 2)),
    8: Kind("Q8_0", BLOCK, 34, lambda runs: runs[:, 2:].view(np.int8).astype(np.float32) * _half(runs, 0)),
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape as PyTorch has it (the fastest last), and where its bytes lie in the file."""

    shape: tuple[int, ...]
    kind: Kind
    start: int
    bytes: int


class GgufFile:
    """An open file: `facts` by name, `entries` by name, and the weights on request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
        self._place = 0
        try:
            self._read_header()
        except struct.error:
            raise self._wrong("it ends in the middle of its header") from None

    def tensor(self, name: str) -> np.ndarray:
        """The weights of this name, as float32."""
        if name not in self.entries:
            raise InputError(f"{self.path} has no tensor {name!r}; it has {', '.join(list(self.entries)[:4])}, …")
        entry = self.entries[name]
        data = np.frombuffer(self._data, np.uint8, entry.bytes, entry.start)
        return entry.kind.read(data.reshape(-1, entry.kind.bytes)).reshape(entry.shape)

    def fact(self, name: str, kind: type) -> Any:
        """A fact that a model needs, of the type that it must have."""
        value = self.facts.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise self._wrong(f"{name!r} is {value!r:.40}, expected {kind.__name__}")
        return value

    def _read_header(self) -> None:
        if self._data[: len(MAGIC)] != MAGIC:
            raise self._wrong("it does not begin with 'GGUF'")
        self._place = len(MAGIC)
        version = self._number("I")
        if version not in VERSIONS:
            raise self._wrong(f"version {version} is unknown; expected {' or '.join(map(str, VERSIONS))}")
        tensors, facts = self._count("tensors", MOST_TENSORS), self._count("facts", MOST_FACTS)
        self.facts: dict[str, Any] = {}
        for _ in range(facts):
            name = self._text(MOST_NAME)
            self.facts[name] = self._value(self._number("I"), 0)
        self._read_tensors(tensors)

    def _read_tensors(self, count: int) -> None:
        found = [(self._text(MOST_NAME), *self._tensor()) for _ in range(count)]
        alignment = self.facts.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._wrong(f"{_ALIGNMENT} is {alignment!r:.20}, expected a power of two up to 2^20")
        begin = -(-self._place // alignment) * alignment
        self.entries: dict[str, Entry] = {}
        for name, shape, kind, offset in found:
            elements = math.prod(shape)
            if shape[-1] % kind.elements:
                raise self._wrong(f"{name!r}: rows of {shape[-1]} are no multiple of {kind.elements} ({kind.name})")
            size = elements // kind.elements * kind.bytes
            if offset % alignment or begin + offset + size > len(self._data):
                raise self._wrong(f"{name!r}: its {size} bytes lie outside the file")
            if name in self.entries:
                raise self._wrong(f"{name!r} is there twice")
            self.entries[name] = Entry(shape, kind, begin + offset, size)

    def _tensor(self) -> tuple[tuple[int, ...], Kind, int]:
        dims = self._number("I")
        if not 1 <= dims <= MOST_DIMS:
            raise self._wrong(f"a tensor of {dims} dimensions; expected 1 to {MOST_DIMS}")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        # No kind has more than 2 elements in a byte.
        if min(shape) < 1 or math.prod(shape) > 2 * len(self._data):
            raise self._wrong(f"a tensor of shape {shape} does not fit into the file")
        number = self._number("I")
        if number not in KINDS:
            known = ", ".join(kind.name for kind in KINDS.values())
            raise self._wrong(f"weights of kind {number} cannot be read; these can: {known}")
        return shape, KINDS[number], self._number("Q")

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q"))
        if count > most:
            raise self._wrong(f"{count} {what}; expected at most {most}")
        return count

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._place)
        self._place += struct.calcsize(f"<{code}")
        return value

    def _text(self, most: int) -> str:
        length = int(self._number("Q"))
        if length > min(most, len(self._data) - self._place):
            raise self._wrong(f"a text of {length} bytes at {self._place}; expected at most {most}, inside the file")
        raw = self._data[self._place : self._place + length]
        self._place += length
        return raw.decode("utf-8", "replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text(len(self._data))
        if kind != _LIST or depth == MOST_DEPTH:
            raise self._wrong(f"a fact of the unknown type {kind}" if kind != _LIST else "lists in lists in lists …")
        inner, count = self._number("I"), self._count("items", MOST_ITEMS)
        if inner not in _NUMBERS:
            return [self._value(inner, depth + 1) for _ in range(count)]
        code = f"<{count}{_NUMBERS[inner]}"
        items = list(struct.unpack_from(code, self._data, self._place))
        self._place += struct.calcsize(code)
        return items

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self.path.name} is no usable GGUF file: {what}")
