"""Rewrite the graph of frozen layers, so that most of it runs in 8 bits.

Convolutions, matrix products with constant weights, and additions and pooling between them take bytes. A batch norm
goes into the weights of the convolution in front of it, a ReLU into the range of what comes out. All else is float32.

A value x is the byte round(x / scale) + zero, where 256 such bytes span the range of x that was measured. Weights have
a scale for each output channel and no zero. They are from -64 to 64, which takes 7 of 8 bits: many x86 processors add
pairs of products in 16 bits, which hold 2 · 255 · 64 and no more.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_runtime import onnx_write
from edge_runtime.onnx_file import Node, Tensor, read_model, split_fields

MICROSOFT = "com.microsoft"  # where onnxruntime has operators on bytes that ONNX lacks
LARGEST_WEIGHT = 64
MOST_TERMS = 1 << 16  # of a sum of 255 · 64, to which a bias is added: it stays within 32 bits
LARGEST_BIAS = 1 << 30
BLOCK = 1 << 18  # weights that are rounded at once
_SAME_VALUES = {"Flatten", "Identity", "MaxPool", "Reshape", "Transpose"}  # operators that give some of what they take
_FLOAT = onnx_write.DTYPES["float32"]
_TINY = np.finfo(np.float32).tiny

Floats = NDArray[np.float32]
Range = tuple[float, float]
Kind = Literal["float", "conv", "product", "add", "pool", "same"]


class NotInEightBits(Exception):
    """Says why layers stay float32."""


@dataclass(frozen=True)
class _Step:
    """A node that runs as this kind, with the batch norm and the ReLU behind it that it takes over."""

    kind: Kind
    node: Node
    output: str
    norm: Node | None = None


class Int8Graph:
    """The graph of some layers, and what of it takes bytes."""

    def __init__(self, graph: bytes, folder: Path) -> None:
        """Read a float graph whose weights lie in `folder`; NotInEightBits if nothing in it can take bytes."""
        read = read_model(graph).graph
        fields = split_fields(memoryview(graph))
        self._versions = [bytes(raw) for number, _, raw in fields if number != onnx_write.GRAPH]
        self._input = [onnx_write.field(onnx_write.INPUT, bytes(value.message)) for value in read.inputs]
        self._output = [onnx_write.field(onnx_write.OUTPUT, bytes(value.message)) for value in read.outputs]
        self._nodes = read.nodes
        self._constants = _Constants(read.tensors, folder)
        if any(node.graphs for node in self._nodes):
            raise NotInEightBits("they have graphs inside of nodes")
        self._steps = self._plan()
        if not any(step.kind in ("conv", "product") for step in self._steps):
            raise NotInEightBits("they have no convolution and no matrix product of float32 with constant weights")

    @property
    def float_operators(self) -> list[str]:
        """Name the operators that stay float32."""
        return sorted({step.node.operator for step in self._steps if step.kind == "float"})

    def measuring(self) -> tuple[list[bytes], list[str]]:
        """Write the float graph with the least and the largest of each value that takes bytes as its outputs.

        The names of these values come with it, in the order of the pairs.
        """
        names = list(dict.fromkeys(name for step in self._steps for name in _ranged(step)))
        made = [_written(node) for node in self._nodes] + self._constants.written()
        for name in names:
            for operator in ("ReduceMin", "ReduceMax"):
                found = f"{name}:{operator}"
                made.append(onnx_write.node(operator, [name], [found], [onnx_write.integer("keepdims", 0)]))
                made.append(onnx_write.output(found))
        return self._model([*made, *self._input]), names

    def write(self, ranges: Mapping[str, Range]) -> list[bytes]:
        """Write the graph in 8 bits, in pieces; NotInEightBits if weights or ranges are not finite."""
        writer = _Writer(self._constants, ranges)
        return self._model([*writer.write(self._steps), *self._input, *self._output])

    def _model(self, graph: Sequence[bytes]) -> list[bytes]:
        versions = [*self._versions, onnx_write.opset(MICROSOFT, 1)]
        return onnx_write.model(versions, [onnx_write.field(onnx_write.NAME, b"int8"), *graph])

    def _plan(self) -> list[_Step]:
        """Decide node by node, in their order."""
        uses = Counter(["output", *(name for node in self._nodes for name in node.inputs)])
        taker = {name: node for node in self._nodes for name in node.inputs}
        as_bytes: set[str] = set()  # values that are there as bytes
        absorbed: set[int] = set()
        steps: list[_Step] = []

        def absorb(name: str, suits: Callable[[Node], bool]) -> Node | None:
            """Take the only node that takes a value, if it suits."""
            only = taker.get(name) if uses[name] == 1 else None
            if only is None or only.inputs[0] != name or not suits(only):
                return None
            absorbed.add(id(only))
            return only

        for node in self._nodes:
            if id(node) in absorbed:
                continue
            kind, norm, output = self._kind(node, as_bytes), None, node.outputs[0]
            if kind == "conv":
                norm = absorb(output, self._is_norm)
                output = norm.outputs[0] if norm else output
            if kind in ("conv", "add"):
                relu = absorb(output, self._is_relu)
                output = relu.outputs[0] if relu else output
            if kind in ("conv", "product"):
                as_bytes.add(node.inputs[0])
            if kind not in ("float", "product"):
                as_bytes.add(output)
            steps.append(_Step(kind, node, output, norm))
        return steps

    def _kind(self, node: Node, as_bytes: set[str]) -> Kind:
        if node.domain not in ("", "ai.onnx"):
            return "float"
        if node.operator == "Conv" and self._constants.has(node.inputs[1:]):
            weights = self._constants.shape(node.inputs[1])
            return "conv" if len(weights) == 4 and math.prod(weights[1:]) <= MOST_TERMS else "float"
        if node.operator in ("Gemm", "MatMul") and self._is_product(node):
            return "product"
        if node.operator == "Add" and as_bytes.issuperset(node.inputs):
            return "add"
        if node.operator == "GlobalAveragePool" and node.inputs[0] in as_bytes:
            return "pool"
        plain = node.operator in _SAME_VALUES and len(node.outputs) == 1
        return "same" if plain and node.inputs[0] in as_bytes else "float"

    def _is_product(self, node: Node) -> bool:
        if not self._constants.has(node.inputs[1:]) or _number(node, "transA", 0):
            return False
        weights, *bias = map(self._constants.shape, node.inputs[1:])
        plain = _number(node, "alpha", 1) == _number(node, "beta", 1) == 1
        return plain and len(weights) == 2 and max(weights) <= MOST_TERMS and all(len(shape) == 1 for shape in bias)

    def _is_norm(self, node: Node) -> bool:
        infers = node.operator == "BatchNormalization" and not _number(node, "training_mode", 0)
        return infers and self._constants.has(node.inputs[1:])

    def _is_relu(self, node: Node) -> bool:
        """Whether a node cuts off what is below zero; above, bytes end where the measured range does."""
        if node.operator == "Relu":
            return True
        clips = node.operator == "Clip" and len(node.inputs) > 1 and self._constants.has(node.inputs[1:])
        return clips and not self._constants.value(node.inputs[1]).any()


class _Constants:
    """Initialisers of a graph; values that lie in a file are read where they lie."""

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._folder = folder
        self._files: dict[str, NDArray[np.uint8]] = {}

    def has(self, names: Sequence[str]) -> bool:
        """Whether there are some, and all of them are constants of float32."""
        found = [self._tensors.get(name) for name in names]
        return bool(found) and all(tensor is not None and tensor.dtype == _FLOAT for tensor in found)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def value(self, name: str) -> Floats:
        tensor = self._tensors[name]
        inside = [value for number, value, _ in split_fields(tensor.message) if number in (4, 9)]  # packed, or raw
        if tensor.external is None:
            return np.frombuffer(inside[0], "<f4").reshape(tensor.shape)  # type: ignore[arg-type]
        place = tensor.external
        if place["location"] not in self._files:
            self._files[place["location"]] = np.memmap(self._folder / place["location"], np.uint8, "r")
        start = int(place.get("offset", 0))
        found = self._files[place["location"]][start : start + 4 * math.prod(tensor.shape)]
        return found.view("<f4").reshape(tensor.shape)

    def written(self, names: set[str] | None = None) -> list[bytes]:
        """Return those with some names, or all, as they were written."""
        kept = [tensor for name, tensor in self._tensors.items() if names is None or name in names]
        return [onnx_write.field(onnx_write.TENSOR, bytes(tensor.message)) for tensor in kept]


class _Writer:
    """Writes steps. The bytes of a value x are called `x:8`; x itself is made only where float32 is taken."""

    def __init__(self, constants: _Constants, ranges: Mapping[str, Range]) -> None:
        self._constants = constants
        self._ranges = ranges
        self._made: list[bytes] = []
        self._bytes: dict[str, list[str]] = {}  # of a value: the names of its bytes, its scale and its zero
        self._scales: dict[str, float] = {}
        self._floats: set[str] = {"input"}

    def write(self, steps: Sequence[_Step]) -> list[bytes]:
        """Return the fields of the graph, but for its ends."""
        write = {
            "float": self._float,
            "conv": self._conv,
            "product": self._product,
            "add": self._add,
            "pool": self._pool,
            "same": self._same,
        }
        for step in steps:
            write[step.kind](step)
        self._as_float("output")
        kept = {name for step in steps if step.kind in ("float", "same") for name in step.node.inputs}
        return self._made + self._constants.written(kept)

    def _float(self, step: _Step) -> None:
        for name in step.node.inputs:
            self._as_float(name)
        self._made.append(_written(step.node))
        self._floats.update(step.node.outputs)

    def _same(self, step: _Step) -> None:
        source = step.node.inputs[0]
        x, scale, zero = self._bytes[source]
        self._bytes[step.output] = [f"{step.output}:8", scale, zero]
        self._scales[step.output] = self._scales[source]
        self._add_node(step.node.operator, [x, *step.node.inputs[1:]], f"{step.output}:8", _attributes(step.node))

    def _pool(self, step: _Step) -> None:
        y, *end = self._begin(step.output)
        self._add_node("QLinearGlobalAveragePool", [*self._bytes[step.node.inputs[0]], *end], y, domain=MICROSOFT)

    def _add(self, step: _Step) -> None:
        y, *end = self._begin(step.output)
        both = [name for value in step.node.inputs for name in self._bytes[value]]
        self._add_node("QLinearAdd", [*both, *end], y, domain=MICROSOFT)

    def _conv(self, step: _Step) -> None:
        x, *more = step.node.inputs
        taken = self._as_bytes(x)
        weights = self._constants.value(more[0])
        bias = self._constants.value(more[1]) if len(more) > 1 else np.zeros(len(weights), np.float32)
        if step.norm is not None:
            weights, bias = self._folded(step.norm, weights, bias)
        y, *end = self._begin(step.output)
        in_steps = bias.astype(np.float64) / self._scales[x]
        own, scales = self._rounded(weights.reshape(len(weights), -1), in_steps)
        w = self._add_weights(y, own.reshape(weights.shape), scales)
        self._add_constant(f"{y}:bias", np.rint(in_steps / scales).astype(np.int32))
        self._add_node("QLinearConv", [*taken, *w, *end, f"{y}:bias"], y, _attributes(step.node))

    def _product(self, step: _Step) -> None:
        """Write a product of bytes that gives float32, with its bias: the next operator may take that."""
        source, *more = step.node.inputs
        x, scale, zero = self._as_bytes(source)
        weights = self._constants.value(more[0])
        rows = weights if _number(step.node, "transB", 0) else weights.T
        own, scales = self._rounded(rows, np.zeros(len(rows)))
        w, factors, zeros = self._add_weights(step.output, own.T, scales)
        inputs = [x, w, scale, factors, zero, zeros]
        if len(more) > 1:
            inputs.append(f"{step.output}:bias")
            self._add_constant(inputs[-1], self._constants.value(more[1]))
        self._add_node("MatMulIntegerToFloat", inputs, step.output, domain=MICROSOFT)
        self._floats.add(step.output)

    def _folded(self, norm: Node, weights: Floats, bias: Floats) -> tuple[Floats, Floats]:
        """Put a batch norm into the weights of the convolution in front of it."""
        gain, shift, mean, variance = map(self._constants.value, norm.inputs[1:5])
        with np.errstate(all="ignore"):  # what is not finite is found below
            factor = gain / np.sqrt(variance + np.float32(_number(norm, "epsilon", 1e-5)))
            return weights * factor[:, None, None, None], (bias - mean) * factor + shift

    def _rounded(self, rows: Floats, bias: NDArray[np.float64]) -> tuple[NDArray[np.int8], Floats]:
        """Round weights, a row for each output; a row's scale is large enough for its bias, too."""
        largest = np.maximum(rows.max(axis=1), -rows.min(axis=1)).astype(np.float64)
        scales = np.maximum(largest / LARGEST_WEIGHT, np.abs(bias) / LARGEST_BIAS).astype(np.float32)
        if not np.isfinite(scales).all():
            raise NotInEightBits("weights in them are not finite")
        scales[scales < _TINY] = 1
        found = np.empty(rows.shape, np.int8)
        at_once = max(1, BLOCK // rows.shape[1])
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            found[part] = np.rint(rows[part] / scales[part, None])
        return found, scales

    def _as_bytes(self, name: str) -> list[str]:
        if name not in self._bytes:
            found, *end = self._begin(name)
            self._add_node("QuantizeLinear", [name, *end], found)
        return self._bytes[name]

    def _as_float(self, name: str) -> None:
        if name in self._bytes and name not in self._floats:
            self._add_node("DequantizeLinear", self._bytes[name], name)
            self._floats.add(name)

    def _begin(self, name: str) -> list[str]:
        """Write scale and zero of a value, so that 0.0 is one of its 256 numbers; name its bytes and both."""
        least, most = min(self._ranges[name][0], 0.0), max(self._ranges[name][1], 0.0)
        scale = float(np.float32((most - least) / 255))
        if not math.isfinite(scale):
            raise NotInEightBits("values in them are not finite")
        scale = scale if scale >= _TINY else 1.0
        names = [f"{name}:8", f"{name}:scale", f"{name}:zero"]
        self._add_constant(names[1], np.array(scale, np.float32))
        self._add_constant(names[2], np.array(min(round(-least / scale), 255), np.uint8))
        self._bytes[name] = names
        self._scales[name] = scale
        return names

    def _add_weights(self, name: str, weights: NDArray[np.int8], scales: Floats) -> list[str]:
        self._add_constant(f"{name}:w", weights)
        self._add_constant(f"{name}:w:scale", scales)
        self._add_constant(f"{name}:w:zero", np.zeros(len(scales), np.int8))
        return [f"{name}:w", f"{name}:w:scale", f"{name}:w:zero"]

    def _add_constant(self, name: str, value: NDArray[Any]) -> None:
        self._made += onnx_write.tensor(name, value)

    def _add_node(
        self, operator: str, inputs: Sequence[str], output: str, attributes: Sequence[bytes] = (), domain: str = ""
    ) -> None:
        self._made.append(onnx_write.node(operator, inputs, [output], attributes, domain))


def _ranged(step: _Step) -> tuple[str, ...]:
    """Name the values of a step whose ranges have to be known."""
    if step.kind == "conv":
        return step.node.inputs[0], step.output
    if step.kind == "product":
        return (step.node.inputs[0],)
    return (step.output,) if step.kind in ("add", "pool") else ()


def _written(node: Node) -> bytes:
    return onnx_write.node(node.operator, node.inputs, node.outputs, _attributes(node), node.domain)


def _attributes(node: Node) -> list[bytes]:
    return [bytes(message) for message in node.attributes.values()]


def _number(node: Node, name: str, otherwise: float) -> float:
    """Read an attribute that is a number."""
    for number, value, raw in split_fields(node.attributes.get(name, memoryview(b""))):
        if number == 2:
            return float(struct.unpack("<f", raw[-4:])[0])
        if number == 3 and isinstance(value, int):
            return value
    return otherwise
