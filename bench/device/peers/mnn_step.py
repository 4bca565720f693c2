"""A training step of MNN (see peer_graphs).

MNN differentiates expressions that are not evaluated yet, hence `lazy_eval`. The wheels from 3.2 to 3.6 leave out the
gradients of products, sums and roots without a word; 3.1 has them. The graph is made once and its input written before
every step, and all gradients are read as one vector: read one by one, each would run the network again.
"""

from __future__ import annotations

import sys
from typing import Any

import MNN.expr as F
import numpy as np
from MNN import nn, optim
from numpy.typing import NDArray
from peer_graphs import read_request, same_pads, serve


def constant(value: NDArray[Any]) -> Any:
    """Hold an array of float32 or int32 in MNN."""
    kind = F.int if value.dtype == np.int32 else F.float
    return F.const(np.ascontiguousarray(value), list(value.shape), F.NCHW, kind)


def weight(value: NDArray[Any]) -> Any:
    """Hold an array that gets a gradient."""
    held = constant(value)
    held.fix_as_trainable()
    return held


def conv(attrs: dict[str, Any], x: Any, kernel: Any, bias: Any = None) -> Any:
    if bias is None:
        bias = constant(np.zeros(kernel.shape[0], np.float32))
    return F.conv2d(
        F.convert(x, F.NC4HW4),
        kernel,
        bias,
        stride=attrs.get("strides", [1, 1]),
        padding=same_pads(attrs),
        dilate=attrs.get("dilations", [1, 1]),
        group=attrs.get("group", 1),
        padding_mode=F.CAFFE,
    )


def batch_norm(attrs: dict[str, Any], x: Any, scale: Any, bias: Any, *statistics: Any) -> Any:
    plain, shape = F.convert(x, F.NCHW), [1, -1, 1, 1]
    centred = plain - F.reduce_mean(plain, [0, 2, 3], True)
    variance = F.reduce_mean(F.square(centred), [0, 2, 3], True)
    normal = centred * F.rsqrt(variance + F.scalar(attrs.get("epsilon", 1e-5)))
    return F.convert(normal * F.reshape(scale, shape) + F.reshape(bias, shape), F.NC4HW4)


def gemm(attrs: dict[str, Any], a: Any, b: Any, bias: Any) -> Any:
    if attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0:
        sys.exit("Gemm with factors is not written for MNN here")
    return F.matmul(a, b, bool(attrs.get("transA")), bool(attrs.get("transB"))) + F.reshape(bias, [1, -1])


def max_pool(attrs: dict[str, Any], x: Any) -> Any:
    if any(same_pads(attrs)):
        sys.exit("MaxPool with padding is not written for MNN here")
    return F.max_pool(F.convert(x, F.NC4HW4), attrs["kernel_shape"], attrs["strides"])


OPERATORS = {
    "Add": lambda attrs, a, b: a + b,
    "BatchNormalization": batch_norm,
    "Conv": conv,
    "Flatten": lambda attrs, x: F.reshape(F.convert(x, F.NCHW), [x.shape[0], -1]),
    "Gemm": gemm,
    "GlobalAveragePool": lambda attrs, x: F.reduce_mean(F.convert(x, F.NCHW), [2, 3], True),
    "Identity": lambda attrs, x: x,
    "MaxPool": max_pool,
    "Relu": lambda attrs, x: F.relu(x),
}


def flat(value: Any) -> Any:
    return F.reshape(F.convert(value, F.NCHW), [-1])


def main() -> None:
    request = read_request()
    request.graphs.check(OPERATORS, "MNN")
    F.lazy_eval(True)
    F.set_thread_number(request.threads)
    weights = {name: weight(value) for name, value in request.graphs.weights.items()}
    constants = {name: None for name in request.graphs.constants}  # statistics of batch norm, which the batch replaces
    x = F.placeholder(list(request.x.shape), F.NCHW)
    x.write(request.x)
    scores = request.graphs.run(OPERATORS, {**weights, **constants}, x)
    wanted = F.one_hot(constant(request.labels.astype(np.int32)), scores.shape[1])
    loss = nn.loss.cross_entropy(F.softmax(scores), wanted)
    one = F.const([1.0], loss.shape, F.NCHW)
    found, gradients = optim.Grad(nn.Module()).grad([loss], [one], list(weights.values()))
    if len(found) != len(weights):
        sys.exit(f"MNN has gradients for {len(found)} of {len(weights)} weights only")
    vector = F.concat([flat(value) for value in (F.reshape(loss, [1]), *gradients)], 0)

    def step() -> NDArray[np.float32]:
        x.write(request.x)
        values: NDArray[np.float32] = vector.read()
        return values

    serve(float(step()[0]), step)


if __name__ == "__main__":
    main()
