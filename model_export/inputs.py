"""Models that take several inputs, as ones that take a row (federation/inputs.py): PyTorch modules and ONNX files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from federation.errors import InputError
from federation.inputs import NamedInput, columns, pack, row_dtype, row_size
from federation.manifest import Manifest
from model_export.shapes import sample_input

MASK = "mask"  # in the name of an input of zeros and ones: ones first, as padding masks are
ROW = "embrace.row"


def sample_row(inputs: Sequence[NamedInput], batch: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Draw random rows of the right types and ranges."""
    arrays = {item.name: _sample(item, batch, seed + number) for number, item in enumerate(inputs)}
    return pack(inputs, arrays)


def _sample(item: NamedInput, batch: int, seed: int) -> np.ndarray[Any, Any]:
    truth = item.dtype == "bool" or item.vocabulary == 2
    if truth and MASK in item.name and item.shape:
        lengths = np.random.default_rng(seed).integers(1, item.shape[-1] + 1, (batch, *item.shape[:-1], 1))
        return np.asarray(np.arange(item.shape[-1]) < lengths)
    dtype = "int64" if item.dtype == "bool" else item.dtype
    found: np.ndarray[Any, Any] = sample_input(item.shape, dtype, item.vocabulary, batch, seed)
    return found


def sample_of(manifest: Manifest, batch: int, seed: int) -> np.ndarray[Any, Any]:
    """Draw random data that a bundle's model takes."""
    if manifest.inputs is not None:
        return sample_row(manifest.inputs, batch, seed)
    found: np.ndarray[Any, Any] = sample_input(
        manifest.input.shape, manifest.input.dtype, manifest.vocabulary, batch, seed
    )
    return found


def called_with_row(module: nn.Module, inputs: Sequence[NamedInput]) -> Callable[[Tensor], Any]:
    """Make a function of rows that calls a module by the names of its arguments; those of `*args` come in order."""
    forward = module.forward
    known = inspect.signature(forward).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    by_name = any_name or all(item.name in known for item in inputs)
    if not by_name and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in known.values()):
        wrong = next(item.name for item in inputs if item.name not in known)
        raise InputError(f"the model has no input {wrong!r}: its forward takes {', '.join(known) or 'none'}")

    def call(row: Tensor) -> Any:
        parts = parts_of(row, inputs)
        return forward(**parts) if by_name else forward(*parts.values())

    return call


def parts_of(row: Tensor, inputs: Sequence[NamedInput]) -> dict[str, Tensor]:
    """Take a row apart."""
    where = columns(inputs)
    return {item.name: _part(row[:, where[item.name]], item) for item in inputs}


def _part(values: Tensor, item: NamedInput) -> Tensor:
    values = values.reshape(-1, *item.shape)
    if item.dtype == "float32":
        return values  # in float64 where a step is computed precisely
    return values.long() if item.dtype == "int64" else values != 0


def take_row(model: onnx.ModelProto, inputs: Sequence[NamedInput]) -> None:
    """Let an ONNX model take a row in place of its inputs."""
    graph = model.graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    nodes = []
    for item in inputs:
        where, name = columns(inputs)[item.name], item.name
        numbers = {"start": [where.start], "stop": [where.stop], "axis": [1], "shape": [-1, *item.shape]}
        for key, value in numbers.items():
            graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), f"{ROW}.{name}.{key}"))
        cut, shaped = f"{ROW}.{name}.cut", f"{ROW}.{name}.shaped"
        nodes += [
            helper.make_node(
                "Slice", [ROW, *(f"{ROW}.{name}.{key}" for key in ("start", "stop", "axis"))], [cut], f"{cut}.n"
            ),
            helper.make_node("Reshape", [cut, f"{ROW}.{name}.shape"], [shaped], f"{shaped}.n"),
            helper.make_node("Cast", [shaped], [name], f"{ROW}.{name}.cast", to=kinds[name]),
        ]
    kept = [value for value in graph.input if value.name not in {item.name for item in inputs}]
    kind = TensorProto.FLOAT if row_dtype(inputs) == "float32" else TensorProto.INT64
    row = helper.make_tensor_value_info(ROW, kind, ["N", row_size(inputs)])
    del graph.input[:]
    graph.input.extend([row, *kept])
    nodes += list(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)
