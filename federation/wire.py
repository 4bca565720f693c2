"""The body of an update, or of a range of weights: safetensors with the parameters of consecutive layers.

    8 bytes   length of the header, little-endian
    header    JSON: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, blanks at its end
    data      little-endian float32; offsets count from here

What is written here has its tensors in the order of the ParameterSpace, so that the data IS the slice of the flat
vector. The safetensors library sorts by name: any order can be read that leaves no holes. See docs/wire.md.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation import weights
from federation.errors import InputError
from federation.space import ParameterSpace, Vector

BLOCK = 1 << 12  # elements that are checked together, counted from the start of the data whatever the chunks were
DOT = 1 << 12  # elements of one dot product; BLAS spreads larger ones over threads, and the sum depends on how many
PIECE = 1 << 14  # elements that are sent together
Bytes = bytearray | memoryview
Steps = Generator[int, Bytes, "CheckedUpdate"]  # asks for so many bytes, gets them, and gives its verdict
Body = Iterator[bytes | memoryview]
Place = tuple[int, slice]  # of one parameter: offset in the file in bytes, slice of the model's flat vector


class WireError(InputError):
    """A body that is not what it has to be; repeating it cannot help."""


@dataclass(frozen=True)
class Limits:
    """What a body may be at most; None: no bound."""

    max_header_bytes: int = 1 << 20
    max_tensors: int = 10_000
    max_name_length: int = 512
    max_norm: float | None = None  # of all values together
    max_value: float | None = None  # of each, as a magnitude: what an Accumulator was declared with


@dataclass(frozen=True)
class CheckedUpdate:
    """What is known about a body after every byte of it was checked."""

    first_layer: int
    places: tuple[Place, ...]  # in the order of the flat vector
    squares: tuple[float, ...]  # sum of squares of each layer
    norm: float
    largest: float  # magnitude
    data_start: int
    size: int  # of the file, in bytes


def update_header(space: ParameterSpace, first_layer: int, *, end: int | None = None) -> bytes:
    """Everything in front of the data of the layers [first_layer, end)."""
    return weights.header(_part(space, first_layer, end))


def encode(space: ParameterSpace, first_layer: int, vector: Vector, *, end: int | None = None) -> Body:
    """The body, piece by piece; `vector` is the slice of those layers and is not copied."""
    part = _part(space, first_layer, end)
    if vector.shape != (part.size,) or vector.dtype != np.float32:
        raise InputError(f"expected {part.size} float32 values, got {vector.dtype} {vector.shape}")
    yield weights.header(part)
    for start in range(0, vector.size, PIECE):
        yield np.ascontiguousarray(vector[start : start + PIECE], "<f4").view(np.uint8).data


class UpdateDecoder:
    """Checks a body in chunks of any size, as early as possible, and holds one block. A refusal is for good."""

    def __init__(self, space: ParameterSpace, first_layer: int, limits: Limits, *, end: int | None = None) -> None:
        self._steps = _check(space, _part(space, first_layer, end), first_layer, limits)
        self._wanted = next(self._steps)  # bytes of the next step
        self._rest = bytearray()  # the beginning of them, until the others come
        self._failure = ""
        self._result: CheckedUpdate | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the body."""
        rest = memoryview(data).cast("B")
        while rest:
            if self._result:
                self._failure, self._result = f"the body goes on after its {self._result.size} bytes", None
            if self._failure:
                raise WireError(self._failure)
            taken = rest[: self._wanted - len(self._rest)]
            rest = rest[len(taken) :]
            if len(taken) == self._wanted:  # a whole block is used where it is
                self._step(taken)
                continue
            self._rest += taken
            if len(self._rest) == self._wanted:
                whole, self._rest = self._rest, bytearray()
                self._step(whole)

    def finish(self) -> CheckedUpdate:
        """What was found, now that nothing more comes."""
        if self._result is None:
            missing = self._wanted - len(self._rest)
            raise WireError(self._failure or f"the body ends too early; expected at least {missing} more bytes")
        return self._result

    def _step(self, data: Bytes) -> None:
        try:
            self._wanted = self._steps.send(data)
        except StopIteration as done:
            self._result = done.value
        except WireError as error:
            self._failure = str(error)
            raise


def _check(space: ParameterSpace, part: ParameterSpace, first_layer: int, limits: Limits) -> Steps:
    """The checks, in the order of the bytes."""
    length = int.from_bytes((yield 8), "little")
    if not 2 <= length <= limits.max_header_bytes:
        raise WireError(f"the header is said to have {length} bytes; expected from 2 to {limits.max_header_bytes}")
    offsets = _read_header((yield length), part, limits)
    pieces = _pieces(part, offsets)
    squares, total, largest = [0.0] * len(part.layers), 0.0, 0.0
    most, most_norm = (math.inf if bound is None else bound for bound in (limits.max_value, limits.max_norm))
    for first in range(0, part.size, BLOCK):
        values = np.frombuffer((yield 4 * min(BLOCK, part.size - first)), "<f4")
        with np.errstate(invalid="ignore"):  # a signalling nan would warn here already
            doubles = values.astype(np.float64)
        end = first
        while end < first + values.size:
            layer, begin, end = next(pieces)
            piece = doubles[begin - first : end - first]
            square = float(np.dot(piece, piece))
            squares[layer] += square
            total += square
        # No square of a float32 overflows a double, so this one test finds every inf and nan.
        if not math.isfinite(total):
            raise WireError(_element(offsets, first, values, ~np.isfinite(values)) + "finite values")
        largest = max(largest, float(values.max()), -float(values.min()))
        if largest > most:
            raise WireError(_element(offsets, first, values, np.abs(values) > most) + f"magnitudes up to {most:.6g}")
        # The exact verdict comes at the end, but what is clearly too large already need not arrive to its end.
        if total > most_norm * most_norm * (1 + 1e-9):
            raise WireError(f"the norm is above {math.sqrt(total):.6g}; expected at most {most_norm:.6g}")
    norm = math.sqrt(math.fsum(squares))
    if norm > most_norm:
        raise WireError(f"the norm is {norm:.17g}; expected at most {most_norm:.17g}")
    places = tuple((8 + length + offsets[p.name], space.slice_of(p.name)) for p in part)
    return CheckedUpdate(first_layer, places, tuple(squares), norm, largest, 8 + length, 8 + length + 4 * part.size)


def read_blocks(file: BufferedIOBase, checked: CheckedUpdate, block: int = 1 << 14) -> Iterator[tuple[slice, Vector]]:
    """(slice of the model's flat vector, its values) in ascending order; the values are good until the next block."""
    raw = np.empty(4 * block, np.uint8)
    for offset, where in _runs(checked.places):
        file.seek(offset)
        for start in range(where.start, where.stop, block):
            stop = min(start + block, where.stop)
            part = raw[: 4 * (stop - start)]
            if file.readinto(part.data) != part.size:
                raise WireError(f"a body that was checked has become shorter than its {checked.size} bytes")
            yield slice(start, stop), part.view("<f4")


def _runs(places: Iterable[Place]) -> Iterator[Place]:
    """Parameters that are neighbours in the file and in the vector become one."""
    begin, run = 0, slice(0, 0)
    for offset, where in places:
        if offset == begin + 4 * (run.stop - run.start):
            run = slice(run.start, where.stop)
        elif where.stop > where.start:
            yield begin, run
            begin, run = offset, where
    yield begin, run


def _pieces(part: ParameterSpace, offsets: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    """(layer, begin, end) of what is squared at once, in the order of the data, in elements."""
    tensors = {p.name: (index, p.size) for index, layer in enumerate(part.layers) for p in layer}
    begin = 0
    for layer, run in groupby((tensors[name] for name in offsets), lambda tensor: tensor[0]):
        end = begin + sum(size for _, size in run)
        while begin < end:
            start, begin = begin, min(end, begin - begin % DOT + DOT)
            yield layer, start, begin


def _element(offsets: dict[str, int], first: int, values: Vector, wrong: NDArray[np.bool_]) -> str:
    at = int(np.argmax(wrong))
    name, begin = [found for found in offsets.items() if found[1] <= 4 * (first + at)][-1]
    return f"{name!r}: element {first + at - begin // 4} is {values[at]:.6g}; expected "


def _part(space: ParameterSpace, first_layer: int, end: int | None) -> ParameterSpace:
    count = len(space.layers)
    if not 0 <= first_layer < (count if end is None else end) <= count:
        raise InputError(f"there are no layers [{first_layer}, {end}); the model has {count}")
    return ParameterSpace(space.layers[first_layer:end])


def _read_header(text: Bytes, part: ParameterSpace, limits: Limits) -> dict[str, int]:
    """Where each tensor begins in the data, in that order; refuses all that is not exactly what was expected."""
    hooks: dict[str, Any] = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), _integer)
    try:
        found = json.loads(bytes(text).decode(), object_pairs_hook=_object, **hooks)
        notes = found.pop("__metadata__", {}) if isinstance(found, dict) else None
        if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
            raise WireError("the header must be an object, and its __metadata__ may have strings only")
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not JSON: {error}") from None
    if len(found) > limits.max_tensors or max(map(len, found), default=0) > limits.max_name_length:
        raise WireError(f"more than {limits.max_tensors} tensors, or a name above {limits.max_name_length} characters")
    wanted = {parameter.name for parameter in part}
    if wanted != found.keys():
        missing, extra = sorted(wanted - found.keys())[:3], sorted(found.keys() - wanted)[:3]
        raise WireError(f"the header lacks the names {missing}, and those of {extra} are not expected")
    # The claimed offsets give the order of the tensors, and the order gives the only right entries.
    try:
        order = sorted(part, key=lambda parameter: found[parameter.name]["data_offsets"])
    except (TypeError, LookupError, RecursionError):
        raise WireError("the header must give every tensor two integers as its data_offsets") from None
    offsets, end = {}, 0
    for p in order:
        begin, end = end, end + 4 * p.size
        entry, expected = found[p.name], {"dtype": "F32", "shape": list(p.shape), "data_offsets": [begin, end]}
        # JSON's true is no integer, although Python's is: seen only once the structure is known to be right.
        if entry != expected or bool in map(type, (*entry["shape"], *entry["data_offsets"])):
            raise WireError(f"{p.name!r} is described as {reprlib.repr(entry)}; expected {expected}")
        offsets[p.name] = begin
    return offsets


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise WireError("the header has the same name twice")
    return found


def _integer(text: str) -> int:
    """Every number of a header counts elements or bytes; the cap keeps the parsing of hostile ones quick."""
    if not text.isdecimal() or len(text) > 15:
        raise WireError(f"the header has the number {text[:40]}; expected integers from 0 to 10^15")
    return int(text)
