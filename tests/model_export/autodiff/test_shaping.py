"""Operators that move or select elements: what was taken goes back to its place, taken twice it adds up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from torch import Tensor

from model_export.errors import ExportError
from model_export.graph import Shape
from tests.model_export.autodiff.drawing import concrete, examples, indices, ints, shapes
from tests.model_export.autodiff.harness import Fixed, check_nodes, check_operator, operator

LAST = np.iinfo(np.int64).max  # how exporters write "to the end"


@operator("Reshape")
@given(data=st.data())
@examples(30)
def test_reshape_gives_the_old_shape_back(data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    order = data.draw(st.permutations([dim for dim in shape if dim is not None]))
    at = data.draw(st.integers(0, len(order)))
    target = [*order[:at], -1, *order[at:]]
    check_operator("Reshape", lambda x: x.reshape(target), [shape, ints(target)])


@operator("Reshape")
@pytest.mark.parametrize(("target", "zero_means"), [((0, -1), (4, -1)), ((-1, 0), (-1, 3)), ((0, 0, 2), (4, 3, 2))])
def test_reshape_with_zeros_copies_dimensions(target: tuple[int, ...], zero_means: tuple[int, ...]) -> None:
    shape = (4, 3, 2) if len(target) == 3 else (4, 3)
    check_operator("Reshape", lambda x: x.reshape(zero_means), [shape, ints(target)])


@operator("Reshape")
def test_reshape_that_merges_the_batch_with_the_steps() -> None:
    check_operator("Reshape", lambda x: x.reshape(-1, 4), [(None, 3, 4), ints([-1, 4])])
    check_operator("Reshape", lambda x: x.reshape(3, -1, 2), [(None, 3, 4), ints([3, -1, 2])])


@operator("Flatten")
@given(data=st.data())
@examples(20)
def test_flatten_at_any_axis(data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    axis = data.draw(st.integers(-len(shape), len(shape)))

    def reference(x: Tensor) -> Tensor:
        rows = math.prod(x.shape[:axis]) if axis >= 0 else math.prod(x.shape[: x.ndim + axis])
        return x.reshape(rows, -1)

    check_operator("Flatten", reference, [shape], axis=axis)


@operator("Squeeze", "Unsqueeze")
@given(data=st.data())
@examples(30)
def test_dimensions_of_size_one_come_and_go(data: st.DataObject) -> None:
    shape = data.draw(shapes(1, 3))
    wide_rank = len(shape) + data.draw(st.integers(1, 2))
    new = sorted(data.draw(st.permutations(range(wide_rank)))[: wide_rank - len(shape)])
    signed = [axis - wide_rank if data.draw(st.booleans()) else axis for axis in new]
    wide = list(shape)
    for axis in new:
        wide.insert(axis, 1)

    def unsqueeze(x: Tensor) -> Tensor:
        for axis in new:
            x = x.unsqueeze(axis)
        return x

    check_operator("Unsqueeze", unsqueeze, [shape, ints(signed)])
    check_operator("Squeeze", lambda x: x.squeeze(tuple(new)), [tuple(wide), ints(signed)])


@operator("Squeeze")
def test_squeeze_without_axes_drops_all_ones() -> None:
    check_operator("Squeeze", torch.squeeze, [(None, 1, 3, 1)])


@operator("Transpose")
@given(data=st.data())
@examples(30)
def test_transpose_is_undone_by_the_opposite_permutation(data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    perm = data.draw(st.none() | st.permutations(range(len(shape))))
    attrs = {} if perm is None else {"perm": list(perm)}
    order = list(perm or range(len(shape))[::-1]) if len(shape) > 1 else [0]
    check_operator("Transpose", lambda x: x.permute(order), [shape], **attrs)


@operator("Concat")
@given(data=st.data())
@examples(30)
def test_concat_splits_its_gradient(data: st.DataObject) -> None:
    shape = data.draw(shapes(1))
    fixed = [axis for axis, dim in enumerate(shape) if dim is not None]
    if not fixed:
        shape, fixed = (None, 2), [1]
    axis = data.draw(st.sampled_from(fixed))
    sizes = data.draw(st.lists(concrete(1, 3), min_size=1, max_size=4))
    parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    signed = axis - len(shape) if data.draw(st.booleans()) else axis
    check_operator("Concat", lambda *parts: torch.cat(parts, axis), parts, axis=signed)


@operator("Concat")
def test_concat_along_the_batch() -> None:
    check_operator("Concat", lambda *parts: torch.cat(parts), [(None, 2), (3, 2)], axis=0)


@operator("Split")
@given(data=st.data())
@examples(40)
def test_split_joins_its_gradients_and_unused_parts_count_as_zero(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(concrete(1, 3), min_size=1, max_size=4))
    rank = data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, rank - 1))
    shape: list[int | None] = [2] * rank
    if rank > 1:
        shape[axis - 1] = None
    shape[axis] = sum(sizes)
    outputs = [f"y{index}" for index in range(len(sizes))]
    used = data.draw(st.lists(st.sampled_from(outputs), unique=True, min_size=1))
    unused = [name for name in outputs if name not in used]
    signed = axis - rank if data.draw(st.booleans()) else axis
    reference = lambda x: torch.split(x, sizes, axis)  # noqa: E731
    check_operator("Split", reference, [tuple(shape), ints(sizes)], outputs=outputs, unused=unused, axis=signed)


@operator("Split")
@pytest.mark.parametrize(("size", "parts"), [(6, 3), (7, 3), (5, 2)])
def test_split_into_a_number_of_parts_of_which_the_last_is_smaller(size: int, parts: int) -> None:
    outputs = [f"y{index}" for index in range(parts)]
    step = -(-size // parts)
    check_operator(
        "Split", lambda x: torch.split(x, step, 1), [(None, size)], outputs=outputs, axis=1, num_outputs=parts
    )


@st.composite
def slices(draw: st.DrawFn, size: int) -> tuple[int, int, int]:
    """(start, end, step) that take something; either may lie outside or be counted from the end."""
    step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
    start, end = (
        draw(st.integers(-size - 2, size + 2)),
        draw(st.integers(-size - 2, size + 2) | st.just(LAST)),
    )
    if step < 0 and end == LAST:
        end = -LAST
    if not len(range(size)[slice(start, _end(end), step)]):
        start, end = (0, LAST) if step > 0 else (size - 1, -LAST)
    return start, end, step


def _end(end: int) -> int | None:
    return None if abs(end) == LAST else end


@operator("Slice")
@given(data=st.data())
@examples(60)
def test_slice_puts_the_gradient_back_where_it_was_taken(data: st.DataObject) -> None:
    shape = data.draw(shapes(1, 3, 6))
    fixed = [axis for axis, dim in enumerate(shape) if dim is not None]
    if not fixed:
        shape, fixed = (None, 5), [1]
    axes = data.draw(st.lists(st.sampled_from(fixed), unique=True, min_size=1))
    cuts = {axis: data.draw(slices(int(shape[axis] or 0))) for axis in axes}

    def reference(x: Tensor) -> Tensor:
        for axis, (start, end, step) in cuts.items():
            taken = range(x.shape[axis])[slice(start, _end(end), step)]
            x = x.index_select(axis, torch.tensor(list(taken)))
        return x

    starts, ends, steps = (ints(values) for values in zip(*cuts.values(), strict=True))
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in cuts]
    inputs = [shape, starts, ends, ints(signed)]
    if any(steps != 1) or data.draw(st.booleans()):
        inputs.append(steps)
    check_operator("Slice", reference, inputs)


@operator("Slice")
def test_slice_without_axes_cuts_the_first_ones() -> None:
    check_operator("Slice", lambda x: x[1:3, :2], [(4, 3, None), ints([1, 0]), ints([3, 2])])


@operator("Slice")
@pytest.mark.parametrize("end", [LAST, 2**31 - 1])
def test_slice_may_name_the_whole_batch(end: int) -> None:
    check_operator("Slice", lambda x: x[:, 1:], [(None, 3), ints([0, 1]), ints([end, end]), ints([0, 1])])


@operator("Slice")
@pytest.mark.parametrize(("start", "end", "step"), [(0, 1, 1), (0, 2, 1), (0, -1, 1), (1, LAST, 1), (0, LAST, 2)])
def test_slice_of_some_of_the_samples_is_refused_by_name(start: int, end: int, step: int) -> None:
    cut = [ints([value]) for value in (start, end, 0, step)]
    with pytest.raises(ExportError, match=r"/Slice.*along the batch"):
        check_operator("Slice", lambda x: x[start : _end(end) : step], [(None, 3), *cut])


@st.composite
def paddings(draw: st.DrawFn, mode: str) -> tuple[Shape, list[int], list[int], list[int]]:
    """(shape, padded axes, amounts before, amounts after)."""
    shape = draw(shapes(1, 3, 5))
    fixed = [axis for axis, dim in enumerate(shape) if dim is not None]
    if not fixed:
        shape, fixed = (None, 4), [1]
    axes = draw(st.lists(st.sampled_from(fixed), unique=True, min_size=1))
    before, after = [], []
    for axis in axes:
        size = int(shape[axis] or 0)
        low = -1 if mode == "constant" and size > 2 else 0
        high = {"reflect": size - 1, "wrap": size}.get(mode, 3)
        before.append(draw(st.integers(low, high)))
        after.append(draw(st.integers(low, high)))
    return shape, axes, before, after


@operator("Pad")
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@given(data=st.data())
@examples(30)
def test_padding_gives_its_gradient_to_the_elements_it_repeats(mode: str, data: st.DataObject) -> None:
    shape, axes, before, after = data.draw(paddings(mode))
    value = data.draw(st.sampled_from([None, 1.5])) if mode == "constant" else None
    explicit = data.draw(st.booleans())
    rank = len(shape)

    def reference(x: Tensor) -> Tensor:
        for axis, low, high in zip(axes, before, after, strict=True):
            if mode == "constant":
                amounts = [0, 0] * (rank - 1 - axis) + [low, high]
                x = F.pad(x, amounts, value=value or 0.0)
            else:
                origin = np.pad(np.arange(x.shape[axis]), (low, high), mode=mode)
                x = x.index_select(axis, torch.from_numpy(origin))
        return x

    if explicit:
        amounts, given_axes = [*before, *after], ints(axes)
    else:
        lows, highs = dict(zip(axes, before)), dict(zip(axes, after))
        amounts = [side.get(axis, 0) for side in (lows, highs) for axis in range(rank)]
        given_axes = None
    inputs = [shape, ints(amounts), None if value is None else np.array(value, np.float32), given_axes]
    while inputs[-1] is None:
        inputs.pop()
    check_operator("Pad", reference, inputs, mode=mode, opset=19)


@operator("Expand")
@given(data=st.data())
@examples(40)
def test_expand_sums_over_what_it_repeated(data: st.DataObject) -> None:
    whole = data.draw(st.lists(concrete(1, 4), min_size=1, max_size=4))
    kept = data.draw(st.integers(0, len(whole)))
    shape: Shape = tuple(data.draw(st.sampled_from([dim, 1])) for dim in whole[len(whole) - kept :])
    target = [data.draw(st.sampled_from([dim, 1])) if dim in (1, *shape) else dim for dim in whole]
    reference = lambda x: x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(target)))  # noqa: E731
    check_operator("Expand", reference, [shape, ints(target)])


@operator("Expand")
def test_expand_keeps_the_batch() -> None:
    check_operator("Expand", lambda x: x.expand(-1, 3, 4), [(None, 1, 4), ints([1, 3, 1])])


@operator("Expand")
def test_a_parameter_expanded_over_the_batch_sums_over_the_samples() -> None:
    """The class token of a transformer: its number of copies is known at run time only."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="/Shape"),
        helper.make_node("Expand", ["token", "shape"], ["y"], name="/Expand"),
    ]
    check_nodes(nodes, lambda x, token: token.expand(x.shape), {"x": Fixed((None, 2, 3)), "token": (1, 1, 3)})


@operator("Tile")
@given(data=st.data())
@examples(25)
def test_tile_sums_over_its_copies(data: st.DataObject) -> None:
    shape = data.draw(shapes(1, 3))
    repeats = [data.draw(concrete(1, 3)) for _ in shape]
    check_operator("Tile", lambda x: x.tile(repeats), [shape, ints(repeats)])


@operator("Gather")
@given(data=st.data())
@examples(40)
def test_gather_adds_up_what_was_taken_several_times(data: st.DataObject) -> None:
    shape = data.draw(shapes(1, 3))
    fixed = [axis for axis, dim in enumerate(shape) if dim is not None]
    if not fixed:
        shape, fixed = (None, 3), [1]
    axis = data.draw(st.sampled_from(fixed))
    size = int(shape[axis] or 0)
    known = data.draw(st.booleans())
    places: Shape = tuple(data.draw(st.lists(concrete(1, 3), max_size=2)))
    numbers = indices(size)(np.random.default_rng(0), tuple(int(dim or 0) for dim in places))
    signed = axis - len(shape) if data.draw(st.booleans()) else axis

    def take(x: Tensor, index: Tensor) -> Tensor:
        taken = x.index_select(axis, (index % size).reshape(-1))
        return taken.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))

    if known:
        index = np.asarray(numbers, np.int64)
        check_operator("Gather", lambda x: take(x, torch.from_numpy(index)), [shape, index], axis=signed)
    else:
        check_operator("Gather", take, [shape, Fixed(places, indices(size))], axis=signed)


@operator("Gather")
@given(words=concrete(1, 5), width=concrete(1, 3), steps=st.lists(concrete(1, 3), max_size=2))
@examples(20)
def test_an_embedding_adds_up_repeated_words(words: int, width: int, steps: list[int]) -> None:
    check_operator(
        "Gather",
        lambda table, index: F.embedding(index % words, table),
        [(words, width), Fixed((None, *steps), indices(words))],
    )


@operator("DepthToSpace")
@pytest.mark.parametrize("mode", [None, "DCR", "CRD"])
@given(block=concrete(1, 3), channels=concrete(1, 2), height=concrete(1, 3), width=concrete(1, 3))
@examples(10)
def test_depth_to_space_in_both_orders(mode: str | None, block: int, channels: int, height: int, width: int) -> None:
    def reference(x: Tensor) -> Tensor:
        if mode == "CRD":
            return F.pixel_shuffle(x, block)
        apart = x.reshape(-1, block, block, channels, height, width).permute(0, 3, 4, 1, 5, 2)
        return apart.reshape(-1, channels, height * block, width * block)

    attrs = {} if mode is None else {"mode": mode}
    check_operator("DepthToSpace", reference, [(None, channels * block**2, height, width)], blocksize=block, **attrs)


@operator("SpaceToDepth")
@given(block=concrete(1, 3), channels=concrete(1, 2), height=concrete(1, 3), width=concrete(1, 3))
@examples(10)
def test_space_to_depth(block: int, channels: int, height: int, width: int) -> None:
    def reference(x: Tensor) -> Tensor:
        apart = x.reshape(-1, channels, height, block, width, block).permute(0, 3, 5, 1, 2, 4)
        return apart.reshape(-1, channels * block**2, height, width)

    check_operator("SpaceToDepth", reference, [(None, channels, height * block, width * block)], blocksize=block)


@operator("Pad")
def test_padding_along_the_batch_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match=r"/Pad.*along the batch"):
        check_operator("Pad", lambda x: F.pad(x, [0, 0, 1, 1]), [(None, 2), ints([1, 0, 1, 0])])
