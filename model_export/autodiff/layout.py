"""Which values of a training graph are held pixel-major, [pixels, N, channels] instead of [N, channels, height, width].

Convolutions are two to four times faster that way (see tiles.py), and what stands between them (normalisation,
activations, residual sums, pooling) works on it as well. This pass rewrites the forward nodes before they are
differentiated: nodes with a pixel-major form become Pixel* operators, which exist only between here and their lowering,
and a value changes its layout only where a node without such a form needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import NodeProto, helper

from model_export.autodiff.rules.convolution import Window, window_of
from model_export.autodiff.tiles import Size
from model_export.graph import Shape, attribute, attributes, inputs_with_subgraphs

# Operators that treat every element alike, so that the layout does not matter.
UNARY = {
    "Relu", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "Softplus", "HardSigmoid", "HardSwish", "Clip", "Erf", "Neg", "Abs",
    "Exp", "Sqrt", "Identity",
}  # fmt: skip
BINARY = {"Add", "Sub", "Mul", "Div", "Sum"}
# im2col with the batch innermost pays for few input channels; beyond this many rows tiles are better.
MOST_STEM_ROWS = 100


class PixelLayout:
    """Rewrites nodes one after the other; afterwards `nodes` and `shapes` describe the same computation."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        constants: Mapping[str, np.ndarray],
        active: set[str],
        uses: Mapping[str, int],
    ) -> None:
        self.shapes = dict(shapes)
        self.constants = constants
        self.active = active
        self.nodes: list[NodeProto] = []
        self._uses = uses
        self._pixel: dict[str, str] = {}  # value -> its pixel-major twin
        self._plain: set[str] = set()  # values that exist in their own layout

    def shape(self, name: str) -> Shape:
        return self.shapes[name]

    def rewrite(self, nodes: Sequence[NodeProto], given: Sequence[str]) -> None:
        self._plain.update(given)
        for node in nodes:
            form = FORMS.get(node.op_type)
            if form is None or not form(self, node):
                self._keep(node)

    def _keep(self, node: NodeProto) -> None:
        for name in inputs_with_subgraphs(node):
            self.plain(name)
        self.nodes.append(node)
        self._plain.update(node.output)

    def is_pixel(self, name: str) -> bool:
        return name in self._pixel

    def size(self, name: str) -> Size:
        """Height and width of an image."""
        height, width = self.shapes[name][2:]
        return int(height or 0), int(width or 0)

    def pixel(self, name: str) -> str:
        """The pixel-major twin of a value."""
        if name not in self._pixel:
            self.emit("PixelEnter", name, [name], size=list(self.size(name)))
        return self._pixel[name]

    def plain(self, name: str) -> None:
        """Make sure that a value exists in its own layout."""
        if name in self._pixel and name not in self._plain:
            node = helper.make_node(
                "PixelLeave", [self._pixel[name]], [name], name=f"layout/leave_{len(self.nodes)}",
                size=list(self.size(name)), channels=int(self.shapes[name][1] or 0),
            )  # fmt: skip
            self.nodes.append(node)
            self._plain.add(name)

    def emit(
        self, op_type: str, result: str, inputs: Sequence[str], source: NodeProto | None = None, **attrs: object
    ) -> None:
        """Write a node whose result is the pixel-major twin of a value."""
        twin = f"{result}.pixels"
        height, width = self.size(result)
        self.shapes[twin] = (height * width, None, self.shapes[result][1])
        if result in self.active:
            self.active.add(twin)
        self._pixel[result] = twin
        name = source.name if source is not None else f"layout/enter_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [twin], name=name, **attrs))

    def used_once(self, name: str) -> bool:
        return self._uses.get(name, 0) == 1


def _window(layout: PixelLayout, node: NodeProto) -> Window | None:
    weight = layout.shapes[node.input[1]]
    if len(weight) != 4:
        return None
    return window_of(layout, node, node.input[0], node.output[0], (int(weight[2] or 0), int(weight[3] or 0)))


def has_tiles(window: Window) -> bool:
    """Whether tiles.py knows this convolution."""
    square = window.kernel[0] == window.kernel[1] and window.strides[0] == window.strides[1]
    if not square or window.group != 1 or window.dilations != (1, 1):
        return False
    taps, stride = window.kernel[0], window.strides[0]
    if taps == 1:
        return not any(window.pads)
    if stride == 1:
        return taps in (3, 5) and all(pad < taps for pad in window.pads)
    even = not any(n % 2 for n in window.size)
    return (
        taps == 3
        and stride == 2
        and even
        and window.begin == (1, 1)
        and window.out == tuple(n // 2 for n in window.size)
    )


def _is_stem(layout: PixelLayout, node: NodeProto, window: Window) -> bool:
    """The first convolution: few channels, and nobody asks for the gradient of its input."""
    channels = int(layout.shapes[node.input[1]][1] or 0)
    rows = channels * window.kernel[0] * window.kernel[1]
    return (
        window.group == 1 and node.input[0] not in layout.active and rows <= MOST_STEM_ROWS and window.kernel != (1, 1)
    )


def _conv(layout: PixelLayout, node: NodeProto) -> bool:
    window = _window(layout, node)
    if window is None or node.output[0] not in layout.active:
        return False
    attrs = {**window.attributes(), "size": list(window.size), "out": list(window.out)}
    if _is_stem(layout, node, window):
        layout.plain(node.input[0])
        layout.emit("PixelStem", node.output[0], list(node.input), node, **attrs)
        return True
    if not has_tiles(window):
        return False
    layout.emit("PixelConv", node.output[0], [layout.pixel(node.input[0]), *node.input[1:]], node, **attrs)
    return True


def _batch_norm(layout: PixelLayout, node: NodeProto) -> bool:
    if not layout.is_pixel(node.input[0]):
        return False
    # A convolution whose only reader is this node takes over a multiplication per channel in the backward pass.
    maker = next(n for n in layout.nodes if layout.pixel(node.input[0]) in n.output)
    fold = int(maker.op_type in ("PixelConv", "PixelStem") and layout.used_once(node.input[0]))
    attrs = {key: value for key, value in attributes(node).items() if key in ("epsilon", "momentum")}
    layout.emit(
        "PixelBatchNorm", node.output[0], [layout.pixel(node.input[0]), *node.input[1:]], node, **attrs, fold=fold
    )
    return True


def _unary(layout: PixelLayout, node: NodeProto) -> bool:
    if not layout.is_pixel(node.input[0]):
        return False
    inputs = [layout.pixel(node.input[0]), *node.input[1:]]
    layout.emit(node.op_type, node.output[0], inputs, node, **attributes(node))
    return True


def _binary(layout: PixelLayout, node: NodeProto) -> bool:
    """Both operands are images of one size, or one is a single number."""
    images = [name for name in node.input if layout.shapes[name] == layout.shapes[node.output[0]]]
    numbers = [name for name in node.input if name in layout.constants and layout.constants[name].size == 1]
    if len(images) + len(numbers) != len(node.input) or not any(layout.is_pixel(name) for name in images):
        return False
    inputs = [layout.pixel(name) if name in images else name for name in node.input]
    layout.emit(node.op_type, node.output[0], inputs, node)
    return True


def _max_pool(layout: PixelLayout, node: NodeProto) -> bool:
    if not layout.is_pixel(node.input[0]) or len(node.output) > 1:
        return False
    window = window_of(layout, node, node.input[0], node.output[0], tuple(attribute(node, "kernel_shape")))
    attrs = {**window.attributes(), "size": list(window.size), "out": list(window.out)}
    layout.emit("PixelMaxPool", node.output[0], [layout.pixel(node.input[0])], node, **attrs)
    return True


def _global_average(layout: PixelLayout, node: NodeProto) -> bool:
    """The mean over all pixels; also written as ReduceMean over height and width."""
    if not layout.is_pixel(node.input[0]):
        return False
    if node.op_type == "ReduceMean":
        axes = layout.constants.get(node.input[1]) if len(node.input) > 1 else None
        if axes is None or sorted(int(a) % 4 for a in axes) != [2, 3]:
            return False
    layout.nodes.append(helper.make_node("PixelMean", [layout.pixel(node.input[0])], node.output, name=node.name))
    layout._plain.update(node.output)
    return True


FORMS: Mapping[str, Callable[[PixelLayout, NodeProto], bool]] = {
    "Conv": _conv,
    "BatchNormalization": _batch_norm,
    "MaxPool": _max_pool,
    "GlobalAveragePool": _global_average,
    "ReduceMean": _global_average,
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
}


def use_pixel_layout(
    nodes: Sequence[NodeProto],
    given: Sequence[str],
    result: str,
    shapes: Mapping[str, Shape],
    constants: Mapping[str, np.ndarray],
    active: set[str],
) -> PixelLayout:
    """The same computation with images held pixel-major where that is faster; `result` stays as it is."""
    uses: dict[str, int] = {result: 1}
    for node in nodes:
        for name in inputs_with_subgraphs(node):
            uses[name] = uses.get(name, 0) + 1
    layout = PixelLayout(shapes, constants, set(active), uses)
    layout.rewrite(nodes, given)
    layout.plain(result)
    return layout
