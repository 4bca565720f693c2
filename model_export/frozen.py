"""Frozen weights: in one file that every graph of a bundle reads, as numbers of 32, 16, 8 or 4 bits.

    float32   as they are
    float16   rounded; a Cast makes them float32 again
    int8      a row of a matrix has one scale, w = q·scale
    int4      32 neighbours in a row have a scale and a least value (float16), w = q·scale + least with q from 0 to 15;
              two lie in a byte, the first 16 in the low halves: 5 bits for each weight. A matrix that came in blocks of
              8 bits, w = q·scale with a float16 for 32 neighbours, keeps them (GGUF's Q4_1 and Q8_0 stay as they are)

The graphs make a weight anew wherever they need it, and let it go at once: between forward and backward pass only the
file has it. Gradients are those of the numbers that come of it, exactly: `read_frozen` computes the same ones.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edge_runtime.bundle_files import file_ref
from federation.manifest import FROZEN_NAME, FileRef, Manifest, Storage
from federation.safetensors_codec import PREFIX, decode_header, encode_header, header_length
from model_export.autodiff.engine import Context
from model_export.graph import Graph, Shape, attributes, inputs_with_subgraphs, producers
from model_export.layers import LayerGraph, with_helpers

LEAST = 4096  # elements of a weight that goes into the file; smaller ones stay in the graphs
BLOCK = 32  # neighbours with one scale, int4
ALIGNMENT = 64
MOST_HEADER = 64 << 20
# Parts of a weight, by how their names end.
HALF, BYTES, NIBBLES, SCALE, LOW = ENDINGS = "::f16", "::i8", "::u4", "::scale", "::least"
MADE = re.compile(r"(.*/stored[0-9]+)[.][0-9]+")  # names of nodes that compute a weight from its parts
_SMALLEST_HALF = 2.0**-24
_TYPES: Final = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8}


def pack(weight: np.ndarray, storage: Storage) -> dict[str, np.ndarray]:
    """Turn a weight into what is stored of it: of what is no matrix float16, of rows that int4 cannot part int8."""
    if storage == "float32":
        return {"": weight}
    if storage == "float16" or weight.ndim != 2:
        return {HALF: weight.astype(np.float16)}
    if storage == "int8" or weight.shape[1] % BLOCK:
        scale = np.maximum(np.abs(weight).max(axis=1) / 127, np.finfo(np.float32).tiny).astype(np.float32)
        return {BYTES: np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8), SCALE: scale}
    blocks = weight.reshape(len(weight), -1, BLOCK)
    if (kept := _bytes_of_blocks(blocks)) is not None:
        return kept
    low = blocks.min(axis=2, keepdims=True).astype(np.float16)
    span = blocks.max(axis=2, keepdims=True) - low.astype(np.float32)
    scale = np.maximum(span / 15, _SMALLEST_HALF).astype(np.float16)
    numbers = np.rint((blocks - low.astype(np.float32)) / scale.astype(np.float32))
    return pack_nibbles(np.clip(numbers, 0, 15).astype(np.uint8), scale, low)


def _bytes_of_blocks(blocks: np.ndarray) -> dict[str, np.ndarray] | None:
    """The bytes and scales of a matrix that was made of such; None: it was not."""
    scale = np.maximum(np.abs(blocks).max(axis=2, keepdims=True) / 127, _SMALLEST_HALF).astype(np.float16)
    numbers = np.clip(np.rint(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
    parts = {BYTES: numbers, SCALE: scale}
    return parts if np.array_equal(unpack(parts), blocks.reshape(len(blocks), -1)) else None


def pack_nibbles(numbers: np.ndarray, scale: np.ndarray, low: np.ndarray) -> dict[str, np.ndarray]:
    """Put numbers from 0 to 15, by row, block and place, into bytes."""
    half = BLOCK // 2
    return {NIBBLES: numbers[..., :half] | (numbers[..., half:] << 4), SCALE: scale, LOW: low}


def unpack(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Compute the float32 weight that the graphs compute, to the bit."""
    if HALF in parts:
        return parts[HALF].astype(np.float32)
    if BYTES in parts and parts[BYTES].ndim == 3:
        values = parts[BYTES].astype(np.float32) * parts[SCALE].astype(np.float32)
        return np.asarray(values.reshape(len(values), -1))
    if BYTES in parts:
        return np.asarray(parts[BYTES].astype(np.float32) * parts[SCALE][:, None])
    if NIBBLES in parts:
        packed = parts[NIBBLES]
        numbers = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32)
        scale, low = (parts[ending].astype(np.float32) for ending in (SCALE, LOW))
        return np.asarray((numbers * scale + low).reshape(len(packed), -1))
    return parts[""]


# -- the graph ---------------------------------------------------------------------------------------------------------


def freeze(graph: Graph, names: Iterable[str], storage: Storage | None) -> None:
    """Take weights out of training; with a storage the large ones go into the file."""
    for name in names:
        weight = graph.constants[name] = graph.weights.pop(name)
        graph.fixed_rows.pop(name, None)
        if storage is not None and weight.size >= LEAST:
            _store(graph, name, pack(weight, storage))


def _store(graph: Graph, name: str, parts: Mapping[str, np.ndarray]) -> None:
    """Let the graph compute a weight from its stored parts, wherever it is first used."""
    for ending, array in parts.items():
        graph.constants[name + ending] = array
        graph.stored.add(name + ending)
        graph.shapes[name + ending], graph.dtypes[name + ending] = array.shape, array.dtype
    if "" in parts:
        return
    del graph.constants[name]
    for node in [node for node in graph.nodes if node.op_type == "Gather" and node.input[0] == name]:
        _insert(graph, node, _write_rows(graph, name, parts, node), replaces=True)
    users = [node for node in graph.nodes if name in inputs_with_subgraphs(node)]
    if users:
        _insert(graph, users[0], list(_write_whole(graph, name, parts)))


def _insert(graph: Graph, at: NodeProto, nodes: Sequence[NodeProto], *, replaces: bool = False) -> None:
    place = next(index for index, node in enumerate(graph.nodes) if node is at)
    graph.nodes[place : place + replaces] = nodes


class _Writer:
    """Writes nodes whose values are named after what they lead to, with the shapes that a graph has to know."""

    def __init__(self, graph: Graph, result: str, module: str) -> None:
        self.graph = graph
        self.result = result
        self.prefix = f"{module.strip('/')}/stored{zlib.crc32(result.encode())}"
        self.nodes: list[NodeProto] = []

    def __call__(self, op: str, shape: tuple[int | None, ...], kind: Any, *inputs: str, **attrs: Any) -> str:
        name = f"{self.result}::{len(self.nodes)}"
        self.graph.shapes[name], self.graph.dtypes[name] = shape, np.dtype(kind)
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"{self.prefix}.{len(self.nodes)}", **attrs))
        return name

    def constant(self, ending: str, value: np.ndarray) -> str:
        name = f"{self.result}::{ending}"
        self.graph.constants[name] = value
        self.graph.shapes[name], self.graph.dtypes[name] = value.shape, value.dtype
        return name

    def done(self) -> list[NodeProto]:
        """Give the last value the name of the result."""
        self.nodes[-1].output[0] = self.result
        return self.nodes


def _write_whole(graph: Graph, name: str, parts: Mapping[str, np.ndarray]) -> list[NodeProto]:
    write = _Writer(graph, name, name.rpartition(".")[0])
    _write_value(write, parts, lambda ending: name + ending, graph.shapes[name][:1])
    return write.done()


def _write_rows(graph: Graph, name: str, parts: Mapping[str, np.ndarray], lookup: NodeProto) -> list[NodeProto]:
    """Look rows up before they become float32: a table of fifty thousand words never does as a whole."""
    result, numbers = lookup.output[0], lookup.input[1]
    write, inner = _Writer(graph, result, lookup.name.rpartition("/")[0]), graph.shapes[result][:-1]

    def rows(ending: str) -> str:
        part = parts[ending]
        return write("Gather", (*inner, *part.shape[1:]), part.dtype, name + ending, numbers, axis=0)

    _write_value(write, parts, rows, inner)
    return write.done()


class _RowWriter:
    """Writes the same nodes where gradients are written, which asks for no shapes."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self, op: str, shape: Shape, kind: Any, *inputs: str, **attrs: Any) -> str:
        return self.context.op(op, *inputs, **attrs)

    def constant(self, ending: str, value: np.ndarray) -> str:
        return self.context.constant(value)


def write_rows_of(context: Context, graph: Graph, name: str, start: int, stop: int) -> str:
    """Write nodes that compute some consecutive rows of a matrix, stored or not, and nothing of the others."""
    endings = [ending for ending in ENDINGS if name + ending in graph.stored]
    parts = {ending: graph.constants[name + ending] for ending in endings}

    def rows(ending: str) -> str:
        return context.op("Slice", name + ending, [start], [stop], [0])

    return _write_value(_RowWriter(context), parts, rows, (stop - start,)) if parts else rows("")


def _write_value(
    write: _Writer | _RowWriter, parts: Mapping[str, np.ndarray], read: Callable[[str], str], inner: Shape
) -> str:
    """Compute rows from their parts; `read` gives those of an ending, `inner` is the shape in front of a row."""
    if HALF in parts:
        return write("Cast", (*inner, *parts[HALF].shape[1:]), np.float32, read(HALF), to=TensorProto.FLOAT)
    if BYTES in parts and parts[BYTES].ndim == 2:
        return _write_scaled(write, (*inner, parts[BYTES].shape[1]), read(BYTES), read(SCALE))
    blocks = (*inner, parts[SCALE].shape[1])
    if BYTES in parts:
        numbers = write("Cast", (*blocks, BLOCK), np.float32, read(BYTES), to=TensorProto.FLOAT)
        value = _write_times(write, blocks, numbers, read(SCALE))
    else:
        scaled = _write_times(write, blocks, _write_numbers(write, blocks, read(NIBBLES)), read(SCALE))
        low = write("Cast", (*blocks, 1), np.float32, read(LOW), to=TensorProto.FLOAT)
        value = write("Add", (*blocks, BLOCK), np.float32, scaled, low)
    whole = (*inner, blocks[-1] * BLOCK)
    known = np.array(whole if len(inner) == 1 else [*(0 for _ in inner), -1], np.int64)
    return write("Reshape", whole, np.float32, value, write.constant("shape", known))


def _write_scaled(write: _Writer | _RowWriter, shape: Shape, numbers: str, scale: str) -> str:
    """Not by DequantizeLinear: the runtime's optimiser moves it and what it belongs to, differently in each version."""
    found = write("Cast", shape, np.float32, numbers, to=TensorProto.FLOAT)
    axis = write.constant("last", np.array([-1], np.int64))
    return write("Mul", shape, np.float32, found, write("Unsqueeze", (*shape[:-1], 1), np.float32, scale, axis))


def _write_times(write: _Writer | _RowWriter, blocks: Shape, numbers: str, scale: str) -> str:
    """Numbers times the scale of their block."""
    column = write("Cast", (*blocks, 1), np.float32, scale, to=TensorProto.FLOAT)
    return write("Mul", (*blocks, BLOCK), np.float32, numbers, column)


def _write_numbers(write: _Writer | _RowWriter, blocks: Shape, packed: str) -> str:
    """Take numbers of four bits out of bytes, as float32."""
    half, whole = (*blocks, BLOCK // 2), (*blocks, BLOCK)
    first = write("BitwiseAnd", half, np.uint8, packed, write.constant("mask", np.array(15, np.uint8)))
    shift = write.constant("shift", np.array(4, np.uint8))
    second = write("BitShift", half, np.uint8, packed, shift, direction="RIGHT")
    both = write("Concat", whole, np.uint8, first, second, axis=-1)
    return write("Cast", whole, np.float32, both, to=TensorProto.FLOAT)


def remake_frozen(context: Context, graph: Graph, nodes: Sequence[NodeProto]) -> None:
    """Let the backward pass compute again what follows from stored weights alone, so that it does not live so long."""
    derived: dict[str, NodeProto] = {}
    for node in nodes:
        inputs = inputs_with_subgraphs(node)
        known = all(name in graph.constants or name in derived for name in inputs)
        if known and any(name in graph.stored or name in derived for name in inputs):
            derived.update(dict.fromkeys(node.output, node))

    def again(name: str) -> str:
        node = derived.get(name)
        if node is None:
            return name
        return context.op(node.op_type, *map(again, node.input), **attributes(node))

    for name in derived:
        context.remakes[name] = lambda name=name: again(name)  # type: ignore[misc]


def without_double_transposes(nodes: Sequence[NodeProto]) -> None:
    """Read what was transposed twice from where it came; nodes that need the rest keep it."""
    maker = producers(nodes)
    for node in nodes:
        for index, name in enumerate(node.input):
            outer = maker.get(name)
            inner = maker.get(outer.input[0]) if outer is not None and outer.op_type == "Transpose" else None
            if outer is None or inner is None or inner.op_type != "Transpose":
                continue
            one, two = (list(attributes(each).get("perm", ())) for each in (outer, inner))
            if one and [two[place] for place in one] == list(range(len(one))):
                node.input[index] = inner.input[0]


def stored_elements(graph: Graph, layer: LayerGraph) -> int:
    """Count the elements of stored weights that a layer reads."""
    used = {name for node in with_helpers(graph, layer.nodes) for name in inputs_with_subgraphs(node)}
    main = [name for name in used & graph.stored if not name.endswith((SCALE, LOW))]
    return sum(graph.constants[name].size * (2 if name.endswith(NIBBLES) else 1) for name in main)


# -- the file ----------------------------------------------------------------------------------------------------------


def write_frozen(directory: Path, graph: Graph) -> FileRef | None:
    """Write the stored parts, and note where each lies; None: there are none."""
    if not graph.stored:
        return None
    arrays = {name: graph.constants[name] for name in sorted(graph.stored)}
    kinds = {np.dtype(kind): name for name, kind in _TYPES.items()}
    # Wide numbers first: so each begins at a multiple of its size.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    entries = [(name, array.shape) for name, array in ordered]
    dtypes = {name: kinds[array.dtype] for name, array in arrays.items()}
    head = encode_header(entries, ALIGNMENT, None, dtypes)
    place = len(head)
    with (directory / FROZEN_NAME).open("wb") as file:
        file.write(head)
        for name, _ in entries:
            data = np.ascontiguousarray(arrays[name])
            file.write(data.data)
            graph.places[name] = (place, data.nbytes)
            place += data.nbytes
    return file_ref(directory, FROZEN_NAME)


def read_frozen(directory: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Read the frozen weights of a bundle, as float32, by their names in the model."""
    if manifest.stored is None:
        return {}
    data = (directory / manifest.stored.name).read_bytes()
    length = header_length(data[:PREFIX], min(MOST_HEADER, len(data) - PREFIX))
    header, start = decode_header(data[PREFIX : PREFIX + length], any_dtype=True), PREFIX + length
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, offset in header.offsets.items():
        kind, shape = _TYPES[header.dtypes[name]], tuple(header.shapes[name])
        array = np.frombuffer(data, kind, int(np.prod(shape)), start + offset).reshape(shape)
        own, ending = _owner(name)
        parts.setdefault(own, {})[ending] = array
    return {name: unpack(found) for name, found in parts.items()}


def _owner(name: str) -> tuple[str, str]:
    """The weight that a stored part belongs to, and which part it is."""
    ending = next((each for each in ENDINGS if name.endswith(each)), "")
    return name.removesuffix(ending), ending


def restore(graph: onnx.GraphProto, frozen: Mapping[str, np.ndarray]) -> None:
    """Put float32 constants in the place of stored weights: the graph then stands alone."""
    stored = [item.name for item in graph.initializer if any(e.value == FROZEN_NAME for e in item.external_data)]
    owners = {name: _owner(name)[0] for name in stored}
    nodes = list(_restored(graph.node, owners))
    used = {name for node in nodes for name in inputs_with_subgraphs(node)}
    kept = [item for item in graph.initializer if item.name in used and item.name not in owners]
    kept += [numpy_helper.from_array(frozen[name], name) for name in sorted(set(owners.values())) if name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)


def _restored(nodes: Sequence[NodeProto], owners: Mapping[str, str]) -> Iterator[NodeProto]:
    """Leave out what computes weights; a lookup of stored rows is one of the weight again."""
    groups: dict[str, list[NodeProto]] = {}
    for node in nodes:
        if made := MADE.fullmatch(node.name):
            groups.setdefault(made[1], []).append(node)
    for node in nodes:
        made = MADE.fullmatch(node.name)
        if made is None:
            yield node
            continue
        own = groups[made[1]]
        lookup = next((n for n in own if n.op_type == "Gather" and n.input[0] in owners), None)
        if node is own[-1] and lookup is not None:
            names = [owners[lookup.input[0]], lookup.input[1]]
            yield helper.make_node("Gather", names, node.output, name=node.name, axis=0)
