"""Taking elements from places and putting them there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_export.errors import ExportError
from tests.model_export.autodiff.drawing import distinct, examples, indices, shapes
from tests.model_export.autodiff.harness import Fixed, check_operator, operator


@operator("GatherElements")
@given(axis=st.sampled_from([0, 1, 2, -1]), count=st.integers(1, 5))
@examples(15)
def test_elements_that_are_taken(axis: int, count: int) -> None:
    taken = [2, 3, 4]
    taken[axis] = count
    size = [2, 3, 4][axis]

    def reference(x: Tensor, places: Tensor) -> Tensor:
        return torch.gather(x, axis, places % size)

    check_operator("GatherElements", reference, [(2, 3, 4), Fixed(tuple(taken), indices(size))], axis=axis)


@operator("GatherND")
@pytest.mark.parametrize("depth", [1, 2])
def test_slices_that_are_taken(depth: int) -> None:
    def reference(x: Tensor, places: Tensor) -> Tensor:
        return x[tuple(places.unbind(-1))]

    check_operator("GatherND", reference, [(3, 3, 4), Fixed((None, 2, depth), indices(3))])


@operator("GatherND")
@pytest.mark.parametrize("batch", [1, 2])
def test_slices_of_each_sample(batch: int) -> None:
    def reference(x: Tensor, places: Tensor) -> Tensor:
        if batch == 1:
            return torch.stack([x[n][places[n, :, 0]] for n in range(len(x))])
        return torch.stack([torch.stack([x[n, c, places[n, c, 0]] for c in range(3)]) for n in range(len(x))])

    shape = (None, 2, 1) if batch == 1 else (None, 3, 1)
    check_operator("GatherND", reference, [(None, 3, 4), Fixed(shape, indices(3))], batch_dims=batch)


@operator("ScatterElements")
@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_that_are_put(axis: int, reduction: str) -> None:
    places = np.argsort(np.random.default_rng(0).random((3, 3)), axis).astype(np.int64)  # no place twice

    def reference(x: Tensor, updates: Tensor) -> Tensor:
        function = x.scatter if reduction == "none" else x.scatter_add
        return function(axis, torch.from_numpy(places), updates)

    check_operator("ScatterElements", reference, [(3, 3), places, (3, 3)], axis=axis, reduction=reduction)


@operator("ScatterND")
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_slices_that_are_put(reduction: str) -> None:
    places = np.array([[2], [0]])

    def reference(x: Tensor, updates: Tensor) -> Tensor:
        return x.index_put((torch.tensor([2, 0]),), updates, accumulate=reduction == "add")

    check_operator("ScatterND", reference, [(4, None, 2), places, (2, None, 2)], reduction=reduction)


def test_a_reduction_without_a_gradient_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match="ScatterND with reduction=mul has no gradient here"):
        check_operator("ScatterND", lambda x, u: x * u.sum(), [(4, 2), np.array([[2]]), (1, 2)], reduction="mul")


@operator("TopK")
@given(axis=st.sampled_from([0, 1, -1]), count=st.integers(1, 3), largest=st.booleans())
@examples(12)
def test_the_largest_elements(axis: int, count: int, largest: bool) -> None:
    def reference(x: Tensor) -> list[Tensor]:
        values, places = x.topk(count, axis, largest)
        return [values, places.double()]

    given = {"fill": distinct, "axis": axis, "largest": int(largest)}
    inputs = [(3, 4), np.array([count])]
    check_operator("TopK", reference, inputs, outputs=["values", "places"], unused=["places"], **given)


@operator("Trilu")
@given(upper=st.booleans(), diagonal=st.integers(-3, 3))
@examples(12)
def test_triangles(upper: bool, diagonal: int) -> None:
    function = torch.triu if upper else torch.tril
    check_operator("Trilu", lambda x: function(x, diagonal), [(None, 3, 4), np.array(diagonal)], upper=int(upper))


@operator("CumSum")
@given(shape=shapes(1), data=st.data(), reverse=st.booleans(), exclusive=st.booleans())
@examples(20)
def test_sums_up_to_each_element(shape, data: st.DataObject, reverse: bool, exclusive: bool) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))

    def reference(x: Tensor) -> Tensor:
        turned = x.flip(axis) if reverse else x
        found = turned.cumsum(axis) - (turned if exclusive else 0)
        return found.flip(axis) if reverse else found

    attrs = {"reverse": int(reverse), "exclusive": int(exclusive)}
    check_operator("CumSum", reference, [shape, np.array(axis)], **attrs)
