"""Cross-entropy over a large vocabulary, a piece of the output matrix at a time.

With 49,152 words the logits of 256 positions take 50 MB and the output matrix 113 MB, both several times in a training
step. Here neither is ever whole. The forward pass goes over the matrix once, with a running maximum and sum of
exponentials (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). The backward pass goes over it
again: a piece of the logits is computed anew, and its gradient leaves at once as a part of that of the last hidden
values. The matrix may be trained, frozen, or stored in few bits; one piece is the loss as it is everywhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from federation.manifest import Loss
from model_export.autodiff.engine import BOOL, FLOAT, Context
from model_export.autodiff.losses import LABELS_INPUT, count_labels, next_labels
from model_export.autodiff.rules.dropout import SEEDED
from model_export.frozen import write_rows_of
from model_export.graph import Graph, attribute, producers

LARGE = 1 << 22  # logits of one sample that are worth it
PIECE = 1 << 19  # logits of one sample that are there at once
MOST_PIECES = 64


@dataclass(frozen=True)
class OutputProduct:
    """The matrix product that a model ends with: logits = hidden · weightᵀ."""

    hidden: str
    weight: str
    words: int
    chunk: int  # words of a piece

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First and last row of each piece; the last one has what remains."""
        return [(start, min(start + self.chunk, self.words)) for start in range(0, self.words, self.chunk)]


def find_output_product(graph: Graph, loss: Loss) -> OutputProduct | None:
    """The last product of a model whose logits are too many to be whole; None: they are not, or it ends otherwise.

    A model that draws numbers or has statistics computes other things in training than in use: evaluation, which takes
    the loss of a chunked model from its training step, would be wrong.
    """
    if graph.statistics or any(node.op_type in SEEDED for node in graph.nodes):
        return None
    shape = graph.shapes[graph.output][1:]
    logits = math.prod(dim or 0 for dim in shape)
    plain = loss.name == "cross_entropy" and not loss.label_smoothing
    if not plain or not loss.classes_last or len(shape) != 2 or logits < LARGE:
        return None
    maker = producers(graph.nodes)
    last = maker[graph.output]
    turned = maker.get(last.input[1]) if last.op_type == "MatMul" else None
    if turned is None or turned.op_type != "Transpose" or list(attribute(turned, "perm", ())) != [1, 0]:
        return None
    hidden, weight, words = last.input[0], turned.input[0], int(shape[1] or 0)
    if not _is_matrix(graph, weight):
        return None
    chunk = max(PIECE // int(shape[0] or 1), -(-words // MOST_PIECES), 1)
    return OutputProduct(hidden, weight, words, chunk)


def _is_matrix(graph: Graph, name: str) -> bool:
    """Whether a value is a weight of the model, wherever it lies."""
    held = name in graph.weights or name in graph.constants
    return held or any(part.startswith(f"{name}::") for part in graph.stored)


def write_chunked_loss(
    context: Context, graph: Graph, loss: Loss, product: OutputProduct
) -> tuple[str, dict[str, str]]:
    """(mean loss, gradients of the hidden values and, if it is trained, of the matrix)."""
    width = int(context.shape(product.hidden)[-1] or 0)
    with context.emitter.scope("forward/loss"):
        hidden, labels = product.hidden, LABELS_INPUT
        if loss.next_token:
            hidden, labels = context.op("Slice", hidden, [0], [-1], [1]), next_labels(context, labels)
        rows = context.op("Reshape", hidden, [-1, width])
        flat = context.op("Reshape", labels, [-1])
        column = context.op("Unsqueeze", flat, [1])
        normaliser, own = _normaliser(context, graph, product, rows, column)
        each = context.op("Sub", normaliser, own)
        counted, total = count_labels(context, loss, flat)
        if counted:
            share = context.op("Div", context.op("Unsqueeze", counted, [1]), total)
            each = context.op("Where", context.op("Unsqueeze", context.op("Cast", counted, to=BOOL), [1]), each, 0.0)
        else:
            share = context.op("Reciprocal", total)
        value = context.op("Div", context.op("ReduceSum", each, keepdims=0), total)
    with context.emitter.scope("backward/loss"):
        of_rows, of_matrix = _gradients(context, graph, product, rows, column, normaliser, share)
        of_hidden = (
            context.reshape_like(of_rows, product.hidden)
            if not loss.next_token
            else _padded(context, of_rows, product.hidden)
        )
    found = {product.hidden: of_hidden}
    return value, {**found, product.weight: of_matrix} if of_matrix else found


def _padded(context: Context, rows: str, hidden: str) -> str:
    """Rows by sample again, with zeros for the last position: nothing follows it."""
    _, length, width = context.shape(hidden)
    by_sample = context.op("Reshape", rows, [-1, int(length or 0) - 1, int(width or 0)])
    return context.op("Pad", by_sample, [0, 1], "", [1])


def _logits(
    context: Context, graph: Graph, product: OutputProduct, rows: str, piece: tuple[int, int]
) -> tuple[str, str]:
    """(a piece of the logits, the piece of the matrix)."""
    matrix = write_rows_of(context, graph, product.weight, *piece)
    return context.op("Gemm", rows, matrix, transB=1), matrix


def _normaliser(context: Context, graph: Graph, product: OutputProduct, rows: str, column: str) -> tuple[str, str]:
    """(log of the sum of exponentials, logit of the label), one row each."""
    most = total = own = ""
    for start, stop in product.pieces:
        logits, _ = _logits(context, graph, product, rows, (start, stop))
        place = context.op("Sub", column, np.array(start, np.int64))
        inside = context.op("Clip", place, np.array(0, np.int64), np.array(stop - start - 1, np.int64))
        found = context.op("GatherElements", logits, inside, axis=1)
        largest = context.op("ReduceMax", logits, [1], keepdims=1)
        if not most:
            most, own = largest, found
            total = _sum_of_exponentials(context, logits, most)
            continue
        before, most = most, context.op("Max", most, largest)
        faded = context.op("Mul", total, context.op("Exp", context.op("Sub", before, most)))
        total = context.op("Add", faded, _sum_of_exponentials(context, logits, most))
        own = context.op("Where", context.op("Equal", place, inside), found, own)
    return context.op("Add", most, context.op("Log", total)), own


def _sum_of_exponentials(context: Context, logits: str, most: str) -> str:
    return context.op("ReduceSum", context.op("Exp", context.op("Sub", logits, most)), [1], keepdims=1)


def _gradients(
    context: Context, graph: Graph, product: OutputProduct, rows: str, column: str, normaliser: str, share: str
) -> tuple[str, str | None]:
    """(gradient of the rows, gradient of the matrix or None)."""
    of_rows, of_matrix = "", []
    context.emitter.forget("Slice", "Gemm")  # what the forward pass had is computed again, not kept
    for start, stop in product.pieces:
        logits, matrix = _logits(context, graph, product, rows, (start, stop))
        probability = context.op("Exp", context.op("Sub", logits, normaliser))
        numbers = np.arange(start, stop, dtype=np.int64)[None]
        target = context.op("Cast", context.op("Equal", column, numbers), to=FLOAT)
        slope = context.op("Mul", context.op("Sub", probability, target), share)
        part = context.op("Gemm", slope, matrix)
        of_rows = context.op("Add", of_rows, part) if of_rows else part
        if product.weight in context.active:
            of_matrix.append(context.op("Gemm", slope, rows, transA=1))
    return of_rows, context.op("Concat", *of_matrix, axis=0) if of_matrix else None
