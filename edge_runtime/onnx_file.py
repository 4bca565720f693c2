"""Read the structure of an ONNX file: nodes, inputs, outputs, initialisers. No package but Python's own.

An ONNX file is a protobuf message (onnx.proto3). Every bound is checked before anything is made, so a hostile file
costs a device no more than its own size. Values of tensors are not read.

Protobuf merges a message that is there twice, and of fields that exclude each other the last one counts. No exporter
writes such a file, so it is refused: what is checked here is what ONNX Runtime runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from federation.errors import UnsafeGraph

MOST_BYTES = 64 << 20  # of a graph; weights lie beside it. The largest of the zoo has one megabyte
MOST_ITEMS = 1 << 20  # nodes, names, tensors, attributes and dimensions of a file together
MOST_NESTING = 8  # graphs inside of graphs
# Fields of which a message has at most one, of onnx.proto3.
_GRAPH_OF_MODEL = (7,)
_OF_ATTRIBUTE = (5, 6)  # t, g
_TYPE_OF_VALUE = (2,)
_KINDS_OF_TYPE = (1, 4, 5, 7, 8, 9)  # tensor_type, sequence_type, ...
_SHAPE_OF_TENSOR = (2,)
_OF_DIMENSION = (1, 2)  # dim_value, dim_param

Shape = tuple[int | None, ...]  # None: a dimension with a name, such as the batch


@dataclass(frozen=True)
class Value:
    """An input or an output as it is declared."""

    name: str
    dtype: int
    shape: Shape | None
    message: memoryview  # all of it


@dataclass(frozen=True)
class Tensor:
    """An initialiser; `external` says where its bytes are, if they are not in the file."""

    name: str
    shape: tuple[int, ...]
    external: dict[str, str] | None
    dtype: int
    message: memoryview  # all of it


@dataclass(frozen=True)
class Node:
    """An operator with the names it takes and gives; `tensors` and `graphs` are in its attributes."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    graphs: tuple[OnnxGraph, ...]
    attributes: dict[str, memoryview]  # the message of each


@dataclass(frozen=True)
class OnnxGraph:
    """A graph, of a model or inside of a node."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class OnnxModel:
    """A file: its graph, and what it has besides that a device does not run (`extras`)."""

    graph: OnnxGraph
    extras: tuple[str, ...]


def read_model(data: bytes) -> OnnxModel:
    """Parse a file; UnsafeGraph if it is none or too large."""
    if len(data) > MOST_BYTES:
        refuse(f"a graph of {len(data)} bytes; expected at most {MOST_BYTES}")
    return _Reader().model(memoryview(data))


def refuse(why: str) -> NoReturn:
    raise UnsafeGraph(f"the graph is refused: {why}")


class _Reader:
    """Reads messages and counts what it makes."""

    def __init__(self) -> None:
        self._left = MOST_ITEMS

    def model(self, data: memoryview) -> OnnxModel:
        graph, extras = None, []
        for number, value in self._fields(data, _GRAPH_OF_MODEL):
            if number == 7:
                graph = self._graph(_part(value), 0)
            elif number in (20, 25):
                extras.append("training information" if number == 20 else "functions")
        if graph is None:
            refuse("there is none in the file")
        return OnnxModel(graph, tuple(extras))

    def _graph(self, data: memoryview, depth: int) -> OnnxGraph:
        if depth > MOST_NESTING:
            refuse(f"graphs inside of graphs more than {MOST_NESTING} deep")
        nodes: list[Node] = []
        inputs: list[Value] = []
        outputs: list[Value] = []
        tensors: list[Tensor] = []
        for number, value in self._fields(data):
            if number == 1:
                nodes.append(self._node(_part(value), depth))
            elif number == 5:
                tensors.append(self._tensor(_part(value)))
            elif number == 11:
                inputs.append(self._value(_part(value)))
            elif number == 12:
                outputs.append(self._value(_part(value)))
            elif number == 15:
                refuse("sparse initialisers")
        return OnnxGraph(tuple(nodes), tuple(inputs), tuple(outputs), tuple(tensors))

    def _node(self, data: memoryview, depth: int) -> Node:
        operator = domain = ""
        inputs: list[str] = []
        outputs: list[str] = []
        tensors: list[Tensor] = []
        graphs: list[OnnxGraph] = []
        attributes: dict[str, memoryview] = {}
        for number, value in self._fields(data):
            if number == 1:
                inputs.append(_text(value))
            elif number == 2:
                outputs.append(_text(value))
            elif number == 4:
                operator = _text(value)
            elif number == 5:
                attributes[self._attribute(_part(value), depth, tensors, graphs)] = _part(value)
            elif number == 7:
                domain = _text(value)
        return Node(operator, domain, tuple(inputs), tuple(outputs), tuple(tensors), tuple(graphs), attributes)

    def _attribute(self, data: memoryview, depth: int, tensors: list[Tensor], graphs: list[OnnxGraph]) -> str:
        name = ""
        for number, value in self._fields(data, _OF_ATTRIBUTE):
            if number == 1:
                name = _text(value)
            elif number in (5, 10):
                tensors.append(self._tensor(_part(value)))
            elif number in (6, 11):
                graphs.append(self._graph(_part(value), depth + 1))
            elif number in (22, 23):
                refuse("sparse constants")
        return name

    def _tensor(self, data: memoryview) -> Tensor:
        name, external, is_external, dtype = "", {}, False, 0
        shape: list[int] = []
        for number, value in self._fields(data):
            if number == 1:
                shape += [value] if isinstance(value, int) else self._packed(value)
            elif number == 2 and isinstance(value, int):
                dtype = value
            elif number == 8:
                name = _text(value)
            elif number == 13:
                entry = dict(self._fields(_part(value)))
                external[_text(entry.get(1, b""))] = _text(entry.get(2, b""))
                is_external = True
            elif number == 14:
                is_external = is_external or value != 0
        return Tensor(name, tuple(shape), external if is_external else None, dtype, data)

    def _value(self, data: memoryview) -> Value:
        name, dtype, shape = "", 0, None
        for number, value in self._fields(data, _TYPE_OF_VALUE):
            if number == 1:
                name = _text(value)
            elif number == 2:
                for kind, described in self._fields(_part(value), _KINDS_OF_TYPE):
                    if kind == 1:
                        dtype, shape = self._tensor_type(_part(described))
        return Value(name, dtype, shape, data)

    def _tensor_type(self, data: memoryview) -> tuple[int, Shape | None]:
        dtype, shape = 0, None
        for number, value in self._fields(data, _SHAPE_OF_TENSOR):
            if number == 1 and isinstance(value, int):
                dtype = value
            elif number == 2:
                shape = tuple(self._dimension(_part(dim)) for kind, dim in self._fields(_part(value)) if kind == 1)
        return dtype, shape

    def _dimension(self, data: memoryview) -> int | None:
        found = dict(self._fields(data, _OF_DIMENSION)).get(1)
        return found if isinstance(found, int) else None

    def _packed(self, data: memoryview) -> list[int]:
        found, at = [], 0
        while at < len(data):
            self._count()
            number, at = _varint(data, at)
            found.append(number)
        return found

    def _fields(self, data: memoryview, single: tuple[int, ...] = ()) -> Iterator[tuple[int, int | memoryview]]:
        """Yield the number of each field with its value: a number, or bytes. At most one of the single ones is there.

        Fields of a fixed width are left out: none that is read has one, and protobuf leaves them out, too.
        """
        met = 0
        for number, value, _ in split_fields(data):
            self._count()
            met += number in single
            if met > 1:
                refuse(f"field {number} of a part that can have it once is there again")
            if value is not None:
                yield number, value

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            refuse(f"more than {MOST_ITEMS} parts")


def split_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview | None, memoryview]]:
    """Yield the number, the value and all bytes of each field; the value is None where it has a fixed width."""
    at = 0
    while at < len(data):
        start = at
        key, at = _varint(data, at)
        if key >= 1 << 32:  # of which a reader may take the last 32 bits
            refuse("it is no ONNX file")
        number, kind = key >> 3, key & 7
        value: int | memoryview | None = None
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            refuse("it is no ONNX file")
        if at > len(data):
            refuse("it is no ONNX file, or a part of one")
        yield number, value, data[start:at]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    refuse("it is no ONNX file, or a part of one")


def _part(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        refuse("it is no ONNX file")
    return value


def _text(value: int | memoryview | bytes) -> str:
    if isinstance(value, int):
        refuse("it is no ONNX file")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        refuse("a name that is no text")
