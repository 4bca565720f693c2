"""The body of an update, or of a part of the weights: safetensors with the pieces of one or more regions.

    8 bytes   length of the header, little-endian
    header    JSON: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, blanks at its end
    data      little-endian float32; offsets count from here

A body has one or more tracks, each a vector over a region: `model` (the change of the weights) under the parameters'
own names, others (`control`, `momentum`) as `control/NAME`. What is written here has its tensors in the order of the
ParameterSpace, so that the data of a range of layers IS the slice of the flat vector. The safetensors library sorts by
name: any order can be read that leaves no holes. See docs/wire.md.
"""

from __future__ import annotations

import json
import math
import reprlib
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BufferedIOBase
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError
from federation.layout import MODEL, Layout, Order, Place, layers_layout
from federation.region import CHUNK, Region, Run
from federation.space import Kind, ParameterSpace, Vector

BLOCK = 1 << 16  # elements that are checked together, counted from the start of the data whatever the chunks were
DOT = 1 << 13  # elements of one dot product; BLAS spreads larger ones over threads, and the sum depends on how many
PIECE = 1 << 14  # elements that are sent together
Bytes = bytearray | memoryview
Steps = Generator[int, Bytes, "CheckedUpdate"]  # asks for so many bytes, gets them, and gives its verdict
Body = Iterator[bytes | memoryview]
Piece = tuple[int, Kind, int, int]  # layer, kind, begin and end, in elements, of what is squared at once
_scratch = threading.local()


class WireError(InputError):
    """A body that is not what it has to be; repeating it cannot help."""


@dataclass(frozen=True)
class Limits:
    """What a body may be at most; None: no bound."""

    max_header_bytes: int = 1 << 20
    max_tensors: int = 10_000
    max_name_length: int = 512
    max_norm: float | None = None  # of all values of the model together
    max_value: float | None = None  # of each, as a magnitude: what an Accumulator was declared with
    max_other_value: float | None = None  # ... in the other tracks


@dataclass(frozen=True)
class CheckedTrack:
    """What is known about one vector of a body after every byte of it was checked."""

    region: Region
    places: tuple[Place, ...]  # in the order of the flat vector
    squares: tuple[float, ...]  # sum of squares of each layer's weights
    norm: float  # of everything, statistics too
    largest: float  # magnitude


@dataclass(frozen=True)
class CheckedUpdate:
    """What is known about a whole body."""

    tracks: Mapping[str, CheckedTrack]
    size: int  # of the file, in bytes

    @property
    def model(self) -> CheckedTrack:
        return self.tracks[MODEL]


def encode_layers(space: ParameterSpace, first_layer: int, vector: Vector, *, end: int | None = None) -> Body:
    """The body of some layers; `vector` is their slice of the flat vector."""
    return encode({MODEL: (layers_layout(space, first_layer, end).tracks[MODEL], vector)})


def encode(vectors: Mapping[str, tuple[Region, Vector]]) -> Body:
    """The body, piece by piece; the vectors have the regions' elements in order, and are not copied."""
    for track, (region, vector) in vectors.items():
        if vector.shape != (region.size,) or vector.dtype != np.float32:
            raise InputError(f"{track}: expected {region.size} float32 values, got {vector.dtype} {vector.shape}")
    yield Layout({track: region for track, (region, _) in vectors.items()}).header
    for _, vector in vectors.values():
        for start in range(0, vector.size, PIECE):
            yield np.ascontiguousarray(vector[start : start + PIECE], "<f4").view(np.uint8).data


class UpdateDecoder:
    """Checks a body in chunks of any size, as early as possible, and holds one block. A refusal is for good."""

    def __init__(self, layout: Layout, limits: Limits) -> None:
        self._steps = _check(layout, limits)
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


def check_data(layout: Layout, limits: Limits, data: bytes) -> CheckedUpdate:
    """What a decoder finds in a body with the layout's own header, from its data alone; places count from there."""
    if len(data) != 4 * layout.space.size:
        raise WireError(f"the data has {len(data)} bytes; expected {4 * layout.space.size}")
    steps, rest = _check_data(layout, limits, layout.bare), memoryview(data)
    try:
        wanted = next(steps)
        while True:
            block, rest = rest[:wanted], rest[wanted:]
            wanted = steps.send(block)
    except StopIteration as done:
        found: CheckedUpdate = done.value
        return found


def _check(layout: Layout, limits: Limits) -> Steps:
    """The checks, in the order of the bytes."""
    length = int.from_bytes((yield 8), "little")
    if not 2 <= length <= limits.max_header_bytes:
        raise WireError(f"the header is said to have {length} bytes; expected from 2 to {limits.max_header_bytes}")
    return (yield from _check_data(layout, limits, _read_order((yield length), layout, limits)))


def _check_data(layout: Layout, limits: Limits, order: Order) -> Steps:
    """The checks of the values."""
    part, tracks, owner = layout.space, layout.tracks, layout.owners
    pieces = _pieces(part, order.offsets)
    squares = {kind: [0.0] * len(part.layers) for kind in ("weight", "statistic")}
    largest = dict.fromkeys(tracks, 0.0)
    most = {track: _bound(limits.max_value if track == MODEL else limits.max_other_value) for track in tracks}
    most_norm, total = _bound(limits.max_norm), 0.0
    for first in range(0, part.size, BLOCK):
        values = np.frombuffer((yield 4 * min(BLOCK, part.size - first)), "<f4")
        doubles = _as_doubles(values)
        taken, end = [], first
        while end < first + values.size:
            layer, kind, begin, end = piece = next(pieces)
            taken.append(piece)
            elements = doubles[begin - first : end - first]
            square = float(np.dot(elements, elements))
            squares[kind][layer] += square
            # No square of a float32 overflows a double, so this one test finds every inf and nan.
            if not math.isfinite(square):
                raise WireError(_element(order.offsets, first, values, ~np.isfinite(values)) + "finite values")
            total += square if owner[layer] == MODEL else 0.0
        for track, run in groupby(taken, lambda piece: owner[piece[0]]):
            mine = list(run)
            span = slice(mine[0][2] - first, mine[-1][3] - first)
            largest[track] = max(largest[track], float(values[span].max()), -float(values[span].min()))
            if largest[track] > most[track]:
                wrong = np.zeros(values.size, np.bool_)
                wrong[span] = np.abs(values[span]) > most[track]
                raise WireError(_element(order.offsets, first, values, wrong) + f"magnitudes up to {most[track]:.6g}")
        # The exact verdict comes at the end, but what is clearly too large already need not arrive to its end.
        if total > most_norm * most_norm * (1 + 1e-9):
            raise WireError(f"the norm is above {math.sqrt(total):.6g}; expected at most {most_norm:.6g}")
    found, done = {}, 0
    for track, region in tracks.items():
        own = slice(done, done := done + len(region.layers))
        norm = math.sqrt(math.fsum([*squares["weight"][own], *squares["statistic"][own]]))
        found[track] = CheckedTrack(region, order.places[track], tuple(squares["weight"][own]), norm, largest[track])
    if MODEL in found and found[MODEL].norm > most_norm:
        raise WireError(f"the norm is {found[MODEL].norm:.17g}; expected at most {most_norm:.17g}")
    return CheckedUpdate(found, order.start + 4 * part.size)


def read_blocks(file: BufferedIOBase, track: CheckedTrack, block: int = CHUNK) -> Iterator[tuple[Run, Vector]]:
    """(elements of the model's flat vector, their values) in ascending order; good until the next block."""
    raw = np.empty(4 * block, np.uint8)
    for offset, run in _runs(track.places):
        file.seek(offset)
        for chunk in run.chunks(block):
            part = raw[: 4 * chunk.size] if chunk.size <= block else np.empty(4 * chunk.size, np.uint8)
            if file.readinto(part.data) != part.size:
                raise WireError("a body that was checked has become shorter")
            yield chunk, part.view("<f4")


def within(track: CheckedTrack, region: Region) -> CheckedTrack:
    """The part of a checked vector that lies in a region; sums of squares are those of layers that do so entirely."""
    common = track.region & region
    if common == track.region:
        return track
    offsets = dict(zip((p for layer in track.region.layers for p in layer), (offset for offset, _ in track.places)))
    outer = {piece.parameter.name: piece for piece in offsets}
    places = []
    for piece in (piece for layer in common.layers for piece in layer):
        whole = outer[piece.parameter.name]
        if piece.columns != whole.columns:
            raise InputError(f"{piece.parameter.name!r}: a part of every row cannot be taken from a body")
        places.append((offsets[whole] + 4 * (piece.first - whole.first) * piece.columns, piece.run))
    layers = zip(track.region.layers, common.layers, track.squares)
    squares = tuple(square if mine == theirs else 0.0 for mine, theirs, square in layers)
    return replace(track, region=common, places=tuple(places), squares=squares)


def _runs(places: Iterable[Place]) -> Iterator[Place]:
    """Pieces that are neighbours in the file and in the vector become one."""
    begin, last = 0, Run(0, 1, 0, 0)
    for offset, run in places:
        if run.rows == last.rows == 1 and (offset, run.start) == (begin + 4 * last.length, last.stop):
            length = last.length + run.length
            last = Run(last.start, 1, length, length)
        elif run.size:
            if last.size:
                yield begin, last
            begin, last = offset, run
    if last.size:
        yield begin, last


def _as_doubles(values: Vector) -> NDArray[np.float64]:
    """Good until the next time: many bodies arrive at once, and memory does not grow with their number."""
    if not hasattr(_scratch, "doubles"):
        _scratch.doubles = np.empty(BLOCK)
    doubles: NDArray[np.float64] = _scratch.doubles[: values.size]
    with np.errstate(invalid="ignore"):  # a signalling nan would warn here already
        np.copyto(doubles, values)
    return doubles


def _bound(most: float | None) -> float:
    return math.inf if most is None else most


def _pieces(part: ParameterSpace, offsets: Mapping[str, int]) -> Iterator[Piece]:
    """In the order of the data."""
    tensors = {p.name: ((index, p.kind), p.size) for index, layer in enumerate(part.layers) for p in layer}
    begin = 0
    for (layer, kind), run in groupby((tensors[name] for name in offsets), lambda tensor: tensor[0]):
        end = begin + sum(size for _, size in run)
        while begin < end:
            start, begin = begin, min(end, begin - begin % DOT + DOT)
            yield layer, kind, start, begin


def _element(offsets: Mapping[str, int], first: int, values: Vector, wrong: NDArray[np.bool_]) -> str:
    at = int(np.argmax(wrong))
    name, begin = [found for found in offsets.items() if found[1] <= 4 * (first + at)][-1]
    return f"{name!r}: element {first + at - begin // 4} is {values[at]:.6g}; expected "


def _read_order(text: Bytes, layout: Layout, limits: Limits) -> Order:
    if bytes(text) == layout.header[8:]:
        return layout.usual
    return layout.order(_read_header(text, layout.space, limits), 8 + len(text))


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
