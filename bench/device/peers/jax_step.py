"""A jitted training step of JAX, in an environment of its own: reads a request, then answers lines with lines.

    python jax_step.py REQUEST.json    {"graphs": [...], "input": "x.npy", "labels": "y.npy"}

It prints the loss first, then, for every line that it reads, the milliseconds of processor time and of the clock that
one step took. The graphs are the forward graphs of a bundle's layers; batch norm uses the statistics of the batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax
from onnx import numpy_helper

IMAGES = ("NCHW", "OIHW", "NCHW")


def pads_of(attrs: dict[str, Any]) -> list[tuple[int, int]]:
    begin_h, begin_w, end_h, end_w = attrs.get("pads", [0, 0, 0, 0])
    return [(begin_h, end_h), (begin_w, end_w)]


def conv(attrs: dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
    y = lax.conv_general_dilated(
        x,
        weight,
        window_strides=attrs.get("strides", [1, 1]),
        padding=pads_of(attrs),
        rhs_dilation=attrs.get("dilations", [1, 1]),
        dimension_numbers=IMAGES,
        feature_group_count=attrs.get("group", 1),
    )
    return y if bias is None else y + bias[:, None, None]


def batch_norm(attrs: dict[str, Any], x: Any, scale: Any, bias: Any, *statistics: Any) -> Any:
    mean = x.mean((0, 2, 3), keepdims=True)
    variance = jnp.square(x - mean).mean((0, 2, 3), keepdims=True)
    slope = scale[:, None, None] * lax.rsqrt(variance + attrs.get("epsilon", 1e-5))
    return (x - mean) * slope + bias[:, None, None]


def gemm(attrs: dict[str, Any], a: Any, b: Any, bias: Any = None) -> Any:
    a, b = (a.T if attrs.get("transA") else a), (b.T if attrs.get("transB") else b)
    y = attrs.get("alpha", 1.0) * (a @ b)
    return y if bias is None else y + attrs.get("beta", 1.0) * bias


def max_pool(attrs: dict[str, Any], x: Any) -> Any:
    window, strides = (1, 1, *attrs["kernel_shape"]), (1, 1, *attrs["strides"])
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, [(0, 0), (0, 0), *pads_of(attrs)])


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda attrs, a, b: a + b,
    "BatchNormalization": batch_norm,
    "Clip": lambda attrs, x, low=None, high=None: jnp.clip(x, low, high),
    "Conv": conv,
    "Flatten": lambda attrs, x: x.reshape(x.shape[0], -1),
    "Gemm": gemm,
    "GlobalAveragePool": lambda attrs, x: x.mean((2, 3), keepdims=True),
    "Identity": lambda attrs, x: x,
    "MaxPool": max_pool,
    "Relu": lambda attrs, x: jax.nn.relu(x),
}


class Model:
    """Graphs one after the other; weights of all of them by name."""

    def __init__(self, graphs: list[str]) -> None:
        self.graphs = [onnx.load(path).graph for path in graphs]
        held = {t.name: numpy_helper.to_array(t) for graph in self.graphs for t in graph.initializer}
        missing = {node.op_type for graph in self.graphs for node in graph.node} - OPERATORS.keys()
        if missing:
            sys.exit(f"{', '.join(sorted(missing))} is not written for JAX here")
        nodes = [node for graph in self.graphs for node in graph.node]
        statistics = {name for node in nodes if node.op_type == "BatchNormalization" for name in node.input[3:]}
        is_weight = {name: value.ndim > 0 and value.dtype == np.float32 for name, value in held.items()}
        self.weights = {name: jnp.asarray(v) for name, v in held.items() if is_weight[name] and name not in statistics}
        self.constants = {name: jnp.asarray(v) for name, v in held.items() if name not in self.weights}

    def loss(self, weights: dict[str, Any], x: Any, labels: Any) -> Any:
        for graph in self.graphs:
            values = {**weights, **self.constants, graph.input[0].name: x}
            for node in graph.node:
                attrs = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
                inputs = [values[name] if name else None for name in node.input]
                values[node.output[0]] = OPERATORS[node.op_type](attrs, *inputs)
            x = values[graph.output[0].name]
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).mean()


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    model = Model(request["graphs"])
    x, labels = jnp.asarray(np.load(request["input"])), jnp.asarray(np.load(request["labels"]))
    step = jax.jit(jax.value_and_grad(model.loss))
    loss, _ = jax.block_until_ready(step(model.weights, x, labels))
    print(json.dumps({"loss": float(loss)}), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        jax.block_until_ready(step(model.weights, x, labels))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps({"cpu": 1e3 * cpu, "wall": 1e3 * wall}), flush=True)


if __name__ == "__main__":
    main()
