"""Depthwise convolutions on channel-major tensors, [channels, pixels, N].

A depthwise convolution is a small linear map of one channel's pixels. Per tile that map is a matrix, made from the
channel's few weights by a product with a constant 0/1 tensor; applying it to all tiles and the whole batch is one
matrix product per channel. More multiplications than the definition asks for, but at the speed of matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from model_export.autodiff.engine import Context
from model_export.autodiff.layouts.tiles import USUAL_BATCH, Size, pick, places_in
from model_export.autodiff.rules.convolution import Window

SMALL = 16  # images of at most so many pixels are one tile; larger matrices cost more to make than small batches gain
MOST_TILES = 12 << 20  # bytes of tiles that are there at once, at the usual batch; smaller parts delay small batches
MANY_TILES = 4  # in a row of tiles; in smaller images collecting pixel by pixel is as fast


def plane_order(size: Size) -> np.ndarray:
    """The order of pixels in channel-major tensors: as 4x4 tiles come out, or row by row."""
    numbers = np.arange(size[0] * size[1])
    if len(numbers) <= SMALL or size[0] % 4 or size[1] % 4:
        return numbers
    h, w = np.divmod(numbers, size[1])
    return np.lexsort((w // 4, h // 4, w % 4, h % 4))


@dataclass(frozen=True)
class PlanePlan:
    """One direction of a depthwise convolution: which source pixels make which target pixels, tile by tile."""

    source: Size
    target: Size
    selection: np.ndarray  # [taps, target pixels of a tile, source pixels of a tile], 0 or 1
    taken: np.ndarray  # [source pixels of a tile * tiles]: places in the source, one number more for zero
    made: np.ndarray  # [target pixels of a tile * tiles]: target pixel numbers, -1 beyond the edge


def forward_plan(window: Window) -> PlanePlan:
    """From the input to the output."""
    edge = 2 if max(window.strides) > 1 else 4
    tile = _tile(window.out, window.size, (edge, edge))
    axes = [_forward_axis(window, axis, tile[axis], tile == window.out) for axis in (0, 1)]
    return _plan(window, _size(window.size), _size(window.out), tile, axes)


def gradient_plan(window: Window) -> PlanePlan:
    """From the gradient of the output to that of the input."""
    # A tile of the input must span whole strides, so that every tile meets the output in the same way.
    tile = _tile(window.size, window.out, _size(tuple(4 if 4 % s == 0 else s for s in window.strides)))
    axes = [_backward_axis(window, axis, tile[axis], tile == window.size) for axis in (0, 1)]
    return _plan(window, _size(window.out), _size(window.size), tile, axes)


def _size(values: tuple[int, ...]) -> Size:
    return values[0], values[1]


def _tile(target: tuple[int, ...], source: tuple[int, ...], small: Size) -> Size:
    """The whole image if there are few pixels, else a small tile."""
    return _size(target) if math.prod(target) <= SMALL and math.prod(source) <= SMALL else small


@dataclass(frozen=True)
class _Axis:
    """One axis of a tile: where its source pixels start, how far tiles are apart, and which taps connect them."""

    start: int
    step: int
    length: int
    links: np.ndarray  # [taps, target, source], 0 or 1


def _forward_axis(window: Window, axis: int, tile: int, whole: bool) -> _Axis:
    stride, dilation, pad, taps = window.strides[axis], window.dilations[axis], window.begin[axis], window.kernel[axis]
    start, length = (0, window.size[axis]) if whole else (-pad, (tile - 1) * stride + (taps - 1) * dilation + 1)
    links = np.zeros((taps, tile, length), np.float32)
    for tap in range(taps):
        for place in range(tile):
            met = place * stride + tap * dilation - pad - start
            if 0 <= met < length:
                links[tap, place, met] = 1.0
    return _Axis(start, tile * stride, length, links)


def _backward_axis(window: Window, axis: int, tile: int, whole: bool) -> _Axis:
    stride, dilation, pad, taps = window.strides[axis], window.dilations[axis], window.begin[axis], window.kernel[axis]
    start = 0 if whole else -((taps - 1) * dilation - pad) // stride  # the first output that reaches pixel 0, or before
    last = window.out[axis] - 1 if whole else (tile - 1 + pad) // stride
    links = np.zeros((taps, tile, last - start + 1), np.float32)
    for tap in range(taps):
        for place in range(tile):
            met, rest = divmod(place + pad - tap * dilation, stride)
            if rest == 0 and start <= met <= last:
                links[tap, place, met - start] = 1.0
    return _Axis(start, tile // stride, last - start + 1, links)


def _plan(window: Window, source: Size, target: Size, tile: Size, axes: list[_Axis]) -> PlanePlan:
    counts = [-(-target[i] // tile[i]) for i in (0, 1)]
    a, b = axes
    i, j, p, q = np.ogrid[: a.length, : b.length, : counts[0], : counts[1]]
    h, w = p * a.step + i + a.start, q * b.step + j + b.start
    inside = (h >= 0) & (h < source[0]) & (w >= 0) & (w < source[1])
    pixels = np.where(inside, h * source[1] + w, source[0] * source[1]).reshape(-1)
    i, j, p, q = np.ogrid[: tile[0], : tile[1], : counts[0], : counts[1]]
    h, w = p * tile[0] + i, q * tile[1] + j
    made = np.where((h < target[0]) & (w < target[1]), h * target[1] + w, -1).reshape(-1)
    selection = np.einsum("iab,jcd->ijacbd", a.links, b.links)
    shape = (math.prod(window.kernel), tile[0] * tile[1], a.length * b.length)
    return PlanePlan(source, target, selection.reshape(shape), places_in(plane_order(source))[pixels], made)


def channel_parts(plan: PlanePlan, channels: int) -> list[tuple[int, int]]:
    """Ranges of channels that go through one after the other: all tiles of large images would leave the cache."""
    parts = min(channels, -(-4 * USUAL_BATCH * channels * len(plan.taken) // MOST_TILES))
    bounds = np.linspace(0, channels, parts + 1).astype(int)
    return [(int(first), int(last)) for first, last in pairwise(bounds)]


def take_tiles(context: Context, x: str, plan: PlanePlan, channels: int) -> str:
    """[C, pixels, N] -> [C, source pixels of a tile, tiles * N]."""
    if _has_long_runs(plan):
        return _take_runs(context, x, plan, channels)
    taken = pick(context, x, plan.taken, plan.source[0] * plan.source[1], axis=1)
    return context.op("Reshape", taken, np.array([channels, plan.selection.shape[2], -1], np.int64))


def take_channels(context: Context, x: str, channels: int, part: tuple[int, int]) -> str:
    return x if part == (0, channels) else context.op("Slice", x, [part[0]], [part[1]], [0])


def join_channels(context: Context, parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else context.op("Concat", *parts, axis=0)


def _has_long_runs(plan: PlanePlan) -> bool:
    """Whether tiles of 6x6 with a border of one pixel cover an image that is held as 4x4 tiles, many to a row."""
    size = plan.source
    if plan.target != size or size[0] % 4 or size[1] % 4 or size[1] // 4 < MANY_TILES:
        return False
    return np.array_equal(plan.taken, _bordered_tiles(size))


def _bordered_tiles(size: Size) -> np.ndarray:
    """[6 * 6 * tiles]: the places of 4x4 tiles with a border of one pixel around each."""
    i, j, p, q = np.ogrid[:6, :6, : size[0] // 4, : size[1] // 4]
    h, w = p * 4 + i - 1, q * 4 + j - 1
    inside = (h >= 0) & (h < size[0]) & (w >= 0) & (w < size[1])
    return places_in(plane_order(size))[np.where(inside, h * size[1] + w, size[0] * size[1]).reshape(-1)]


def _take_runs(context: Context, x: str, plan: PlanePlan, channels: int) -> str:
    """Collect tiles a row of tiles at a time, where Gather collects them pixel by pixel.

    Pixels are held by their place in a tile, then by tile. So a row of a tile's border is that of the tile above or
    below, in runs as long as a row of tiles; to the left and right everything moves by one tile.
    """
    down, across = plan.source[0] // 4, plan.source[1] // 4
    runs = context.op("Reshape", x, np.array([channels, 16 * down, -1], np.int64))
    i, j, p = np.ogrid[:6, :4, :down]
    h = p * 4 + i - 1
    rows = np.where((h >= 0) & (h < plan.source[0]), (h % 4 * 4 + j) * down + h // 4, 16 * down).reshape(-1)
    bordered = pick(context, runs, rows, 16 * down, axis=1)
    tiles = context.op("Reshape", bordered, np.array([channels * 6, 4, down, across, -1], np.int64))
    left = context.op("Slice", tiles, [3, 0], [4, across - 1], [1, 3])
    right = context.op("Slice", tiles, [0, 1], [1, across], [1, 3])
    left = context.op("Pad", left, np.array([0, 0, 0, 1, 0, 0, 0, 0, 0, 0], np.int64))
    right = context.op("Pad", right, np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 0], np.int64))
    whole = context.op("Concat", left, tiles, right, axis=1)
    return context.op("Reshape", whole, np.array([channels, plan.selection.shape[2], -1], np.int64))


def write_matrices(context: Context, weight: str, plan: PlanePlan, channels: int) -> str:
    """[C, target pixels of a tile, source pixels of a tile]: each channel's convolution as a matrix."""
    taps, outputs, inputs = plan.selection.shape
    small = context.op("Reshape", weight, np.array([channels, taps], np.int64))
    matrix = context.op("MatMul", small, plan.selection.reshape(taps, -1))
    return context.op("Reshape", matrix, np.array([channels, outputs, inputs], np.int64))


def apply_matrices(context: Context, tiles: str, matrices: str, plan: PlanePlan, channels: int) -> str:
    """The convolution itself: [C, pixels of the target, N]."""
    product = context.op("MatMul", matrices, tiles)
    rows = context.op("Reshape", product, np.array([channels, len(plan.made), -1], np.int64))
    place = np.argsort(plan.made, kind="stable")[(plan.made < 0).sum() :]
    return pick(context, rows, place[plane_order(plan.target)], len(plan.made), axis=1)


def tile_products(context: Context, tiles: str, x: str, plan: PlanePlan, channels: int) -> str:
    """[C, source * target pixels]: tiles of dy times x, by the plan of the input's gradient.

    A pixel of x belongs to one tile, whose pixels of dy are all that it meets.
    """
    _, outputs, inputs = plan.selection.shape
    made = np.where(plan.made < 0, plan.target[0] * plan.target[1], plan.made)
    spread = pick(context, x, places_in(plane_order(plan.target))[made], plan.target[0] * plan.target[1], axis=1)
    rows = context.op("Reshape", spread, np.array([channels, outputs, -1], np.int64))
    # Of the two operands the smaller one is turned: a tile of x has fewer pixels.
    product = context.op("MatMul", tiles, context.op("Transpose", rows, perm=[0, 2, 1]))
    return context.op("Reshape", product, np.array([channels, inputs * outputs], np.int64))


def gather_taps(context: Context, products: str, plan: PlanePlan) -> str:
    """[C, taps]: those products of a tile that belong to a tap, summed."""
    turned = plan.selection.transpose(2, 1, 0).reshape(-1, len(plan.selection))
    return context.op("MatMul", products, np.ascontiguousarray(turned))
