"""A jitted training step of JAX (see peer_graphs); batch norm uses the statistics of the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from peer_graphs import Operator, read_request, serve

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


OPERATORS: dict[str, Operator] = {
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


def main() -> None:
    request = read_request()
    request.graphs.check(OPERATORS, "JAX")
    constants = {name: jnp.asarray(value) for name, value in request.graphs.constants.items()}
    weights = {name: jnp.asarray(value) for name, value in request.graphs.weights.items()}
    x, labels = jnp.asarray(request.x), jnp.asarray(request.labels)

    def loss_of(weights: dict[str, Any], x: Any, labels: Any) -> Any:
        scores = request.graphs.run(OPERATORS, {**weights, **constants}, x)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1).mean()

    step = jax.jit(jax.value_and_grad(loss_of))
    loss, _ = jax.block_until_ready(step(weights, x, labels))
    serve(float(loss), lambda: jax.block_until_ready(step(weights, x, labels)))


if __name__ == "__main__":
    main()
