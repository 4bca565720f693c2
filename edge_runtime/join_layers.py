"""Join the graphs of consecutive layers to one, so that the runtime passes values on in the layout that suits it.

ONNX files are rewritten as protobuf messages (onnx.proto3): a device has no package for that. Each layer takes `input`
and gives `output`; any other name gets the layer's number in front, so that no two layers share one. What was checked
of each layer (graph_check.py) holds for all of them together: nothing is added, and nothing else is connected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_runtime.onnx_file import refuse, split_fields
from edge_runtime.onnx_write import GRAPH, INPUT, IR_VERSION, NAME, NODE, OPSETS, OUTPUT, TENSOR, field

# The fields of each message that are names, None, or messages with names in them.
_INSIDE: dict[str, dict[int, str | None]] = {
    "graph": {NODE: "node", TENSOR: "tensor", INPUT: "value", OUTPUT: "value", 13: "value"},
    "node": {1: None, 2: None, 3: None, 5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
    "tensor": {8: None},
    "value": {1: None},
}
Rename = Callable[[bytes], bytes]


def join_layers(graphs: Sequence[bytes]) -> bytes:
    """Join layers in their order; UnsafeGraph if they are no ONNX files of one version of the operators."""
    models = [_fields_by_number(graph) for graph in graphs]
    first = models[0]
    if any(model[number] != first[number] for model in models for number in (IR_VERSION, OPSETS)):
        refuse("it is written for other versions of the operators than the layer in front of it")
    joined = bytearray(field(NAME, b"joined"))
    for number, model in enumerate(models):
        rename, last = _renaming(number, len(models)), number == len(models) - 1
        for part, value, _ in split_fields(memoryview(model[GRAPH][0])):
            inside = _INSIDE["graph"].get(part)
            taken = part in (NODE, TENSOR) or (part == INPUT and number == 0) or (part == OUTPUT and last)
            if taken and inside is not None:
                joined += field(part, _renamed(_message(value), inside, rename))
    kept = b"".join(raw for number in (IR_VERSION, OPSETS) for raw in first[number])
    return kept + field(GRAPH, bytes(joined))


def _fields_by_number(model: bytes) -> dict[int, list[bytes]]:
    """Read the fields of a model that count: versions as they are written, the graph without its number."""
    found: dict[int, list[bytes]] = {}
    for number, value, raw in split_fields(memoryview(model)):
        if number in (IR_VERSION, OPSETS):
            found.setdefault(number, []).append(bytes(raw))
        elif number == GRAPH:
            found.setdefault(number, []).append(bytes(_message(value)))
    if found.keys() != {IR_VERSION, GRAPH, OPSETS}:
        refuse("it is no ONNX file, or a part of one")
    return found


def _renaming(number: int, count: int) -> Rename:
    front = f"{number}/".encode()
    taken = b"input" if number == 0 else front + b"input"
    given = b"output" if number == count - 1 else f"{number + 1}/input".encode()
    known = {b"": b"", b"input": taken, b"output": given}  # an empty name is an input that is left out
    return lambda name: known.get(name, front + name)


def _renamed(data: memoryview, kind: str, rename: Rename) -> bytes:
    """Rewrite a message with other names in it, also in the graphs of its nodes."""
    made = bytearray()
    for number, value, raw in split_fields(data):
        if number not in _INSIDE[kind]:
            made += raw
            continue
        inside = _INSIDE[kind][number]
        made += field(
            number, rename(bytes(_message(value))) if inside is None else _renamed(_message(value), inside, rename)
        )
    return bytes(made)


def _message(value: int | memoryview | None) -> memoryview:
    if not isinstance(value, memoryview):
        refuse("it is no ONNX file")
    return value
