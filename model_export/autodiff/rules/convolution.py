"""Convolution and its transpose, any number of spatial dimensions, NCHW."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.errors import ExportError
from model_export.graph import Shape, attribute, module_of


@dataclass(frozen=True)
class Window:
    """How a kernel moves over its input; all tuples have one entry per spatial dimension."""

    size: tuple[int, ...]  # of the input
    out: tuple[int, ...]  # of the output
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]  # padding
    end: tuple[int, ...]
    group: int = 1

    @property
    def pads(self) -> list[int]:
        return [*self.begin, *self.end]

    @property
    def is_pointwise(self) -> bool:
        return all(k == 1 for k in self.kernel) and not any(self.pads)

    def attributes(self) -> dict[str, object]:
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": self.pads,
            "group": self.group,
        }

    def leftover(self) -> list[int]:
        """Input elements at the end that no window reaches; a transposed convolution must add them."""
        reach = [
            (o - 1) * s + (k - 1) * d + 1 - b - e
            for o, s, k, d, b, e in zip(
                self.out, self.strides, self.kernel, self.dilations, self.begin, self.end, strict=True
            )
        ]
        return [n - r for n, r in zip(self.size, reach, strict=True)]


class Shapes(Protocol):
    """Knows the shape of every value: a Context, or a ImageLayout that is being written."""

    def shape(self, name: str) -> Shape: ...


def window_of(shapes: Shapes, node: NodeProto, wide: str, narrow: str, kernel: tuple[int, ...]) -> Window:
    """The window of a convolution-like node from value `wide` to value `narrow`."""
    size, out = _image(shapes, wide, node), _image(shapes, narrow, node)
    rank = len(size)
    strides = tuple(attribute(node, "strides", [1] * rank))
    dilations = tuple(attribute(node, "dilations", [1] * rank))
    mode = attribute(node, "auto_pad", "NOTSET")
    pads = list(attribute(node, "pads", [0] * (2 * rank)))
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max((o - 1) * s + (k - 1) * d + 1 - n, 0)
            for o, s, k, d, n in zip(out, strides, kernel, dilations, size, strict=True)
        ]
        small = [t // 2 for t in total]
        large = [t - t // 2 for t in total]
        pads = [*small, *large] if mode == "SAME_UPPER" else [*large, *small]
    return Window(
        size=size,
        out=out,
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        begin=tuple(pads[:rank]),
        end=tuple(pads[rank:]),
        group=int(attribute(node, "group", 1)),
    )


def _image(shapes: Shapes, name: str, node: NodeProto) -> tuple[int, ...]:
    sizes = shapes.shape(name)[2:]
    known = tuple(int(n) for n in sizes if n is not None)
    if len(known) != len(sizes):
        raise ExportError(f"node {node.name!r} (module {module_of(node)!r}): the image size is known only at run time")
    return known


def taps(context: Context, x: str, window: Window) -> list[str]:
    """For each kernel element, the input elements it meets: [N, C, *out] each."""
    rank = len(window.size)
    if any(window.pads):
        x = context.op("Pad", x, np.array([0, 0, *window.begin, 0, 0, *window.end], np.int64))
    found = []
    for place in itertools.product(*map(range, window.kernel)):
        starts = [p * d for p, d in zip(place, window.dilations, strict=True)]
        ends = [s + (o - 1) * t + 1 for s, o, t in zip(starts, window.out, window.strides, strict=True)]
        whole = (
            starts == [0] * rank and tuple(ends) == window.size and set(window.strides) == {1} and not any(window.pads)
        )
        found.append(
            x if whole else context.op("Slice", x, starts, ends, list(range(2, 2 + rank)), list(window.strides))
        )
    return found


def weight_gradient(context: Context, x: str, dy: str, channels: int, features: int, window: Window) -> str:
    """[features, channels / group, *kernel]: im2col, then one product of matrices per sample, summed."""
    group, area, points = window.group, math.prod(window.kernel), math.prod(window.out)
    columns = [
        context.op("Reshape", tap, np.array([-1, group, channels // group, 1, points], np.int64))
        for tap in taps(context, x, window)
    ]
    stacked = context.op("Concat", *columns, axis=3) if area > 1 else columns[0]
    matrix = context.op("Reshape", stacked, np.array([-1, group, channels // group * area, points], np.int64))
    rows = context.op("Reshape", dy, np.array([-1, group, features // group, points], np.int64))
    product = context.op("MatMul", rows, context.op("Transpose", matrix, perm=[0, 1, 3, 2]))
    summed = context.op("ReduceSum", product, [0], keepdims=0)
    return context.op("Reshape", summed, np.array([features, channels // group, *window.kernel], np.int64))


def bias_gradient(context: Context, dy: str, rank: int) -> str:
    return context.op("ReduceSum", dy, [0, *range(2, rank)], keepdims=0)


@rule("Conv")
def conv(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    x, weight = node.input[:2]
    dy = str(upstream[0])
    features, _, *kernel = (int(n) for n in context.shape(weight) if n is not None)
    window = window_of(context, node, x, node.output[0], tuple(kernel))
    channels = context.shape(x)[1]
    dx = dw = db = None
    if context.wants(node, 0):
        # Input elements that no window reaches get their zeros from output_padding.
        rest = window.leftover()
        padding = rest if any(rest) else None
        dx = context.op("ConvTranspose", dy, weight, **window.attributes(), output_padding=padding)
    if context.wants(node, 1):
        dw = weight_gradient(context, x, dy, int(channels or 0), features, window)
    if context.wants(node, 2):
        db = bias_gradient(context, dy, context.rank(x))
    return [dx, dw, db]


@rule("ConvTranspose")
def conv_transpose(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The mirror image of Conv: input and output change places."""
    x, weight = node.input[:2]
    dy = str(upstream[0])
    channels, features, *kernel = (int(n) for n in context.shape(weight) if n is not None)
    window = window_of(context, node, node.output[0], x, tuple(kernel))
    dx = dw = db = None
    if context.wants(node, 0):
        dx = context.op("Conv", dy, weight, **window.attributes())
        dx = _cut_to_size(context, dx, window)
    if context.wants(node, 1):
        dw = weight_gradient(context, dy, x, features * window.group, channels, window)
    if context.wants(node, 2):
        db = bias_gradient(context, dy, context.rank(x))
    return [dx, dw, db]


def _cut_to_size(context: Context, dx: str, window: Window) -> str:
    """output_padding of a stride or more gives Conv room for windows that the transposed convolution did not have."""
    if all(rest < stride for rest, stride in zip(window.leftover(), window.strides, strict=True)):
        return dx
    rank = len(window.out)
    return context.op("Slice", dx, [0] * rank, list(window.out), list(range(2, 2 + rank)))
