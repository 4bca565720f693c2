"""Run nodes of an ONNX graph by PyTorch, so that autograd can differentiate files that have no PyTorch module.

This is a reference and shares nothing with the rules: each operator is what PyTorch has under another name. An operator
that is not here, or a setting of one, is said by NotImplementedError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from onnx import NodeProto, TensorProto, numpy_helper
from torch import Tensor

from model_export.graph import attributes

Function = Callable[..., Any]
TYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
}


class TorchRun:
    """Values of a graph by name, computed node by node; batch norm and dropout as a training step has them."""

    def __init__(self, values: Mapping[str, Tensor], real: torch.dtype, masks: Callable[[str, Tensor], Tensor]) -> None:
        self.values = dict(values)
        self.real = real
        self.masks = masks  # by the output of a dropout and its input: what to multiply by
        self.statistics: dict[str, Tensor] = {}  # new values

    def run(self, nodes: Sequence[NodeProto]) -> None:
        for node in nodes:
            given = [self.values[name] if name else None for name in node.input]
            results = self._call(node, given)
            results = results if isinstance(results, (tuple, list)) else (results,)
            self.values.update(zip(node.output, results, strict=False))

    def _call(self, node: NodeProto, given: list[Tensor | None]) -> Any:
        options = attributes(node)
        if node.op_type == "BatchNormalization":
            return self._batch_norm(node, [x for x in given if x is not None], **options)
        if node.op_type == "Dropout":
            x = given[0]
            assert x is not None
            return x * self.masks(node.output[0], x)
        if node.op_type in ("Cast", "ConstantOfShape", "EyeLike"):
            return self._typed(node.op_type, given, options)
        function = OPERATORS.get(node.op_type)
        if function is None:
            raise NotImplementedError(node.op_type)
        return function(*given, **options)

    def _typed(self, kind: str, given: list[Tensor | None], options: dict[str, Any]) -> Tensor:
        x = given[0]
        assert x is not None
        if kind == "ConstantOfShape":
            fill = options.get("value")
            if fill is None:
                return torch.zeros(x.tolist(), dtype=self.real)
            return torch.full(x.tolist(), _number(fill), dtype=self._type(fill.data_type))
        if kind == "EyeLike":
            return torch.eye(*x.shape, dtype=self._type(options.get("dtype", TensorProto.FLOAT)))
        return x.to(self._type(options["to"]))

    def _type(self, code: int) -> torch.dtype:
        if code not in TYPES:
            raise NotImplementedError(f"type {code}")
        return self.real if code == TensorProto.FLOAT else TYPES[code]

    def _batch_norm(self, node: NodeProto, given: list[Tensor], **options: Any) -> Tensor:
        x, scale, bias, mean, variance = given
        keep = options.get("momentum", 0.9)
        names = node.input[3:5]
        mean, variance = (self.statistics.get(n, v).clone() for n, v in zip(names, (mean, variance), strict=True))
        y = F.batch_norm(x, mean, variance, scale, bias, True, 1 - keep, options.get("epsilon", 1e-5))
        self.statistics.update(zip(names, (mean, variance), strict=True))
        return y


def _number(tensor: TensorProto) -> float:
    return float(numpy_helper.to_array(tensor).reshape(-1)[0])


def _axes(axes: Tensor | None) -> list[int] | None:
    return None if axes is None else [int(axis) for axis in axes.reshape(-1)]


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    def run(x: Tensor, axes: Tensor | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        chosen = _axes(axes)
        if not chosen:
            if noop_with_empty_axes:
                return x
            chosen = list(range(x.ndim))
        return function(x, chosen, bool(keepdims))

    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _padding(x: Tensor, kernel: Sequence[int], options: Mapping[str, Any], fill: float = 0.0) -> Tensor:
    """Pad as a convolution's attributes say."""
    count = len(kernel)
    strides, dilations = (options.get(name, [1] * count) for name in ("strides", "dilations"))
    mode, pads = options.get("auto_pad", "NOTSET"), options.get("pads", [0] * (2 * count))
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        spans = [
            max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
            for size, s, k, d in zip(x.shape[2:], strides, kernel, dilations, strict=True)
        ]
        less, more = [n // 2 for n in spans], [n - n // 2 for n in spans]
        pads = [*less, *more] if mode == "SAME_UPPER" else [*more, *less]
    ordered = [pads[i + half * count] for i in reversed(range(count)) for half in (0, 1)]
    return F.pad(x, ordered, value=fill) if any(ordered) else x


def _conv(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
    count = w.ndim - 2
    function: Function = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    strides, dilations = (options.get(name, [1] * count) for name in ("strides", "dilations"))
    result: Tensor = function(
        _padding(x, w.shape[2:], options), w, b, strides, 0, dilations, groups=options.get("group", 1)
    )
    return result


def _conv_transpose(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
    count = w.ndim - 2
    if options.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in options:
        raise NotImplementedError("ConvTranspose with automatic padding")
    function: Function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[count - 1]
    strides, dilations = (options.get(name, [1] * count) for name in ("strides", "dilations"))
    extra, pads = options.get("output_padding", [0] * count), options.get("pads", [0] * (2 * count))
    y = function(x, w, b, strides, 0, extra, options.get("group", 1), dilations)
    ordered = [-pads[i + half * count] for i in reversed(range(count)) for half in (0, 1)]
    return F.pad(y, ordered)


def _pool(x: Tensor, biggest: bool, **options: Any) -> Tensor:
    kernel = options["kernel_shape"]
    count = len(kernel)
    strides, dilations = (options.get(name, [1] * count) for name in ("strides", "dilations"))
    if options.get("ceil_mode") or options.get("storage_order"):
        raise NotImplementedError("pooling with ceil_mode")
    if biggest:
        function: Function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count - 1]
        result: Tensor = function(_padding(x, kernel, options, -math.inf), kernel, strides, 0, dilations)
        return result
    if any(d != 1 for d in dilations):
        raise NotImplementedError("AveragePool with dilations")
    mean: Function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[count - 1]
    sums: Tensor = mean(_padding(x, kernel, options), kernel, strides)
    if options.get("count_include_pad"):
        return sums
    inside: Tensor = mean(_padding(torch.ones_like(x), kernel, options), kernel, strides)
    return sums / inside


def _gemm(a: Tensor, b: Tensor, c: Tensor | None = None, **options: Any) -> Tensor:
    a, b = (a.T if options.get("transA") else a), (b.T if options.get("transB") else b)
    y = (a @ b) * float(options.get("alpha", 1.0))
    return y if c is None else y + float(options.get("beta", 1.0)) * c


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        axis = int(axes[i]) if axes is not None else i
        step = int(steps[i]) if steps is not None else 1
        size = x.shape[axis]
        places = range(size)[slice(start, None if step < 0 and end < -size else end, step)]
        x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


def _gather(x: Tensor, places: Tensor, axis: int = 0) -> Tensor:
    axis %= x.ndim
    taken = x.index_select(axis, places.long().reshape(-1) % x.shape[axis])
    return taken.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _pad(
    x: Tensor, pads: Tensor, fill: Tensor | None = None, axes: Tensor | None = None, mode: str = "constant"
) -> Tensor:
    chosen = _axes(axes) or list(range(x.ndim))
    amounts = [[0, 0] for _ in range(x.ndim)]
    for i, axis in enumerate(chosen):
        amounts[axis] = [int(pads[i]), int(pads[len(chosen) + i])]
    if mode == "constant":
        flat = list(itertools.chain(*reversed(amounts)))
        return F.pad(x, flat, value=0.0 if fill is None else float(fill))
    for axis, (low, high) in enumerate(amounts):
        size = x.shape[axis]
        places = torch.arange(-low, size + high)
        if mode == "reflect":
            places = (size - 1 - (places.remainder(2 * size - 2) - (size - 1)).abs()) if size > 1 else places * 0
        elif mode == "edge":
            places = places.clamp(0, size - 1)
        else:
            raise NotImplementedError(f"Pad {mode}")
        x = x.index_select(axis, places)
    return x


def _reshape(x: Tensor, shape: Tensor, allowzero: int = 0) -> Tensor:
    sizes = [x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(shape.tolist())]
    return x.reshape(sizes)


def _split(x: Tensor, sizes: Tensor | None = None, axis: int = 0, num_outputs: int = 0) -> Sequence[Tensor]:
    parts = sizes.tolist() if sizes is not None else math.ceil(x.shape[axis] / num_outputs)
    pieces: Sequence[Tensor] = torch.split(x, parts, axis)
    return pieces


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(int(axis) % rank for axis in axes.reshape(-1)):
        x = x.unsqueeze(axis)
    return x


def _resize(
    x: Tensor, roi: Any = None, scales: Tensor | None = None, sizes: Tensor | None = None, **options: Any
) -> Tensor:
    mode, place = options.get("mode", "nearest"), options.get("coordinate_transformation_mode", "half_pixel")
    wanted = sizes.tolist() if sizes is not None else [int(n * float(s)) for n, s in zip(x.shape, scales, strict=True)]  # type: ignore[arg-type]
    if list(wanted[:2]) != list(x.shape[:2]) or options.get("antialias") or "axes" in options:
        raise NotImplementedError("Resize of channels")
    target = wanted[2:]
    whole = all(t % s == 0 for t, s in zip(target, x.shape[2:], strict=True))
    if mode == "nearest" and whole and place in ("asymmetric", "half_pixel"):
        return F.interpolate(x, target, mode="nearest")
    kinds = {1: "linear", 2: "bilinear", 3: "trilinear"}
    if mode == "linear" and place in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return F.interpolate(x, target, mode=kinds[len(target)], align_corners=place == "align_corners")
    raise NotImplementedError(f"Resize {mode} {place}")


def _where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition, yes, no)


def _top_k(x: Tensor, count: Tensor, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    values, places = torch.topk(x, int(count), axis, bool(largest), True)
    return values, places


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def _recurrent(kind: str) -> Function:
    def run(
        x: Tensor,
        w: Tensor,
        r: Tensor,
        b: Tensor | None = None,
        lengths: Any = None,
        *states: Tensor | None,
        **options: Any,
    ) -> Any:
        known = {"hidden_size", "direction", "linear_before_reset"}
        if lengths is not None or set(options) - known or (kind == "GRU" and not options.get("linear_before_reset")):
            raise NotImplementedError(f"{kind} with {sorted(options)}")
        hidden, both = options["hidden_size"], options.get("direction", "forward")
        order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[
            kind
        ]  # ONNX: i o f c / z r h; PyTorch: i f c o / r z h

        def arranged(value: Tensor) -> Tensor:
            return torch.cat([value.split(hidden)[i] for i in order])

        flat: list[Tensor] = []
        for d in range(len(w)):
            flat += [arranged(w[d]), arranged(r[d])]
            flat += [arranged(part) for part in (b[d].chunk(2) if b is not None else (w.new_zeros(len(w[d])),) * 2)]
        zeros = x.new_zeros(len(w), x.shape[1], hidden)
        start = [zeros if state is None else state for state in [*states, None, None][: 2 if kind == "LSTM" else 1]]
        function: Any = getattr(torch._VF, {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[kind])
        x = x.flip(0) if both == "reverse" else x
        y, *last = function(
            x, tuple(start) if kind == "LSTM" else start[0], flat, True, 1, 0.0, False, both == "bidirectional", False
        )
        y = y.flip(0) if both == "reverse" else y
        return (y.reshape(*y.shape[:2], len(w), hidden).transpose(1, 2), *last)

    return run


def _scatter_nd(x: Tensor, places: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add"):
        raise NotImplementedError(f"ScatterND {reduction}")
    return x.index_put(tuple(places.unbind(-1)), updates, accumulate=reduction == "add")


def _p_relu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


OPERATORS: dict[str, Function] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Div": lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "Equal": torch.eq,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": _p_relu,
    "Pow": lambda a, b: torch.pow(a, b.to(a.dtype)),
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Where": _where,
    "Max": lambda *x: _fold(torch.maximum, x),
    "Min": lambda *x: _fold(torch.minimum, x),
    "Sum": lambda *x: _fold(torch.add, x),
    "Shape": lambda x: torch.tensor(x.shape),
    "Size": lambda x: torch.tensor(x.numel()),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    "Tile": lambda x, n: x.repeat(n.tolist()),
    "Clip": lambda x, low=None, high=None: x.clamp(low, high),
    "Range": lambda a, b, c: torch.arange(a.item(), b.item(), c.item(), dtype=a.dtype),
}


def _fold(function: Function, values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total


OPERATORS |= {
    "ArgMax": lambda x, axis=0, keepdims=1, select_last_index=0: x.argmax(axis, keepdim=bool(keepdims)),
    "AveragePool": lambda x, **options: _pool(x, False, **options),
    "Concat": lambda *x, axis: torch.cat(x, axis),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Flatten": lambda x, axis=1: x.reshape(math.prod(x.shape[:axis]), -1),
    "GRU": _recurrent("GRU"),
    "Gather": _gather,
    "GatherElements": lambda x, i, axis=0: torch.gather(x, axis, i % x.shape[axis]),
    "Gemm": _gemm,
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (x * alpha + beta).clamp(0, 1),
    "InstanceNormalization": lambda x, s, b, epsilon=1e-5: F.instance_norm(x, weight=s, bias=b, eps=epsilon),
    "LSTM": _recurrent("LSTM"),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "LogSoftmax": lambda x, axis=-1: torch.log_softmax(x, axis),
    "MaxPool": lambda x, **options: _pool(x, True, **options),
    "Mod": lambda a, b, fmod=0: torch.fmod(a, b) if fmod else torch.remainder(a, b),
    "Pad": _pad,
    "RNN": _recurrent("RNN"),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: x.mean(axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keep)),
    "ReduceProd": _reduce(_product),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keep)),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: (x * x).sum(axes, keep)),
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterND": _scatter_nd,
    "Softmax": lambda x, axis=-1: torch.softmax(x, axis),
    "Split": _split,
    "TopK": _top_k,
    "Transpose": lambda x, perm=None: x.permute(perm or list(range(x.ndim))[::-1]),
    "Trilu": lambda x, k=None, upper=1: (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k)),
}
