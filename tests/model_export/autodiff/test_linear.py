"""Matrix products: transposition, scaling, vectors, and batches of matrices that broadcast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_export.errors import ExportError
from model_export.graph import Shape
from tests.model_export.autodiff.drawing import examples
from tests.model_export.autodiff.harness import check_operator, operator

sizes = st.integers(1, 4)


@operator("Gemm")
@given(data=st.data())
@examples(60)
def test_gemm_with_transposition_scale_and_bias(data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([None, 3, 1]))
    inner, columns = data.draw(sizes), data.draw(sizes)
    trans_a, trans_b = data.draw(st.booleans()), data.draw(st.booleans())
    alpha, beta = data.draw(st.sampled_from([1.0, 0.5])), data.draw(st.sampled_from([1.0, -2.0]))
    bias: Shape | None = data.draw(
        st.sampled_from([None, (), (1,), (columns,), (1, columns), (rows, 1), (rows, columns), (1, 1)])
    )
    a: Shape = (inner, rows) if trans_a else (rows, inner)
    b: Shape = (columns, inner) if trans_b else (inner, columns)

    def reference(a: torch.Tensor, b: torch.Tensor, *c: torch.Tensor) -> torch.Tensor:
        product = alpha * (a.T if trans_a else a) @ (b.T if trans_b else b)
        return product + beta * c[0] if c else product

    inputs = [a, b] if bias is None else [a, b, bias]
    attrs = {"transA": int(trans_a), "transB": int(trans_b), "alpha": alpha, "beta": beta}
    check_operator("Gemm", reference, inputs, **attrs)


@operator("Gemm")
def test_gemm_as_a_dense_layer_without_attributes() -> None:
    check_operator("Gemm", lambda x, w, b: x @ w + b, [(None, 3), (3, 4), (4,)])


@operator("MatMul")
@given(data=st.data())
@examples(60)
def test_batches_of_matrices_broadcast_and_their_gradients_sum_back(data: st.DataObject) -> None:
    whole = [data.draw(st.sampled_from([None, 1, 2, 3])) for _ in range(data.draw(st.integers(0, 2)))]
    if whole.count(None) > 1:
        whole[0] = 2
    rows, inner, columns = data.draw(sizes), data.draw(sizes), data.draw(sizes)

    def operand(*matrix: int) -> Shape:
        kept = data.draw(st.integers(0, len(whole)))
        return (*(data.draw(st.sampled_from([dim, dim, 1])) for dim in whole[len(whole) - kept :]), *matrix)

    check_operator("MatMul", torch.matmul, [operand(rows, inner), operand(inner, columns)])


@operator("MatMul")
@given(data=st.data())
@examples(40)
def test_vectors_are_rows_on_the_left_and_columns_on_the_right(data: st.DataObject) -> None:
    inner = data.draw(sizes)
    batch: Shape = data.draw(st.sampled_from([(), (None,), (2,), (None, 2), (2, None)]))
    left: Shape = data.draw(st.sampled_from([(inner,), (*batch, 3, inner)]))
    right: Shape = (inner,) if len(left) > 1 else data.draw(st.sampled_from([(inner,), (*batch, inner, 2)]))
    check_operator("MatMul", torch.matmul, [left, right])


@operator("MatMul")
@given(
    leading=st.sampled_from([(None,), (None, 3), (3, None), (None, 2, 3)]),
    inner=sizes,
    columns=sizes,
)
@examples(20)
def test_a_dense_layer_over_a_sequence_sums_over_all_its_steps(leading: Shape, inner: int, columns: int) -> None:
    check_operator("MatMul", torch.matmul, [(*leading, inner), (inner, columns)])


@operator("MatMul")
def test_the_batch_may_be_the_number_of_rows() -> None:
    check_operator("MatMul", torch.matmul, [(2, None, 3), (2, 3, 4)])
    check_operator("MatMul", torch.matmul, [(2, 3, 4), (2, 4, None)])


EQUATIONS = {
    "bij,bjk->bik": [(None, 2, 3), (None, 3, 4)],
    "bhqd,bhkd->bhqk": [(None, 2, 3, 4), (None, 2, 5, 4)],
    "bi,ij,bj->b": [(None, 2), (2, 3), (None, 3)],
    "bij->bi": [(None, 2, 3)],
    "bi,jk->bj": [(None, 3), (2, 4)],
    "ij->ji": [(2, 3)],
    "...ij,...jk->...ik": [(None, 2, 2, 3), (None, 2, 3, 4)],
    "...i,ij->...j": [(None, 2, 3), (3, 4)],
    "b...i->b...": [(None, 2, 3)],
    "bi,ij": [(None, 3), (3, 4)],
    "bii->bi": [(None, 3, 3)],
    "bii->b": [(None, 3, 3)],
    "iij,bj->bi": [(2, 2, 3), (None, 3)],
}


@operator("Einsum")
@pytest.mark.parametrize("equation", EQUATIONS)
def test_sums_of_products(equation: str) -> None:
    check_operator("Einsum", lambda *x: torch.einsum(equation, *x), EQUATIONS[equation], equation=equation)


@pytest.mark.parametrize(
    ("equation", "shapes", "what"),
    [("...i,...i->...", [(2, 3), (1, 3)], "repeats an axis of size 1")],
)
def test_sums_of_products_without_a_gradient_are_refused(equation: str, shapes: list[Shape], what: str) -> None:
    with pytest.raises(ExportError, match=f"{what}.* has no gradient here"):
        check_operator("Einsum", lambda *x: torch.einsum(equation, *x), shapes, equation=equation)
