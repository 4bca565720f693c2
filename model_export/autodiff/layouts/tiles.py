"""Two-dimensional convolutions on pixel-major tensors by tiles.

A pixel-major tensor is [pixels, N, channels]: one row holds the whole batch of one pixel, so picking pixels is a Gather
of long rows whose indices are constants, whatever the batch. A convolution gathers overlapping tiles, transforms them,
and is one batched matrix product over the positions of the transformed tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.layouts.winograd import Bilinear, correlation, strided_adjoint, strided_correlation
from model_export.graph import attribute

Size = tuple[int, int]

MOST_TILES, USUAL_BATCH = 6 << 20, 32  # bytes of transformed tiles that are there at once, at that batch


def pixel_order(size: Size) -> np.ndarray:
    """The order in which pixel-major tensors of this image size hold their pixels (row-major pixel numbers).

    It is the order in which tiles of 4x4 and of 2x2 outputs come out of the inverse transform, so that nothing has to
    be put in order between convolutions; images that such tiles do not cover exactly stay row by row.
    """
    height, width = size
    numbers = np.arange(height * width)
    if height % 4 or width % 4:
        return numbers
    h, w = np.divmod(numbers, width)
    return np.lexsort((w // 4, h // 4, w // 2 % 2, w % 2, h // 2 % 2, h % 2))


def places_in(order: np.ndarray) -> np.ndarray:
    """For each pixel number its place in an order; the entry behind them, for pixels outside, is one more."""
    places = np.full(len(order) + 1, len(order), np.int64)
    places[order] = np.arange(len(order))
    return places


def row_of_pixel(size: Size) -> np.ndarray:
    return places_in(pixel_order(size))


def pick(context: Context, x: str, places: np.ndarray, count: int, axis: int = 0) -> str:
    """Entries along the pixel axis of a tensor that has `count` of them; entry number `count` is zero."""
    if np.array_equal(places, np.arange(count)):
        return x
    if (places == count).any():
        pads = np.zeros(6, np.int64)
        pads[3 + axis] = 1
        x = context.op("Pad", x, pads)
    return context.op("Gather", x, places.astype(np.int64), axis=axis)


def tap_pixels(node: NodeProto, size: Size, out: Size, order: np.ndarray) -> np.ndarray:
    """[taps * pixels]: the input pixel that each tap meets at each output pixel; one number more means padding."""
    kernel, strides, dilations, pads = (attribute(node, a) for a in ("kernel_shape", "strides", "dilations", "pads"))
    i, j = (grid.reshape(-1, 1) for grid in np.mgrid[: kernel[0], : kernel[1]])
    a, b = np.divmod(order, out[1])
    h = a * strides[0] + i * dilations[0] - pads[0]
    w = b * strides[1] + j * dilations[1] - pads[1]
    inside = (h >= 0) & (h < size[0]) & (w >= 0) & (w < size[1])
    return np.where(inside, h * size[1] + w, size[0] * size[1]).reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class TilePlan:
    """Which pixels form the tiles of one convolution, and how tiles are transformed."""

    bilinear: Bilinear
    source: Size  # image that is gathered
    target: Size  # image that results
    step: int  # distance between tiles in the source
    offset: Size  # where the first tile starts: minus the padding

    @property
    def edge(self) -> int:
        """Outputs of a tile along one axis."""
        return len(self.bilinear.inverse)

    @property
    def split(self) -> int:
        """2 where two neighbouring 2x2 tiles are kept apart, so that the result is in the order of 4x4 tiles."""
        return 2 if self.edge == 2 and not (self.target[0] % 4 or self.target[1] % 4) else 1

    @cached_property
    def rows(self) -> np.ndarray:
        """The order of outputs inside a tile, along one axis."""
        regular = self.edge == 4 and not (self.target[0] % 4 or self.target[1] % 4)
        return np.array([0, 2, 1, 3]) if regular else np.arange(self.edge)

    @property
    def down(self) -> int:
        """Tiles, or pairs of them, from the top to the bottom."""
        return -(-self.target[0] // self.edge) // self.split

    @property
    def across(self) -> int:
        return -(-self.target[1] // self.edge) // self.split

    @cached_property
    def tile(self) -> np.ndarray:
        """[products * split, inputs]: the transform along one axis, of two tiles at once where they are kept apart.

        Neighbouring tiles overlap, so that two of them are gathered with fewer pixels than one after the other.
        """
        products, inputs = self.bilinear.tile.shape
        both = np.zeros((products, self.split, inputs + self.step * (self.split - 1)))
        for place in range(self.split):
            both[:, place, place * self.step : place * self.step + inputs] = self.bilinear.tile
        return both.reshape(products * self.split, -1)

    def gathered(self) -> np.ndarray:
        """Source row of every element of every tile, or pair of tiles, as [inputs, inputs, tiles, tiles]."""
        step = self.step * self.split
        i, j, a, b = np.ogrid[: self.tile.shape[1], : self.tile.shape[1], : self.down, : self.across]
        pixels = _pixel_numbers(a * step + i + self.offset[0], b * step + j + self.offset[1], self.source)
        return np.take(row_of_pixel(self.source), pixels)

    @cached_property
    def produced(self) -> np.ndarray:
        """Target pixel of every output as [edge, split, edge, split, tiles, tiles], -1 for those beyond the image."""
        i, p, j, q, a, b = np.ogrid[: self.edge, : self.split, : self.edge, : self.split, : self.down, : self.across]
        h = (a * self.split + p) * self.edge + self.rows[i]
        w = (b * self.split + q) * self.edge + self.rows[j]
        return _pixel_numbers(h, w, self.target)

    @property
    def inverse(self) -> np.ndarray:
        return np.take(self.bilinear.inverse, self.rows, 0)

    @property
    def kernel(self) -> np.ndarray:
        """[products^2, taps^2]"""
        return np.kron(self.bilinear.kernel, self.bilinear.kernel)

    def positions(self) -> list[int]:
        """Leading dimensions of transformed tiles."""
        products = len(self.bilinear.tile)
        return [products**2] if self.split == 1 else [products, self.split, products]


def _pixel_numbers(h: np.ndarray, w: np.ndarray, size: Size) -> np.ndarray:
    """Row-major pixel numbers, -1 outside of the image."""
    inside = (h >= 0) & (h < size[0]) & (w >= 0) & (w < size[1])
    return np.where(inside, h * size[1] + w, -1).reshape(-1)


def forward_plan(source: Size, target: Size, taps: int, stride: int, pads: Size) -> TilePlan:
    """2x2 tiles: they are as exact as a direct convolution.

    4x4 tiles are a little faster but three times less exact, and rounding in the forward pass decides which ReLUs that
    lie near zero switch; in the backward pass it does no such harm.
    """
    if stride == 2:
        return TilePlan(strided_correlation(2), source, target, 4, (-pads[0], -pads[1]))
    return TilePlan(correlation(2, taps), source, target, 2, (-pads[0], -pads[1]))


def weight_plan(source: Size, target: Size, taps: int, stride: int, pads: Size) -> TilePlan:
    """The plan of the weight gradient: the forward algorithm, transposed, with the tiles that are fastest."""
    outputs = _outputs(target)
    if stride == 2 or taps == 5 or outputs == 2:
        return forward_plan(source, target, taps, stride, pads)
    return TilePlan(correlation(outputs, taps), source, target, outputs, (-pads[0], -pads[1]))


def gradient_plan(source: Size, target: Size, taps: int, stride: int, pads: Size) -> TilePlan:
    """The plan of the input gradient: it gathers the gradient of the target and gives that of the source."""
    if stride == 2:
        return TilePlan(strided_adjoint(2), target, source, 2, (0, 0))
    outputs = 2 if taps == 5 else _outputs(source)
    plain = correlation(outputs, taps)
    flipped = Bilinear(plain.inverse, plain.kernel[:, ::-1], plain.tile)
    return TilePlan(flipped, target, source, outputs, (pads[0] - taps + 1, pads[1] - taps + 1))


def _outputs(size: Size) -> int:
    """4x4 tiles, or 2x2 where the image is so small that 4x4 ones would mostly hang over."""
    work = {m: (-(-size[0] // m)) * (-(-size[1] // m)) * (m + 2) ** 2 for m in (4, 2)}
    return min(work, key=lambda m: work[m])


def transform(context: Context, matrix: np.ndarray, x: str, split: int) -> str:
    """Apply a matrix [a, b] along both axes of tiles [b, split, b, rest]: two small products beat one large."""
    constant = context.constant(np.ascontiguousarray(matrix, np.float32))
    size = matrix.shape[1]
    across = context.op("MatMul", constant, context.op("Reshape", x, np.array([size * split, size, -1], np.int64)))
    return context.op("MatMul", constant, context.op("Reshape", across, np.array([size, -1], np.int64)))


def _make_tiles(context: Context, x: str, rows: np.ndarray, plan: TilePlan, channels: int) -> str:
    """[pixels, N, C] -> transformed tiles [*positions, tiles * N, C], of some rows of tiles."""
    taken = pick(context, x, rows.reshape(-1), plan.source[0] * plan.source[1])
    tiles = transform(context, plan.tile, taken, 1)
    return context.op("Reshape", tiles, np.array([*plan.positions(), -1, channels], np.int64))


def _parts(context: Context, plan: TilePlan, channels: int, features: int) -> int:
    """In how many parts the tiles of a convolution go through: as the memory plan has it, at least for large images."""
    size = len(plan.bilinear.tile) ** 2 * len(plan.produced) // plan.edge**2 * max(channels, features)
    wanted = context.parts.get(context.emitter.scope_name, 1)
    return min(plan.down * plan.across, max(wanted, -(-4 * USUAL_BATCH * size // MOST_TILES)))


def _some_tiles(places: np.ndarray, plan: TilePlan, parts: int) -> list[np.ndarray]:
    """Divide what belongs to all tiles into that of some tiles after the other: whole rows, while there are enough."""
    if parts > plan.down:
        return np.array_split(places.reshape(-1, plan.down * plan.across), parts, axis=1)
    rows = np.array_split(places.reshape(-1, plan.down, plan.across), parts, axis=1)
    return [part.reshape(len(part), -1) for part in rows]


def transform_kernel(context: Context, weight: str, plan: TilePlan, features: int, channels: int) -> str:
    """[K, C, r, r] -> [*positions, K, C], with 1 where the positions are split."""
    taps = plan.kernel.shape[1]
    flat = context.op("Reshape", weight, np.array([features * channels, taps], np.int64))
    transformed = context.op("Gemm", plan.kernel.astype(np.float32), flat, transB=1)
    leading = [plan.positions()[0]] if plan.split == 1 else [plan.positions()[0], 1, plan.positions()[2]]
    return context.op("Reshape", transformed, np.array([*leading, features, channels], np.int64))


def tiled_product(
    context: Context, x: str, write_kernel: Callable[[], str], plan: TilePlan, channels: int, features: int
) -> str:
    """[pixels, N, C] -> [pixels, N, K]; `write_kernel` gives the transformed kernel [*positions, C, K].

    The tiles of a large image would take up to nine times its memory: some rows of them follow the others.
    """
    parts = _parts(context, plan, channels, features)
    images = []
    for part in _some_tiles(plan.gathered(), plan, parts):
        tiles = _make_tiles(context, x, part, plan, channels)
        rows = transform(context, plan.inverse, context.op("MatMul", tiles, write_kernel()), plan.split)
        shape = [(plan.edge * plan.split) ** 2, part.shape[1], -1]
        images.append(rows if parts == 1 else context.op("Reshape", rows, np.array(shape, np.int64)))
    whole = images[0] if parts == 1 else context.op("Concat", *images, axis=1)
    image = context.op("Reshape", whole, np.array([len(plan.produced), -1, features], np.int64))
    place = np.argsort(plan.produced, kind="stable")[(plan.produced < 0).sum() :]  # raw row of each pixel
    return pick(context, image, place[pixel_order(plan.target)], len(plan.produced))


def turned(context: Context, x: str, plan: TilePlan) -> str:
    """The last two dimensions exchanged; onnxruntime fuses this into the product that follows."""
    rank = len(plan.positions()) + 2
    return context.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])


def tile_weight_gradient(context: Context, x: str, dy: str, plan: TilePlan, features: int, channels: int) -> str:
    """[K, C, r, r]: the forward algorithm transposed; what some rows of tiles give is added to that of the others.

    The gradient is turned before it is spread: it has fewer numbers then (4 for every 25, 16 for every 36).
    """
    parts = _parts(context, plan, channels, features)
    raw = row_of_pixel(plan.target)[plan.produced]
    sums = []
    for taken, met in zip(_some_tiles(plan.gathered(), plan, parts), _some_tiles(raw, plan, parts), strict=True):
        tiles = _make_tiles(context, x, taken, plan, channels)
        product = context.op("MatMul", _spread(context, dy, met, plan, features), tiles)
        if plan.split > 1:
            product = context.op("ReduceSum", product, [1], keepdims=0)
        flat = context.op("Reshape", product, np.array([plan.kernel.shape[0], features * channels], np.int64))
        sums.append(context.op("MatMul", np.ascontiguousarray(plan.kernel.T, np.float32), flat))
    summed = sums[0] if parts == 1 else context.op("Sum", *sums)
    edge = plan.bilinear.kernel.shape[1]
    back = context.op("Transpose", summed, perm=[1, 0])
    return context.op("Reshape", back, np.array([features, channels, edge, edge], np.int64))


def _spread(context: Context, dy: str, met: np.ndarray, plan: TilePlan, features: int) -> str:
    """[pixels, N, K] -> [*positions, K, tiles * N]: what each product of a tile contributes to the outputs."""
    places = met.reshape(plan.edge * plan.split * plan.edge, -1)
    taken = pick(context, dy, places, plan.target[0] * plan.target[1])  # [outputs, tiles, N, K]
    columns = context.op("Transpose", taken, perm=[0, 3, 1, 2])
    spread = transform(context, plan.inverse.T, columns, plan.split)
    return context.op("Reshape", spread, np.array([*plan.positions(), features, -1], np.int64))
