"""Graphs that protobuf, and so ONNX Runtime, reads otherwise than a reader that takes the last of two fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEY_OF_GRAPH = 7 << 3 | 2


def varint(value: int) -> bytes:
    found = b""
    while value >= 0x80:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def field(number: int, data: bytes) -> bytes:
    """A field with bytes: a text or a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def spy() -> bytes:
    """A second part of the graph, which gives the samples away."""
    from onnx import TensorProto, helper

    output = helper.make_tensor_value_info("spy", TensorProto.FLOAT, None)
    found: bytes = helper.make_graph(
        [helper.make_node("Identity", ["input"], ["spy"])], "", [], [output]
    ).SerializeToString()
    return found


def graph_first(model: Any) -> bytes:
    return field(7, spy()) + whole(model)


def graph_last(model: Any) -> bytes:
    return whole(model) + field(7, spy())


def graph_by_a_long_key(model: Any) -> bytes:
    return whole(model) + varint(1 << 32 | KEY_OF_GRAPH) + varint(len(spy())) + spy()


def type_twice(model: Any) -> bytes:
    return with_output(model, lambda value: field(2, b"") + value)


def tensor_type_twice(model: Any) -> bytes:
    return with_output(model, lambda value: value, lambda kind: field(1, b"") + kind)


def other_type_behind(model: Any) -> bytes:
    return with_output(model, lambda value: value, lambda kind: kind + field(4, b""))


def shape_twice(model: Any) -> bytes:
    return with_output(model, lambda value: value, lambda kind: field(1, kind_bytes(kind) + field(2, b"")))


def dimension_by_name_behind(model: Any) -> bytes:
    return with_output(
        model,
        lambda value: value,
        lambda kind: field(1, b"\x08\x01" + field(2, field(1, b"\x08\x01" + field(2, b"N")))),
    )


def subgraph_twice(model: Any) -> bytes:
    return with_node(model, field(5, field(1, b"body") + field(6, b"") + field(6, b"") + b"\xa0\x01\x05"))


def constant_twice(model: Any) -> bytes:
    return with_node(model, field(5, field(1, b"value") + field(5, b"") + field(5, b"") + b"\xa0\x01\x04"))


def kind_bytes(kind: bytes) -> bytes:
    from onnx import TypeProto

    found: bytes = TypeProto.FromString(kind).tensor_type.SerializeToString()
    return found


def whole(model: Any) -> bytes:
    found: bytes = model.SerializeToString(deterministic=True)
    return found


def with_graph(model: Any, more: bytes) -> bytes:
    """Write the model; its graph, which is there once, has more fields."""
    graph = model.graph.SerializeToString(deterministic=True)
    model.ClearField("graph")
    return whole(model) + field(7, graph + more)


def with_output(
    model: Any, change: Callable[[bytes], bytes], of_type: Callable[[bytes], bytes] = lambda kind: kind
) -> bytes:
    """Write the model with its last output described otherwise."""
    value = model.graph.output[-1]
    kind = of_type(value.type.SerializeToString())
    name = field(1, value.name.encode())
    del model.graph.output[-1]
    return with_graph(model, field(12, change(name + field(2, kind))))


def with_node(model: Any, more: bytes) -> bytes:
    return with_graph(model, field(1, field(2, b"spy") + field(4, b"Constant") + more))


MERGED: tuple[Callable[[Any], bytes], ...] = (
    graph_first,
    graph_last,
    graph_by_a_long_key,
    type_twice,
    tensor_type_twice,
    other_type_behind,
    shape_twice,
    dimension_by_name_behind,
    subgraph_twice,
    constant_twice,
)
