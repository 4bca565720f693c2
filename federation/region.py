"""The part of a model that is trained or exchanged: whole layers, a slice of every layer's channels, a width box.

All of these are rectangles. A parameter is a matrix whose rows are its first dimension (output channels) and whose
columns are everything else; a piece of it is some consecutive rows, and of each row a prefix. So in the flat vector a
piece is a run, or runs at equal distances, and any two pieces of a parameter have a piece in common or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from federation.errors import InputError
from federation.space import Parameter, ParameterSpace, Vector

CHUNK = 1 << 14  # elements


@dataclass(frozen=True)
class Span:
    """Elements of a flat vector: `rows` times `length` of them, `stride` apart. One row: a plain slice."""

    start: int
    rows: int
    length: int
    stride: int

    @property
    def size(self) -> int:
        return self.rows * self.length

    @property
    def stop(self) -> int:
        """Behind the last element."""
        return self.start + (self.rows - 1) * self.stride + self.length

    def view(self, vector: NDArray[np.generic], origin: int = 0) -> NDArray[np.generic]:
        """View the elements in place, (rows, length); the vector begins at element `origin`."""
        first = self.start - origin
        if self.rows == 1:
            return vector[first : first + self.length].reshape(1, self.length)
        step = vector.strides[0]
        part = vector[first : self.stop - origin]
        return as_strided(part, (self.rows, self.length), (self.stride * step, step))

    def chunks(self, size: int = CHUNK) -> Iterator[Span]:
        """Cut into runs of at most about `size` elements, in order."""
        if self.rows == 1:
            for start in range(0, self.length, size):
                length = min(size, self.length - start)
                yield Span(self.start + start, 1, length, length)
            return
        step = max(1, size // max(1, self.length))
        for row in range(0, self.rows, step):
            yield replace(self, start=self.start + row * self.stride, rows=min(step, self.rows - row))


@dataclass(frozen=True)
class Piece:
    """Rows [first, end) of a parameter that begins at element `start`, and of each row the first `columns` elements."""

    parameter: Parameter
    start: int
    first: int
    end: int
    columns: int

    @property
    def size(self) -> int:
        return (self.end - self.first) * self.columns

    @property
    def run(self) -> Span:
        width = _columns(self.parameter.shape)
        start, rows = self.start + self.first * width, self.end - self.first
        if self.columns == width or rows == 1:
            return Span(start, 1, rows * self.columns, rows * self.columns)
        return Span(start, rows, self.columns, width)

    @property
    def tensor(self) -> Parameter:
        """As a tensor of its own, for the wire."""
        shape = self.parameter.shape
        if self.size == self.parameter.size:
            return self.parameter
        rows = (self.end - self.first,)
        if self.columns == _columns(shape):
            return replace(self.parameter, shape=(*rows, *shape[1:]))
        return replace(self.parameter, shape=(*rows, self.columns // math.prod(shape[2:]), *shape[2:]))

    def __and__(self, other: Piece) -> Piece:
        first, end = max(self.first, other.first), min(self.end, other.end)
        return Piece(self.parameter, self.start, first, max(first, end), min(self.columns, other.columns))


@dataclass(frozen=True)
class Region:
    """Pieces of parameters by layer, in the order of the space; a layer of which nothing belongs to it is empty.

    >>> space = ParameterSpace([[Parameter("w", "weight", (4, 3))], [Parameter("b", "weight", (2,))]])
    >>> part = channel_part(space, 1, 2)
    >>> part.size, part.gather(np.arange(14, dtype=np.float32)).tolist()
    (7, [6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 13.0])
    """

    layers: tuple[tuple[Piece, ...], ...]

    @cached_property
    def size(self) -> int:
        return sum(piece.size for layer in self.layers for piece in layer)

    @cached_property
    def space(self) -> ParameterSpace:
        """What it is on the wire and in a graph: the pieces as tensors, one behind the other."""
        return ParameterSpace([[piece.tensor for piece in layer] for layer in self.layers])

    @cached_property
    def runs(self) -> tuple[Span, ...]:
        """Where its elements lie, in order; neighbours are one run."""
        return tuple(_merged(piece.run for layer in self.layers for piece in layer))

    @cached_property
    def layer_runs(self) -> tuple[tuple[Span, ...], ...]:
        """The same, layer by layer."""
        return tuple(tuple(_merged(piece.run for piece in layer)) for layer in self.layers)

    @property
    def plain(self) -> slice | None:
        """The one slice that it is, if it is one."""
        if not self.runs:
            return slice(0, 0)
        run = self.runs[0]
        return slice(run.start, run.stop) if len(self.runs) == 1 and run.rows == 1 else None

    def __and__(self, other: Region) -> Region:
        layers = (_common(mine, theirs) for mine, theirs in zip(self.layers, other.layers, strict=True))
        return Region(tuple(layers))

    def __or__(self, other: Region) -> Region:
        """Put two regions together that have no layer in common."""
        for index, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if mine and theirs:
                raise InputError(f"they have layer {index} in common")
        return Region(tuple(mine or theirs for mine, theirs in zip(self.layers, other.layers)))

    def gather(self, vector: Vector, origin: int = 0) -> Vector:
        """Take its elements from a vector that begins at element `origin`; a plain slice is a view, not a copy."""
        if (where := self.plain) is not None:
            return vector[where.start - origin : where.stop - origin] if self.size else np.zeros(0, np.float32)
        found, done = np.empty(self.size, np.float32), 0
        for run in self.runs:
            found[done : done + run.size].reshape(run.rows, run.length)[...] = run.view(vector, origin)
            done += run.size
        return found

    def scatter(self, values: Vector, vector: Vector, origin: int = 0) -> None:
        """Put its elements into their places; the rest of the vector stays."""
        if values.shape != (self.size,):
            raise InputError(f"expected {self.size} values, got {values.shape}")
        done = 0
        for run in self.runs:
            run.view(vector, origin)[...] = values[done : done + run.size].reshape(run.rows, run.length)
            done += run.size

    def inside(self, outer: Region) -> Region:
        """Place the same elements as in the vector that `outer` gathers; it must hold all of them.

        What both gather from the model's vector is the same: `outer.gather(x)` and then this, or this region of x.
        """
        layers, start = [], 0
        for mine, theirs in zip(self.layers, outer.layers, strict=True):
            places = {}
            for piece in theirs:
                places[piece.parameter.name] = (start, piece)
                start += piece.size
            layers.append(tuple(_inside(piece, places.get(piece.parameter.name)) for piece in mine))
        return Region(tuple(layers))

    def only(self, kind: str) -> Region:
        """Keep its weights only, or its statistics."""
        return Region(tuple(tuple(p for p in layer if p.parameter.kind == kind) for layer in self.layers))


def whole(space: ParameterSpace) -> Region:
    """Take every parameter of every layer."""
    return of_layers(space, range(len(space.layers)))


def of_layers(space: ParameterSpace, layers: Collection[int]) -> Region:
    """Take some layers, entirely."""
    chosen = (own if index in layers else () for index, own in enumerate(space.layers))
    return Region(tuple(tuple(_entire(space, parameter) for parameter in own) for own in chosen))


def of_parameters(space: ParameterSpace, names: Collection[str]) -> Region:
    """Take some parameters, entirely."""
    return Region(tuple(tuple(_entire(space, p) for p in layer if p.name in names) for layer in space.layers))


def channel_part(space: ParameterSpace, part: int, parts: int) -> Region:
    """Take the `part`-th of `parts` slices of every parameter's rows; together they have each element once.

    What has fewer rows than there are parts is missing in some of them.
    """
    if not 0 <= part < parts:
        raise InputError(f"there is no part {part} of {parts}")

    def cut(piece: Piece) -> Piece:
        return replace(piece, first=piece.end * part // parts, end=piece.end * (part + 1) // parts)

    layers = (tuple(p for p in map(cut, layer) if p.size) for layer in whole(space).layers)
    return Region(tuple(layers))


def box(space: ParameterSpace, shapes: Sequence[Sequence[Sequence[int]]]) -> Region:
    """Take the first channels of every parameter: a model of the same layers with these shapes."""
    layers = []
    for wide, narrow in zip(whole(space).layers, shapes, strict=True):
        layers.append(tuple(_prefix(piece, tuple(shape)) for piece, shape in zip(wide, narrow, strict=True)))
    return Region(tuple(layers))


def _entire(space: ParameterSpace, p: Parameter) -> Piece:
    return Piece(p, space.slice_of(p.name).start, 0, p.shape[0] if p.shape else 1, _columns(p.shape))


def _columns(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])


def _prefix(piece: Piece, shape: tuple[int, ...]) -> Piece:
    wide = piece.parameter.shape
    fits = len(shape) == len(wide) and all(0 < n <= w for n, w in zip(shape, wide)) and shape[2:] == wide[2:]
    if not fits:
        raise InputError(f"{piece.parameter.name!r}: {shape} is not a prefix of the first two dimensions of {wide}")
    return replace(piece, end=shape[0] if shape else 1, columns=_columns(shape))


def _common(mine: tuple[Piece, ...], theirs: tuple[Piece, ...]) -> tuple[Piece, ...]:
    others = {piece.parameter.name: piece for piece in theirs}
    shared = (piece & others[piece.parameter.name] for piece in mine if piece.parameter.name in others)
    return tuple(piece for piece in shared if piece.size)


def _inside(piece: Piece, place: tuple[int, Piece] | None) -> Piece:
    if place is None or (place[1] & piece).size != piece.size:
        raise InputError(f"{piece.parameter.name!r}: a piece of it does not lie in the other region")
    start, outer = place
    return Piece(outer.tensor, start, piece.first - outer.first, piece.end - outer.first, piece.columns)


def _merged(runs: Iterator[Span]) -> Iterator[Span]:
    last: Span | None = None
    for run in runs:
        if not run.size:
            continue
        if last and last.rows == run.rows == 1 and last.stop == run.start:
            length = last.length + run.length
            last = Span(last.start, 1, length, length)
        else:
            if last:
                yield last
            last = run
    if last:
        yield last
