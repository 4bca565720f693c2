"""How images are held inside a training graph: in an order that makes products fast, not [N, channels, height, width].

pixel-major    [pixels, N, channels]   dense convolutions by tiles (tiles.py): two to four times faster than Conv nodes
channel-major  [channels, pixels, N]   depthwise convolutions (planes.py), for networks that have them

What stands between convolutions (normalisation, activations, residual sums, pooling) works in either order. This pass
rewrites the forward nodes before they are differentiated: nodes with a form in the chosen layout become Pixel* or
Channel* operators, which exist only between here and their lowering, and a value changes its layout only where a node
without such a form needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from model_export.autodiff.fewer_passes import GELU
from model_export.autodiff.layouts.tiles import Size
from model_export.autodiff.rules.convolution import Window, window_of
from model_export.graph import Shape, attribute, attributes, count_readers, inputs_with_subgraphs

# Operators that treat every element alike, so that the layout does not matter.
UNARY = {
    "Relu",
    "LeakyRelu",
    "Elu",
    "Sigmoid",
    "Tanh",
    "Softplus",
    "HardSigmoid",
    "HardSwish",
    "Clip",
    "Erf",
    "Neg",
    "Abs",
    "Exp",
    "Sqrt",
    "Identity",
    GELU,
}
BINARY = {"Add", "Sub", "Mul", "Div", "Sum"}
# Convolutions that take over the factor per channel of batch norm's gradient.
FOLDING = {"PixelConv", "PixelStem", "ChannelConv", "ChannelDepthwise"}
# im2col with the batch innermost pays for few input channels; beyond this many rows tiles are better.
MOST_STEM_ROWS = 100


class ImageLayout:
    """Rewrites nodes one after the other; afterwards `nodes` and `shapes` describe the same computation."""

    prefix: str  # of its operators

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
        self._twins: dict[str, str] = {}  # value -> the same in this layout
        self._plain: set[str] = set()  # values that exist in their own layout

    def twin_shape(self, pixels: int, channels: int) -> Shape:
        raise AssertionError("each layout has its own")

    def conv(self, node: NodeProto, window: Window) -> bool:
        raise AssertionError("each layout has its own")

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

    def has_twin(self, name: str) -> bool:
        return name in self._twins

    def size(self, name: str) -> Size:
        """Height and width of an image."""
        height, width = self.shapes[name][2:]
        return int(height or 0), int(width or 0)

    def twin(self, name: str) -> str:
        """A value in this layout."""
        if name not in self._twins:
            self.emit(f"{self.prefix}Enter", name, [name], size=list(self.size(name)))
        return self._twins[name]

    def plain(self, name: str) -> None:
        """Make sure that a value exists in its own layout."""
        if name in self._twins and name not in self._plain:
            attrs = {"size": list(self.size(name)), "channels": int(self.shapes[name][1] or 0)}
            label = f"layout/leave_{len(self.nodes)}"
            self.emit_plain(f"{self.prefix}Leave", name, self._twins[name], label, **attrs)

    def emit(
        self, op_type: str, result: str, inputs: Sequence[str], source: NodeProto | None = None, **attrs: Any
    ) -> None:
        """Write a node whose result is the twin of a value."""
        twin = f"{result}.{self.prefix.lower()}"
        height, width = self.size(result)
        self.shapes[twin] = self.twin_shape(height * width, int(self.shapes[result][1] or 0))
        if result in self.active:
            self.active.add(twin)
        self._twins[result] = twin
        name = source.name if source is not None else f"layout/enter_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [twin], name=name, **attrs))

    def emit_plain(self, op_type: str, result: str, twin: str, name: str, **attrs: Any) -> None:
        """Write a node that leads out of this layout."""
        self.nodes.append(helper.make_node(op_type, [twin], [result], name=name, **attrs))
        self._plain.add(result)

    def used_once(self, name: str) -> bool:
        return self._uses.get(name, 0) == 1

    def maker(self, twin: str) -> NodeProto:
        return next(node for node in self.nodes if twin in node.output)


def window_attributes(window: Window) -> dict[str, object]:
    return {**window.attributes(), "size": list(window.size), "out": list(window.out)}


class PixelLayout(ImageLayout):
    prefix = "Pixel"

    def twin_shape(self, pixels: int, channels: int) -> Shape:
        return (pixels, None, channels)

    def conv(self, node: NodeProto, window: Window) -> bool:
        if _is_stem(self, node, window):
            self.plain(node.input[0])
            self.emit("PixelStem", node.output[0], list(node.input), node, **window_attributes(window))
            return True
        if not has_tiles(window):
            return False
        inputs = [self.twin(node.input[0]), *node.input[1:]]
        self.emit("PixelConv", node.output[0], inputs, node, **window_attributes(window))
        return True


class ChannelLayout(ImageLayout):
    prefix = "Channel"

    def twin_shape(self, pixels: int, channels: int) -> Shape:
        return (channels, pixels, None)

    def conv(self, node: NodeProto, window: Window) -> bool:
        features, channels = (int(n or 0) for n in self.shapes[node.input[1]][:2])
        inputs = [self.twin(node.input[0]), *node.input[1:]]
        if window.group == features and channels == 1 and window.group > 1:
            self.emit("ChannelDepthwise", node.output[0], inputs, node, **window_attributes(window))
        elif window.group == 1 and (window.is_pointwise or _is_stem(self, node, window)):
            self.emit("ChannelConv", node.output[0], inputs, node, **window_attributes(window))
        else:
            return False
        return True


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


def _is_stem(layout: ImageLayout, node: NodeProto, window: Window) -> bool:
    """The first convolution: few channels, and the gradient of its input is not needed."""
    channels = int(layout.shapes[node.input[1]][1] or 0)
    rows = channels * window.kernel[0] * window.kernel[1]
    return (
        window.group == 1 and node.input[0] not in layout.active and rows <= MOST_STEM_ROWS and window.kernel != (1, 1)
    )


def _conv(layout: ImageLayout, node: NodeProto) -> bool:
    weight = layout.shapes[node.input[1]]
    if len(weight) != 4 or node.output[0] not in layout.active:
        return False
    kernel = int(weight[2] or 0), int(weight[3] or 0)
    return layout.conv(node, window_of(layout, node, node.input[0], node.output[0], kernel))


def _batch_norm(layout: ImageLayout, node: NodeProto) -> bool:
    if not layout.has_twin(node.input[0]):
        return False
    twin = layout.twin(node.input[0])
    # A convolution whose only reader is this node takes over a multiplication per channel in the backward pass.
    fold = int(layout.maker(twin).op_type in FOLDING and layout.used_once(node.input[0]))
    attrs = {key: value for key, value in attributes(node).items() if key in ("epsilon", "momentum")}
    inputs = [twin, *node.input[1:]]
    layout.emit(f"{layout.prefix}BatchNorm", node.output[0], inputs, node, **attrs, fold=fold)
    return True


def _unary(layout: ImageLayout, node: NodeProto) -> bool:
    if not layout.has_twin(node.input[0]):
        return False
    inputs = [layout.twin(node.input[0]), *node.input[1:]]
    layout.emit(node.op_type, node.output[0], inputs, node, **attributes(node))
    return True


def _binary(layout: ImageLayout, node: NodeProto) -> bool:
    """Both operands are images of one size, or one is a single number."""
    images = [name for name in node.input if layout.shapes[name] == layout.shapes[node.output[0]]]
    numbers = [name for name in node.input if name in layout.constants and layout.constants[name].size == 1]
    if len(images) + len(numbers) != len(node.input) or not any(layout.has_twin(name) for name in images):
        return False
    inputs = [layout.twin(name) if name in images else name for name in node.input]
    layout.emit(node.op_type, node.output[0], inputs, node)
    return True


def _max_pool(layout: ImageLayout, node: NodeProto) -> bool:
    if not layout.has_twin(node.input[0]) or len(node.output) > 1 or not isinstance(layout, PixelLayout):
        return False
    window = window_of(layout, node, node.input[0], node.output[0], tuple(attribute(node, "kernel_shape")))
    layout.emit("PixelMaxPool", node.output[0], [layout.twin(node.input[0])], node, **window_attributes(window))
    return True


def _global_average(layout: ImageLayout, node: NodeProto) -> bool:
    """The mean over all pixels; also written as ReduceMean over height and width."""
    if not layout.has_twin(node.input[0]):
        return False
    if node.op_type == "ReduceMean":
        axes = layout.constants.get(node.input[1]) if len(node.input) > 1 else None
        if axes is None or sorted(int(a) % 4 for a in axes) != [2, 3]:
            return False
    layout.emit_plain(f"{layout.prefix}Mean", node.output[0], layout.twin(node.input[0]), node.name)
    return True


FORMS: Mapping[str, Callable[[ImageLayout, NodeProto], bool]] = {
    "Conv": _conv,
    "BatchNormalization": _batch_norm,
    "MaxPool": _max_pool,
    "GlobalAveragePool": _global_average,
    "ReduceMean": _global_average,
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
}


def choose_layout(
    nodes: Sequence[NodeProto],
    given: Sequence[str],
    result: str,
    shapes: Mapping[str, Shape],
    constants: Mapping[str, np.ndarray],
    active: set[str],
) -> ImageLayout:
    """The same computation with images held in the faster order; `given` and `result` stay as they are."""
    uses = count_readers(nodes, result)
    depthwise = any(node.op_type == "Conv" and int(attribute(node, "group", 1)) > 1 for node in nodes)
    layout = (ChannelLayout if depthwise else PixelLayout)(shapes, constants, set(active), uses)
    layout.rewrite(nodes, given)
    layout.plain(result)
    return layout
