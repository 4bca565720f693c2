"""The body of an update, or of a part of the weights: safetensors with the pieces of one or more regions.

Its header is safetensors_codec.py's. A body has one or more tracks, each a vector over a region: `model` (the change of
the weights) under the parameters' own names, others (`control`, `momentum`) as `control/NAME`. What is written here has
its tensors in the order of the ParameterSpace, so that the data of a range of layers IS the slice of the flat vector.
See docs/reference/wire.md.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError
from federation.layout import MODEL, Layout, Order, Place, layers_layout
from federation.region import CHUNK, Region, Span
from federation.safetensors_codec import PREFIX, SafetensorsError, decode_header, header_length
from federation.space import ParameterSpace, Vector

BLOCK = 1 << 16  # elements that are checked together, counted from the start of the data whatever the chunks were
DOT = 1 << 13  # elements of one dot product; BLAS spreads larger ones over threads, and the sum depends on how many
PIECE = 1 << 14  # elements that are sent together
Bytes = bytearray | memoryview
Steps = Generator[int, Bytes, "CheckedUpdate"]  # asks for so many bytes, gets them, and gives its verdict
Body = Iterator[bytes | memoryview]
Piece = tuple[str, str, int, int]  # track, tensor, begin and end, in elements, of what is squared at once


class BodyFile(Protocol):
    """An open body: a binary file, or bytes in memory."""

    def seek(self, offset: int, /) -> int: ...

    def readinto(self, buffer: memoryview, /) -> int | None: ...


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
    squares: Mapping[str, float]  # sum of squares of each weight, by its name
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
    """Write the body of some layers; `vector` is their slice of the flat vector."""
    return encode({MODEL: (layers_layout(space, first_layer, end).tracks[MODEL], vector)})


def encode(vectors: Mapping[str, tuple[Region, Vector]]) -> Body:
    """Write a body, piece by piece; the vectors have the regions' elements in order, and are not copied."""
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
        """Return what was found, once nothing more comes."""
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
    """Check the data of a body that has the layout's own header, without the header; places count from there."""
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
    """Check a body, in the order of its bytes."""
    try:
        length = header_length((yield PREFIX), limits.max_header_bytes)
        order = _read_order((yield length), layout, limits)
    except SafetensorsError as error:
        raise WireError(str(error)) from None
    return (yield from _check_data(layout, limits, order))


def _check_data(layout: Layout, limits: Limits, order: Order) -> Steps:
    """Check the values."""
    part, tracks = layout.space, layout.tracks
    pieces = _pieces(layout, order.offsets)
    squares = dict.fromkeys(layout.tensors, 0.0)
    largest = dict.fromkeys(tracks, 0.0)
    most = {track: _bound(limits.max_value if track == MODEL else limits.max_other_value) for track in tracks}
    most_norm, total = _bound(limits.max_norm), 0.0
    for first in range(0, part.size, BLOCK):
        values = np.frombuffer((yield 4 * min(BLOCK, part.size - first)), "<f4")
        taken, end = [], first
        with np.errstate(invalid="ignore"):  # a signalling nan would warn when it is converted
            while end < first + values.size:
                track, name, begin, end = piece = next(pieces)
                taken.append(piece)
                doubles = values[begin - first : end - first].astype(np.float64)
                square = float(np.dot(doubles, doubles))
                squares[name] += square
                # No square of a float32 overflows a double, so this one test finds every inf and nan.
                if not math.isfinite(square):
                    raise WireError(_element(order.offsets, first, values, ~np.isfinite(values)) + "finite values")
                total += square if track == MODEL else 0.0
        for track, run in groupby(taken, lambda piece: piece[0]):
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
    found = {}
    for track, region in tracks.items():
        own = [(p, squares[name]) for name, (owner, p) in layout.tensors.items() if owner == track]
        norm = math.sqrt(math.fsum(square for _, square in own))
        weights = {p.name: square for p, square in own if p.kind == "weight"}
        found[track] = CheckedTrack(region, order.places[track], weights, norm, largest[track])
    if MODEL in found and found[MODEL].norm > most_norm:
        raise WireError(f"the norm is {found[MODEL].norm:.17g}; expected at most {most_norm:.17g}")
    return CheckedUpdate(found, order.start + 4 * part.size)


def read_blocks(file: BodyFile, track: CheckedTrack, block: int = CHUNK) -> Iterator[tuple[Span, Vector]]:
    """Read (elements of the model's flat vector, their values) in ascending order; good until the next block."""
    raw = np.empty(4 * block, np.uint8)
    for offset, run in _runs(track.places):
        file.seek(offset)
        for chunk in run.chunks(block):
            part = raw[: 4 * chunk.size] if chunk.size <= block else np.empty(4 * chunk.size, np.uint8)
            if file.readinto(part.data) != part.size:
                raise WireError("a body that was checked has become shorter")
            yield chunk, part.view("<f4")


def within(track: CheckedTrack, region: Region) -> CheckedTrack:
    """Cut a checked vector down to a region; sums of squares stay for weights that lie in it entirely."""
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
    entire = {piece.parameter.name for layer in common.layers for piece in layer if piece in offsets}
    squares = {name: square for name, square in track.squares.items() if name in entire}
    return replace(track, region=common, places=tuple(places), squares=squares)


def _runs(places: Iterable[Place]) -> Iterator[Place]:
    """Join pieces that are neighbours in the file and in the vector."""
    begin, last = 0, Span(0, 1, 0, 0)
    for offset, run in places:
        if run.rows == last.rows == 1 and (offset, run.start) == (begin + 4 * last.length, last.stop):
            length = last.length + run.length
            last = Span(last.start, 1, length, length)
        elif run.size:
            if last.size:
                yield begin, last
            begin, last = offset, run
    if last.size:
        yield begin, last


def _bound(most: float | None) -> float:
    return math.inf if most is None else most


def _pieces(layout: Layout, offsets: Mapping[str, int]) -> Iterator[Piece]:
    """Cut the tensors, in the order of the data, into pieces of one tensor and at most DOT elements."""
    begin = 0
    for name in offsets:
        track, parameter = layout.tensors[name]
        end = begin + parameter.size
        while begin < end:
            start, begin = begin, min(end, begin - begin % DOT + DOT)
            yield track, name, start, begin


def _element(offsets: Mapping[str, int], first: int, values: Vector, wrong: NDArray[np.bool_]) -> str:
    at = int(np.argmax(wrong))
    name, begin = [found for found in offsets.items() if found[1] <= 4 * (first + at)][-1]
    return f"{name!r}: element {first + at - begin // 4} is {values[at]:.6g}; expected "


def _read_order(text: Bytes, layout: Layout, limits: Limits) -> Order:
    if bytes(text) == layout.header[PREFIX:]:
        return layout.usual
    shapes = {parameter.name: parameter.shape for parameter in layout.space}
    found = decode_header(text, shapes, max_tensors=limits.max_tensors, max_name_length=limits.max_name_length)
    return layout.order(found.offsets, PREFIX + len(text))
