"""Convolutions: strides, padding, dilation and groups together, in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from model_export.errors import ExportError
from model_export.graph import Shape
from tests.model_export.autodiff.drawing import examples
from tests.model_export.autodiff.harness import check_operator, operator
from tests.model_export.autodiff.module_harness import check_module

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Case:
    """One convolution; tuples have an entry per spatial dimension."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    group: int
    channels: int  # per group
    features: int  # per group
    bias: bool

    def attributes(self) -> dict[str, Any]:
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": [*self.begin, *self.end],
            "group": self.group,
        }


@st.composite
def cases(draw: st.DrawFn, ranks: Sequence[int] = (1, 1, 2, 2, 2, 3)) -> Case:
    rank = draw(st.sampled_from(list(ranks)))
    most = {1: 9, 2: 7, 3: 4}[rank]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernel = each(1, 3)
    symmetric = draw(st.booleans())
    begin = each(0, 2)
    case = Case(
        image=each(1, most),
        kernel=kernel,
        strides=each(1, 3),
        dilations=each(1, 2),
        begin=begin,
        end=begin if symmetric else each(0, 2),
        group=draw(st.integers(1, 3)),
        channels=draw(st.integers(1, 3)),
        features=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
    )
    reach = [(k - 1) * d + 1 for k, d in zip(case.kernel, case.dilations)]
    assume(all(n + b + e >= r for n, b, e, r in zip(case.image, case.begin, case.end, reach)))
    return case


def padded(x: Tensor, begin: Sequence[int], end: Sequence[int]) -> Tensor:
    return F.pad(x, [amount for pair in zip(reversed(begin), reversed(end)) for amount in pair])


def check_conv(case: Case, **attrs: Any) -> None:
    def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = padded(x, case.begin, case.end)
        return CONV[len(case.image)](x, weight, bias, case.strides, 0, case.dilations, case.group)

    features = case.features * case.group
    inputs: list[Shape] = [
        (None, case.channels * case.group, *case.image),
        (features, case.channels, *case.kernel),
    ]
    check_operator("Conv", reference, [*inputs, (features,)] if case.bias else inputs, **(attrs or case.attributes()))


@operator("Conv")
@given(case=cases())
@examples(60)
def test_conv_with_strides_pads_dilations_and_groups(case: Case) -> None:
    check_conv(case)


@operator("Conv")
@given(case=cases((1, 2)), multiplier=st.integers(1, 2), channels=st.integers(2, 5))
@examples(30)
def test_depthwise_conv(case: Case, multiplier: int, channels: int) -> None:
    known = {**case.__dict__, "group": channels, "channels": 1, "features": multiplier}
    check_conv(Case(**known))


@operator("Conv")
@given(
    image=st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple),
    stride=st.integers(1, 2),
    channels=st.integers(1, 4),
    features=st.integers(1, 4),
    bias=st.booleans(),
)
@examples(20)
def test_pointwise_conv(image: tuple[int, ...], stride: int, channels: int, features: int, bias: bool) -> None:
    one, zero = (1,) * len(image), (0,) * len(image)
    check_conv(Case(image, one, (stride,) * len(image), one, zero, zero, 1, channels, features, bias))


@operator("Conv")
def test_conv_without_attributes() -> None:
    check_operator("Conv", F.conv2d, [(None, 2, 5, 4), (3, 2, 3, 2)])


@operator("Conv")
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@given(size=st.integers(4, 8), kernel=st.integers(1, 4), stride=st.integers(1, 3))
@examples(12)
def test_conv_that_pads_by_itself(mode: str, size: int, kernel: int, stride: int) -> None:
    assume(kernel >= stride)  # otherwise onnxruntime 1.19 takes the padding it does not need for negative
    out = -(-size // stride)
    total = 0 if mode == "VALID" else max((out - 1) * stride + kernel - size, 0)
    small, large = total // 2, total - total // 2
    begin, end = (large, small) if mode == "SAME_LOWER" else (small, large)
    case = Case((size,), (kernel,), (stride,), (1,), (begin,), (end,), 1, 2, 2, True)
    check_conv(case, auto_pad=mode, kernel_shape=[kernel], strides=[stride])


@operator("Conv")
def test_conv_over_an_image_of_unknown_size_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match=r"/Conv.*image size"):
        check_operator("Conv", F.conv1d, [(2, 3, None), (4, 3, 2)])


def transposed_image(case: Case, extra: tuple[int, ...]) -> list[int]:
    """The size of what a transposed convolution gives."""
    return [
        (n - 1) * s + (k - 1) * d + 1 + p - b - e
        for n, s, k, d, p, b, e in zip(
            case.image, case.strides, case.kernel, case.dilations, extra, case.begin, case.end
        )
    ]


def check_transposed(case: Case, extra: tuple[int, ...]) -> None:
    rank, sizes = len(case.image), transposed_image(case, extra)

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        whole = TRANSPOSED[rank](x, weight, None, case.strides, 0, extra, case.group, case.dilations)
        for axis, (begin, size) in enumerate(zip(case.begin, sizes)):
            whole = whole.narrow(2 + axis, begin, size)
        return whole if bias is None else whole + bias.reshape(-1, *[1] * rank)

    channels, features = case.channels * case.group, case.features * case.group
    inputs: list[Shape] = [(None, channels, *case.image), (channels, case.features, *case.kernel)]
    check_operator(
        "ConvTranspose",
        reference,
        [*inputs, (features,)] if case.bias else inputs,
        **case.attributes(),
        output_padding=extra,
    )


@operator("ConvTranspose")
@given(case=cases(), data=st.data())
@examples(50)
def test_transposed_conv_with_strides_pads_dilations_groups_and_output_padding(case: Case, data: st.DataObject) -> None:
    extra = tuple(data.draw(st.integers(0, stride - 1)) for stride in case.strides)
    assume(min(transposed_image(case, extra)) > 0)
    check_transposed(case, extra)


@operator("ConvTranspose")
def test_output_padding_may_reach_the_stride_if_it_is_less_than_the_dilation() -> None:
    check_transposed(Case((4,), (2,), (1,), (3,), (0,), (0,), 1, 2, 3, True), (2,))


@operator("ConvTranspose")
def test_a_network_of_convolutions_as_pytorch_exports_it() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 6, 1),
        nn.ReLU(),
        nn.Conv2d(6, 4, (1, 3), padding="same"),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
    )
    check_module(module, torch.randn(2, 2, 8, 7))
