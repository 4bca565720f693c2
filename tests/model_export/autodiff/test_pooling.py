"""Pooling and resizing: overlapping windows, windows that overhang, and who gets the gradient of a tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.model_export.autodiff.drawing import distinct, examples, few, ints
from tests.model_export.autodiff.harness import check_operator, of, operator
from tests.model_export.autodiff.module_harness import check_module

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True)
class Case:
    """One pooling; tuples have an entry per spatial dimension."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]  # the same at both ends, at most half of a kernel: what PyTorch accepts
    ceil: bool
    channels: int

    def windows_fit(self) -> bool:
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations)]
        return all(n + 2 * p >= r for n, p, r in zip(self.image, self.pads, reach))

    def windows_overhang(self) -> bool:
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations)]
        return any((n + 2 * p - r) % s for n, p, r, s in zip(self.image, self.pads, reach, self.strides))

    def last_window_starts_inside(self) -> bool:
        """Otherwise PyTorch leaves it out, and onnxruntime does not in every version."""
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations)]
        steps = [-(-(n + 2 * p - r) // s) for n, p, r, s in zip(self.image, self.pads, reach, self.strides)]
        return all(step * s < n + p for step, s, n, p in zip(steps, self.strides, self.image, self.pads))


@st.composite
def cases(draw: st.DrawFn, dilated: bool, ranks: Sequence[int] = (1, 2, 2, 2, 3)) -> Case:
    rank = draw(st.sampled_from(list(ranks)))
    most = {1: 9, 2: 7, 3: 4}[rank]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernel = each(1, 3)
    tiles = draw(st.booleans())
    case = Case(
        image=each(2, most),
        kernel=kernel,
        strides=kernel if tiles else each(1, 3),
        dilations=each(1, 2) if dilated else (1,) * rank,
        pads=tuple(draw(st.integers(0, size // 2)) for size in kernel),
        ceil=draw(st.booleans()),
        channels=draw(st.integers(1, 3)),
    )
    assume(case.windows_fit() and (not case.ceil or case.last_window_starts_inside()))
    return case


def check_max_pool(case: Case, fill: Callable[..., np.ndarray]) -> None:
    check_operator(
        "MaxPool",
        lambda x: MAX[len(case.image)](x, case.kernel, case.strides, case.pads, case.dilations, case.ceil),
        [(None, case.channels, *case.image)],
        fill=fill,
        kernel_shape=case.kernel,
        strides=case.strides,
        dilations=case.dilations,
        pads=[*case.pads, *case.pads],
        ceil_mode=int(case.ceil),
    )


@operator("MaxPool")
@given(case=cases(dilated=True))
@examples(80)
def test_max_pool_with_windows_that_overlap_and_overhang(case: Case) -> None:
    check_max_pool(case, distinct)


@operator("MaxPool")
@given(case=cases(dilated=True))
@examples(30)
def test_the_first_of_equal_maxima_gets_the_gradient_as_in_pytorch(case: Case) -> None:
    check_max_pool(case, few(2))


@operator("MaxPool")
def test_max_pool_with_padding_at_one_end_only() -> None:
    check_operator(
        "MaxPool",
        lambda x: F.max_pool2d(F.pad(x, [0, 1, 0, 1], value=-torch.inf), 2, 2),
        [(None, 2, 5, 3)],
        fill=distinct,
        kernel_shape=[2, 2],
        strides=[2, 2],
        pads=[0, 0, 1, 1],
    )


@operator("MaxPool")
def test_padding_of_max_pool_never_wins_over_negative_numbers() -> None:
    def negative(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return distinct(rng, shape) - np.float32(1000.0)

    check_max_pool(Case((5, 5), (3, 3), (2, 2), (1, 1), (1, 1), False, 2), negative)


@operator("MaxPool")
def test_max_pool_without_strides_moves_by_one() -> None:
    check_operator("MaxPool", lambda x: F.max_pool1d(x, 2, 1), [(None, 2, 5)], fill=distinct, kernel_shape=[2])


@operator("AveragePool")
@given(case=cases(dilated=False), include=st.booleans())
@examples(80)
def test_average_pool_divides_by_the_elements_it_counted(case: Case, include: bool) -> None:
    """Not drawn: padding that counts, with windows that overhang it; onnxruntime 1.19 divides by too much."""
    assume(not (include and case.ceil and case.windows_overhang()))
    assume(len(case.image) < 3 or all(n >= k for n, k in zip(case.image, case.kernel)))  # PyTorch asks for it
    check_operator(
        "AveragePool",
        lambda x: AVERAGE[len(case.image)](x, case.kernel, case.strides, case.pads, case.ceil, include),
        [(None, case.channels, *case.image)],
        kernel_shape=case.kernel,
        strides=case.strides,
        pads=[*case.pads, *case.pads],
        ceil_mode=int(case.ceil),
        count_include_pad=int(include),
    )


@operator("AveragePool")
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("include", [False, True])
def test_average_pool_that_pads_by_itself(mode: str, include: bool) -> None:
    begin, end = (1, 0) if mode == "SAME_LOWER" else (0, 1)

    def reference(x: Tensor) -> Tensor:
        total = F.avg_pool1d(F.pad(x, [begin, end]), 2, 1)
        counted = F.avg_pool1d(F.pad(torch.ones_like(x), [begin, end]), 2, 1)
        return total if include else total / counted

    check_operator(
        "AveragePool",
        reference,
        [(None, 2, 5)],
        kernel_shape=[2],
        auto_pad=mode,
        count_include_pad=int(include),
    )


@operator("AveragePool")
def test_average_pool_with_padding_at_one_end_only() -> None:
    check_operator(
        "AveragePool",
        lambda x: F.avg_pool1d(F.pad(x, [0, 1]), 2, 2),
        [(None, 2, 5)],
        kernel_shape=[2],
        strides=[2],
        pads=[0, 1],
        count_include_pad=1,
    )


@pytest.mark.parametrize(
    ("op_type", "reference"),
    [
        of("GlobalAveragePool", lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True)),
        of("GlobalMaxPool", lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True)),
    ],
)
@given(channels=st.integers(1, 3), image=st.lists(st.integers(1, 4), min_size=1, max_size=3))
@examples(15)
def test_global_pooling(op_type: str, reference: Callable[[Tensor], Tensor], channels: int, image: list[int]) -> None:
    check_operator(op_type, reference, [(None, channels, *image)], fill=distinct)


@operator("GlobalMaxPool")
def test_the_first_maximum_of_an_image_gets_the_gradient_as_in_pytorch() -> None:
    check_operator("GlobalMaxPool", lambda x: F.adaptive_max_pool2d(x, 1), [(None, 3, 3, 4)], fill=few(2))


@operator("Resize")
@given(
    image=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    factors=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    by_scale=st.booleans(),
)
@examples(25)
def test_nearest_enlarged_by_whole_factors_sums_over_the_copies(
    image: list[int], factors: list[int], by_scale: bool
) -> None:
    factors = factors[: len(image)]
    wide = [n * f for n, f in zip(image, factors)]
    shape = (None, 2, *image)
    inputs = [shape, None, np.array([1, 1, *factors], np.float32)]
    attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if by_scale:
        check_operator("Resize", lambda x: F.interpolate(x, size=wide), inputs, **attrs)
    else:
        axes = {"axes": list(range(2, len(shape)))}
        check_operator(
            "Resize", lambda x: F.interpolate(x, size=wide), [shape, None, None, ints(wide)], **attrs, **axes
        )


@operator("Resize")
@given(
    image=st.lists(st.integers(1, 6), min_size=2, max_size=2),
    wide=st.lists(st.integers(1, 9), min_size=2, max_size=2),
)
@examples(25)
def test_nearest_to_any_size(image: list[int], wide: list[int]) -> None:
    check_operator(
        "Resize",
        lambda x: F.interpolate(x, size=wide),
        [(None, 2, *image), None, None, ints(wide)],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
        axes=[2, 3],
    )


@operator("Resize")
@pytest.mark.parametrize(("mode", "align"), [("half_pixel", False), ("align_corners", True)])
@pytest.mark.parametrize(("image", "wide"), [((3, 4), (6, 8)), ((4, 4), (7, 3)), ((2, 5), (2, 9))])
def test_linear_in_both_directions(mode: str, align: bool, image: tuple[int, int], wide: tuple[int, int]) -> None:
    def reference(x: Tensor) -> Tensor:
        return F.interpolate(x, size=wide, mode="bilinear", align_corners=align)

    check_operator(
        "Resize",
        reference,
        [(None, 2, *image), None, None, ints(wide)],
        mode="linear",
        coordinate_transformation_mode=mode,
        axes=[2, 3],
    )


@operator("MaxPool", "AveragePool", "Resize")
def test_pooling_as_pytorch_exports_it() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(2, 1, 1))
            self.largest = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
            self.mean = nn.AvgPool2d(2, stride=1)
            self.wide = nn.Upsample(scale_factor=2, mode="nearest")

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.mean(self.largest(x * self.scale)))

    check_module(Model(), torch.randn(2, 2, 7, 6))


@pytest.mark.parametrize("size", [1, 2])
def test_adaptive_average_pool_as_pytorch_exports_it(size: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, size))
    check_module(module, torch.randn(2, 2, 4, 4))
