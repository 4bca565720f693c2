"""Matrix products."""

from __future__ import annotations

import string

import numpy as np
from onnx import NodeProto

from model_export.autodiff.engine import Context
from model_export.autodiff.registry import Gradients, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.errors import ExportError
from model_export.graph import Dim, Shape, attribute, module_of


@rule("Gemm")
def gemm(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    a, b = node.input[:2]
    dy = str(upstream[0])
    alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))
    trans_a, trans_b = int(attribute(node, "transA", 0)), int(attribute(node, "transB", 0))
    scale = alpha if alpha != 1.0 else None
    da = db = dc = None
    if context.wants(node, 0):
        da = (
            context.op("Gemm", b, dy, transA=trans_b, transB=1, alpha=scale)
            if trans_a
            else context.op("Gemm", dy, b, transB=1 - trans_b, alpha=scale)
        )
    if context.wants(node, 1):
        db = (
            context.op("Gemm", dy, a, transA=1, transB=trans_a, alpha=scale)
            if trans_b
            else context.op("Gemm", a, dy, transA=1 - trans_a, alpha=scale)
        )
    if context.wants(node, 2):
        dc = context.sum_to(dy, context.shape(node.output[0]), node.input[2])
        dc = context.op("Mul", dc, beta) if beta != 1.0 else dc
    return [da, db, dc]


@rule("Einsum")
def einsum(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """The gradient of an operand is the sum of products of the result's gradient and the other operands."""
    letters, result = _spelled(context, node)
    return [_of_operand(context, node, letters, result, i, str(upstream[0])) for i in range(len(letters))]


def _spelled(context: Context, node: NodeProto) -> tuple[list[str], str]:
    """(the letters of each operand, those of the result), with a letter for each axis of an ellipsis."""
    terms, arrow, result = str(attribute(node, "equation")).replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow:  # letters that occur once, in their order
        single = sorted(letter for letter in set(terms) - set(",.") if terms.count(letter) == 1)
        result = ("..." if "..." in terms else "") + "".join(single)
    free = [letter for letter in string.ascii_letters if letter not in terms]
    axes = [context.rank(name) - len(term.replace("...", "")) for name, term in zip(node.input, letters, strict=True)]
    most = max((count for count, term in zip(axes, letters, strict=True) if "..." in term), default=0)
    hidden = "".join(free[:most])
    spelled = [term.replace("...", hidden[most - count :]) for count, term in zip(axes, letters, strict=True)]
    sizes: dict[str, set[Dim]] = {}
    for name, term in zip(node.input, spelled, strict=True):
        for letter, size in zip(term, context.shape(name), strict=True):
            sizes.setdefault(letter, set()).add(size)
    if any(len(known) > 1 for known in sizes.values()):
        raise ExportError(
            f"node {node.name!r} (module {module_of(node)!r}): Einsum {attribute(node, 'equation')!r} that repeats an "
            "axis of size 1 has no gradient here"
        )
    return spelled, result.replace("...", hidden)


def _of_operand(context: Context, node: NodeProto, letters: list[str], result: str, index: int, dy: str) -> str | None:
    if not context.wants(node, index):
        return None
    name = node.input[index]
    mine, diagonals = _without_diagonals(letters, index, context.shape(name))
    others = [i for i in range(len(letters)) if i != index]
    known = set(result).union(*(letters[i] for i in others), *diagonals)
    kept = "".join(letter for letter in mine if letter in known)
    equation = ",".join([result, *(letters[i] for i in others), *diagonals]) + "->" + kept
    value = context.op("Einsum", dy, *(node.input[i] for i in others), *diagonals.values(), equation=equation)
    if kept == mine:
        return value
    summed = [axis for axis, letter in enumerate(mine) if letter not in known]  # each of its elements counted alike
    return context.op("Expand", context.op("Unsqueeze", value, summed), context.runtime_shape(name))


def _without_diagonals(letters: list[str], index: int, shape: Shape) -> tuple[str, dict[str, np.ndarray]]:
    """(letters of an operand, all of them different; matrices that are 1 where two of them were the same)."""
    free = iter(letter for letter in string.ascii_letters if letter not in "".join(letters))
    mine, diagonals = "", {}
    for letter, size in zip(letters[index], shape, strict=True):
        own = next(free) if letter in mine else letter
        if own != letter:
            diagonals[letter + own] = np.eye(size or 1, dtype=np.float32)
        mine += own
    return mine, diagonals


@rule("MatMul")
def matmul(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    """Vectors are seen as matrices with one row or column, batch dimensions that were broadcast are summed."""
    a, b = node.input
    shape_a, shape_b = context.shape(a), context.shape(b)
    dy = str(upstream[0])
    if len(shape_b) == 2 and len(shape_a) > 2:
        return _shared_matrix(context, node, dy)
    left, right = a, b
    if len(shape_a) == 1:
        left, shape_a = context.op("Unsqueeze", a, [0]), (1, *shape_a)
        dy = context.op("Unsqueeze", dy, [-1 if len(shape_b) == 1 else -2])
    if len(shape_b) == 1:
        right, shape_b = context.op("Unsqueeze", b, [1]), (*shape_b, 1)
        dy = context.op("Unsqueeze", dy, [-1])
    batch = _broadcast(shape_a[:-2], shape_b[:-2])
    da = db = None
    if context.wants(node, 0):
        product = context.op("MatMul", dy, _transposed(context, right, len(shape_b)))
        da = _undo(context, product, (*batch, *shape_a[-2:]), shape_a, a)
        if da == product and (shape_b[-1] or 0) < (shape_b[-2] or 0):
            context.weighed[da] = node.output[0], dy
    if context.wants(node, 1):
        product = _left_gradient(context, left, dy, shape_a, shape_b)
        db = _undo(context, product, (*batch, *shape_b[-2:]), shape_b, b)
    return [da, db]


def _left_gradient(context: Context, left: str, dy: str, shape_a: Shape, shape_b: Shape) -> str:
    """a^T dy, or (dy^T a)^T where a is what is large: attention's probabilities."""
    (rows, inner), columns = (dim or 1 for dim in shape_a[-2:]), shape_b[-1] or 1
    if rows * inner > rows * columns + inner * columns and len(shape_a) >= len(shape_b):
        turned = context.op("MatMul", _transposed(context, dy, len(shape_a)), left)
        return _transposed(context, turned, len(shape_a))
    return context.op("MatMul", _transposed(context, left, len(shape_a)), dy)


def _shared_matrix(context: Context, node: NodeProto, dy: str) -> Gradients:
    """A dense layer over a sequence: fold the leading dimensions, so that the weight gradient is one product."""
    a, b = node.input
    rows, columns = context.shape(b)
    da = context.op("MatMul", dy, _transposed(context, b, 2)) if context.wants(node, 0) else None
    db = None
    if context.wants(node, 1):
        flat_a = context.op("Reshape", a, np.array([-1, rows], np.int64))
        flat_dy = context.op("Reshape", dy, np.array([-1, columns], np.int64))
        db = _product_over_rows(context, flat_a, flat_dy, rows or 1, columns or 1)
    return [da, db]


def _product_over_rows(context: Context, a: str, b: str, width_a: int, width_b: int) -> str:
    """a^T b: the runtime is quicker where the operand that it turns is the narrow one."""
    if width_a > width_b:
        return context.op("Transpose", context.op("Gemm", b, a, transA=1), perm=[1, 0])
    return context.op("Gemm", a, b, transA=1)


def _undo(context: Context, product: str, product_shape: Shape, matrix_shape: Shape, name: str) -> str:
    """Sum over broadcast batch dimensions, then give back the shape of the original operand."""
    original = context.shape(name)
    if len(original) == len(matrix_shape):
        return context.sum_to(product, product_shape, name)
    leading = list(range(len(product_shape) - 2))
    summed = context.op("ReduceSum", product, leading, keepdims=0) if leading else product
    return context.reshape_like(summed, name)


def _transposed(context: Context, name: str, rank: int) -> str:
    return context.op("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])


def _broadcast(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))
