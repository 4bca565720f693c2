"""Shapes by measurement: run the forward graph at two batch sizes and look.

ONNX shape inference gives up on the shape arithmetic that exporters write; running the graph never does. A
dimension that changes between the two runs follows the batch. The same two runs fold constants: a value that depends on
nothing but shapes, and is equal in both, is a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from federation.errors import InputError
from model_export.errors import ExportError

BATCHES = (2, 3)


def run_everything(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every intermediate value of a model, by name."""
    return run_values(model, feed, _made(model))


def run_values(model: onnx.ModelProto, feed: dict[str, np.ndarray], wanted: Collection[str]) -> dict[str, np.ndarray]:
    """Some values of a model, by name."""
    (found,) = _run(model, [feed], wanted)
    return found


def _made(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output if name]


def _run(
    model: onnx.ModelProto, feeds: Sequence[dict[str, np.ndarray]], wanted: Collection[str]
) -> list[dict[str, np.ndarray]]:
    """Some values of a model for each of several feeds of the same names; the runtime loads the model once."""
    held = {item.name: item for item in model.graph.initializer}
    constants = {name: numpy_helper.to_array(held[name]) for name in wanted if name in held}
    names = [name for name in wanted if name not in constants and name not in feeds[0]]
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    del wide.graph.output[:]
    wide.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # two or three samples: threads would wait for each other
    try:
        session = ort.InferenceSession(wide.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = [dict(zip(names, session.run(names, feed), strict=True)) if names else {} for feed in feeds]
    except Exception as error:  # onnxruntime raises several unrelated types
        raise ExportError(f"onnxruntime cannot run the forward graph: {_first_line(error)}") from None
    given = [{name: feed[name] for name in wanted if name in feed} for feed in feeds]
    return [one | constants | own for one, own in zip(found, given, strict=True)]


def sample_input(shape: tuple[int, ...], dtype: str, vocabulary: int | None, batch: int, seed: int = 0) -> Any:
    """Random data of the model's input type."""
    rng = np.random.default_rng(seed)
    try:
        np.dtype(dtype)
    except TypeError:
        raise InputError(f"input dtype {dtype!r} is no type; expected float32 or int64") from None
    if np.dtype(dtype).kind in "iu":
        tokens = rng.integers(0, vocabulary or 2, (batch, *shape)).astype(dtype)
        tokens.flat[0], tokens.flat[-1] = 0, (vocabulary or 2) - 1  # padding, if any, is usually the first id
        return tokens
    if np.dtype(dtype).kind != "f":
        raise InputError(f"input dtype {dtype!r} is not supported; expected a float or an integer type")
    return rng.standard_normal((batch, *shape)).astype(dtype)


def measure(model: onnx.ModelProto, input_name: str, samples: tuple[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """All values at both batch sizes."""
    first, second = _run(model, [{input_name: sample} for sample in samples], _made(model))
    return first, second


def symbolic_shape(first: tuple[int, ...], second: tuple[int, ...], name: str) -> tuple[int | None, ...]:
    """One shape out of two measured ones; None where the dimension follows the batch."""
    if len(first) != len(second):
        raise ExportError(f"value {name!r} changes its rank with the batch size")
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
