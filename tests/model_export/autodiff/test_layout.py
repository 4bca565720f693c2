"""Layouts: whatever order images are held in, a network of convolutions computes what PyTorch computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.autodiff.layouts import planes, tiles
from tests.model_export.autodiff.drawing import examples
from tests.model_export.autodiff.harness import operator
from tests.model_export.autodiff.module_harness import check_module


class Block(nn.Module):
    """A residual block; a second reader of its sum is one more reason for a value to exist."""

    def __init__(self, channels: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        summed = x + self.body(x)
        return F.relu(summed) - summed * self.scale


class Picture(nn.Module):
    """Mean over height and width, written as a reduction."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Rounded(nn.Module):
    """Whole numbers: many ties. No gradient passes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x)


ACTIVATIONS = [nn.ReLU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.PReLU, nn.ELU]
NORMS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(2, channels)}


@st.composite
def convolutions(draw: st.DrawFn, channels: int, features: int, *, bias: bool, first: bool) -> nn.Conv2d:
    """The first of a network may make the image smaller. Without `bias` none is drawn."""
    kernel = draw(st.sampled_from([1, 2, 3, 3, 3, 4, 5] if first else [1, 3, 3, 5]))
    stride = draw(st.sampled_from([1, 1, 2, 3])) if first else 1
    padding = draw(st.integers(0, kernel // 2)) if first else kernel // 2
    return nn.Conv2d(channels, features, kernel, stride, padding, bias=bias and draw(st.booleans()))


@st.composite
def depthwise_convolutions(draw: st.DrawFn, channels: int, *, bias: bool, stride: int = 1) -> nn.Conv2d:
    kernel = draw(st.sampled_from([3, 5]))
    has_bias = bias and draw(st.booleans())
    return nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=has_bias)


@st.composite
def networks(draw: st.DrawFn, *, depthwise: bool) -> tuple[nn.Sequential, int, tuple[int, int]]:
    """(a network, its input channels, an image size). A bias in front of a norm has no gradient: none is drawn."""
    torch.manual_seed(0)
    channels = given_channels = draw(st.integers(2, 4))
    steps: list[nn.Module] = []
    for number in range(draw(st.integers(1, 3))):
        norm = draw(st.sampled_from(["batch", "batch", "group", None]))
        if depthwise and number and draw(st.booleans()):
            stride = draw(st.sampled_from([1, 2])) if number == 1 else 1
            steps.append(draw(depthwise_convolutions(channels, bias=True, stride=stride)))
        features = draw(st.sampled_from([4, 6, 8]))
        steps.append(draw(convolutions(channels, features, bias=norm is None, first=number == 0)))
        channels = features
        if norm:
            steps.append(NORMS[norm](channels))
        steps.append(draw(st.sampled_from(ACTIVATIONS))())
        if draw(st.booleans()):
            ends_in_norm = draw(st.booleans())
            inner = convolutions(channels, channels, bias=not ends_in_norm, first=False)
            if depthwise and draw(st.booleans()):
                inner = depthwise_convolutions(channels, bias=not ends_in_norm)
            body = draw(inner)
            steps.append(Block(channels, nn.Sequential(body, nn.BatchNorm2d(channels)) if ends_in_norm else body))
    pools = {"max": nn.MaxPool2d(2), "overlapping": nn.MaxPool2d(3, 2, 1), "average": nn.AvgPool2d(2)}
    pool = draw(st.sampled_from([*pools, None]))
    if pool:
        steps.append(pools[pool])
    end = draw(st.sampled_from(["image", "mean", "pooled"]))
    if end != "image":
        steps += [Picture()] if end == "mean" else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        steps.append(nn.Linear(channels, 3))
    return nn.Sequential(*steps), given_channels, draw(st.tuples(st.integers(11, 15), st.integers(11, 15)))


def check_network(module: nn.Sequential, channels: int, size: tuple[int, int], boundary: int) -> None:
    check_module(module, torch.randn(2, channels, *size), boundary=boundary)


@given(drawn=networks(depthwise=False), last=st.booleans())
@examples(20)
def test_networks_of_dense_convolutions(drawn: tuple[nn.Sequential, int, tuple[int, int]], last: bool) -> None:
    layers = sum(isinstance(step, nn.Conv2d | nn.Linear) for step in drawn[0])
    check_network(*drawn, boundary=layers - 1 if last else 0)


@given(drawn=networks(depthwise=True))
@examples(12)
def test_networks_with_depthwise_convolutions(drawn: tuple[nn.Sequential, int, tuple[int, int]]) -> None:
    check_network(*drawn, boundary=0)


def dense(*, kernel: int, stride: int, padding: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    )


EVEN = [(4, 4), (6, 8), (2, 10)]
ANY = [*EVEN, (7, 9), (8, 5), (3, 3)]
TILES = [
    *((3, 1, 1, size) for size in ANY),
    *((3, 1, 0, size) for size in ANY if min(size) > 2),
    *((5, 1, 2, size) for size in ANY),
    *((1, 1, 0, size) for size in ANY[2:4]),
    *((1, 2, 0, size) for size in ANY[2:4]),
    *((3, 2, 1, size) for size in EVEN),
]


@operator("PixelConv", "PixelBatchNorm", "PixelLeave")
@pytest.mark.parametrize("boundary", [0, 1])
@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), TILES)
def test_tiles_of_every_kind_and_size(
    kernel: int, stride: int, padding: int, size: tuple[int, int], boundary: int
) -> None:
    check_module(dense(kernel=kernel, stride=stride, padding=padding), torch.randn(2, 3, *size), boundary=boundary)


@operator("PixelEnter", "PixelLeave", "PixelConv")
def test_a_value_changes_its_layout_and_back_in_the_middle() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x))
            return self.second(torch.cat((x, x.flip(2)[:, :, ::1]), 1)) + x

    check_module(Model(), torch.randn(2, 3, 6, 6))


@operator("PixelMaxPool")
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(3, 1),
        nn.MaxPool2d((2, 3), (2, 1)),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=repr,
)
def test_max_pooling_gives_the_gradient_to_the_first_maximum(pool: nn.Module) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 1)
    with torch.no_grad():
        first.weight.copy_(torch.randint(-1, 2, first.weight.shape))
        first.bias.zero_()
    check_module(nn.Sequential(Rounded(), first, pool, nn.Conv2d(4, 2, 1)), torch.randn(2, 2, 7, 7))


@operator("PixelStem", "PixelMean")
@pytest.mark.parametrize("end", [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), Picture()], ids=["pool", "mean"])
def test_the_mean_of_an_image(end: nn.Module) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), end, nn.Linear(4, 3))
    check_module(module, torch.randn(2, 3, 6, 5), Loss("cross_entropy"))


@operator("ChannelConv", "ChannelDepthwise", "ChannelBatchNorm", "ChannelMean", "ChannelLeave", "ChannelEnter")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_inverted_residuals(stride: int, kernel: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        nn.Conv2d(4, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, kernel, stride, kernel // 2, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 4, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 6, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    check_module(module, torch.randn(2, 3, *size), Loss("cross_entropy"), batch=7)


@operator("ChannelConv", "ChannelBatchNorm")
@pytest.mark.parametrize("boundary", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_batch_norm_goes_through_the_product_that_widens(stride: int, boundary: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 12, 1, stride, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU6(),
        nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 2, 1),
    )
    exported = check_module(module, 3.0 + torch.randn(2, 3, 8, 6), boundary=boundary, batch=5)
    added = [node for node in exported.train.graph.node if node.op_type == "Gemm" and len(node.input) == 3]
    assert len(added) == (2 if boundary == 0 else 0), "the part of the norm, and that of dy"


@operator("ChannelBatchNorm")
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_a_batch_norm_used_twice_beside_depthwise_convolutions(momentum: float) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
            self.norm, self.last = nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm2d(4, momentum=0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.norm(self.second(torch.tanh(self.norm(self.first(x)))))))

    check_module(Model(), torch.randn(2, 3, 6, 6))


@operator("PixelBatchNorm")
def test_a_batch_norm_used_twice_in_a_layout() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.second(torch.tanh(self.norm(self.first(x)))))

    check_module(Model(), torch.randn(2, 3, 6, 6))


@operator("PixelConv")
def test_a_convolution_used_twice_in_a_layout() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(torch.tanh(self.conv(x)))) + self.conv(x)

    check_module(Model(), torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize(("size", "taps", "stride"), [(8, 3, 1), (16, 3, 2), (11, 5, 1), (12, 3, 1)])
def test_large_images_go_through_some_rows_of_tiles_after_the_other(
    monkeypatch: pytest.MonkeyPatch, size: int, taps: int, stride: int
) -> None:
    monkeypatch.setattr(tiles, "MOST_TILES", 1 << 14)
    torch.manual_seed(0)
    body = nn.Conv2d(4, 6, taps, stride, taps // 2)
    exported = check_module(nn.Sequential(nn.Conv2d(3, 4, 1), body, Picture()), torch.randn(2, 3, size, size))
    joined = [node for node in exported.train.graph.node if node.op_type == "Concat"]
    assert [len(node.input) > 1 for node in joined] == [True, True], "one for the output, one for the input's gradient"


@pytest.mark.parametrize(
    ("kernel", "padding", "size"), [(3, 1, (16, 20)), (3, 1, (8, 32)), (3, 0, (16, 16)), (5, 2, (16, 16))]
)
def test_depthwise_tiles_of_large_images_come_in_rows(kernel: int, padding: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    body = nn.Conv2d(4, 4, kernel, 1, padding, groups=4)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), body, Picture())
    exported = check_module(module, torch.randn(2, 3, *size), batch=5)
    has_runs = any(node.op_type == "Slice" for node in exported.train.graph.node)
    assert has_runs == (kernel == 3 and padding == 1), "other borders are collected pixel by pixel"


@operator("ChannelDepthwise")
@pytest.mark.parametrize(("size", "stride", "bias"), [(16, 1, True), (8, 1, False), (16, 2, False), (9, 2, True)])
def test_depthwise_convolutions_of_large_images_go_through_some_channels_after_the_other(
    monkeypatch: pytest.MonkeyPatch, size: int, stride: int, bias: bool
) -> None:
    monkeypatch.setattr(planes, "MOST_TILES", 1 << 14)
    torch.manual_seed(0)
    body = nn.Conv2d(5, 5, 3, stride, 1, groups=5, bias=bias)
    exported = check_module(nn.Sequential(nn.Conv2d(3, 5, 1), body, Picture()), torch.randn(2, 3, size, size))
    joined = [node for node in exported.train.graph.node if node.op_type == "Concat" and len(node.input) == 5]
    assert len(joined) == 3, "of the result and of both gradients"
