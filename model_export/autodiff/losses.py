"""Loss functions: value and gradient with respect to the predictions, written together because they share most work."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from federation.manifest import Loss, TensorSpec
from model_export.autodiff.engine import FLOAT, Context
from model_export.errors import ExportError

LABELS_INPUT = "labels"


def labels_spec(loss: Loss, output: TensorSpec) -> TensorSpec:
    """What labels look like for one sample."""
    if loss.name != "cross_entropy":
        return TensorSpec("float32", output.shape)
    if not output.shape or output.shape[0] < 2:
        raise ExportError(
            f"cross_entropy needs one output per class, the model gives shape {output.shape} per sample; "
            "for a single logit use --loss bce_with_logits"
        )
    return TensorSpec("int64", output.shape[1:])


def write_loss(context: Context, loss: Loss, predictions: str) -> tuple[str, str]:
    """(mean loss, gradient of the predictions)."""
    writers: dict[str, Callable[[Context, Loss, str], tuple[str, str]]] = {
        "cross_entropy": _cross_entropy,
        "bce_with_logits": _bce_with_logits,
        "mse": _mse,
    }
    return writers[loss.name](context, loss, predictions)


def _cross_entropy(context: Context, loss: Loss, predictions: str) -> tuple[str, str]:
    """Class axis 1, labels are class numbers; ignored labels count neither above nor below the fraction line."""
    shape = context.shape(predictions)
    classes = int(shape[1] or 0)
    numbers = np.arange(classes, dtype=np.int64).reshape(classes, *[1] * (len(shape) - 2))
    with context.emitter.scope("forward/loss"):
        log_probability = context.op("LogSoftmax", predictions, axis=1)
        column = context.op("Unsqueeze", LABELS_INPUT, [1])
        target = context.op("Cast", context.op("Equal", column, numbers), to=FLOAT)
        if loss.label_smoothing:
            even = loss.label_smoothing / classes
            target = context.op("Add", context.op("Mul", target, 1.0 - loss.label_smoothing), even)
        if loss.ignore_index is None:
            total = context.op("Cast", context.op("Size", LABELS_INPUT), to=FLOAT)
        else:
            counted = context.op("Where", context.op("Equal", column, context.constant(loss.ignore_index)), 0.0, 1.0)
            total = context.op("Max", context.op("ReduceSum", counted, keepdims=0), 1.0)
            target = context.op("Mul", target, counted)
        cross = context.op("ReduceSum", context.op("Mul", target, log_probability), keepdims=0)
        value = context.op("Neg", context.op("Div", cross, total))
    with context.emitter.scope("backward/loss"):
        probability = context.op("Exp", log_probability)
        if loss.ignore_index is not None:
            probability = context.op("Mul", probability, counted)
        gradient = context.op("Div", context.op("Sub", probability, target), total)
    return value, gradient


def _bce_with_logits(context: Context, loss: Loss, predictions: str) -> tuple[str, str]:
    with context.emitter.scope("forward/loss"):
        target = LABELS_INPUT
        if loss.label_smoothing:
            target = context.op("Add", context.op("Mul", target, 1.0 - loss.label_smoothing), loss.label_smoothing / 2)
        each = context.op("Sub", context.op("Softplus", predictions), context.op("Mul", predictions, target))
        value = context.op("ReduceMean", each, keepdims=0)
    with context.emitter.scope("backward/loss"):
        count = context.count(predictions, range(context.rank(predictions)))
        gradient = context.op("Div", context.op("Sub", context.op("Sigmoid", predictions), target), count)
    return value, gradient


def _mse(context: Context, loss: Loss, predictions: str) -> tuple[str, str]:
    with context.emitter.scope("forward/loss"):
        error = context.op("Sub", predictions, LABELS_INPUT)
        value = context.op("ReduceMean", context.op("Mul", error, error), keepdims=0)
    with context.emitter.scope("backward/loss"):
        half = context.op("Div", context.count(predictions, range(context.rank(predictions))), 2.0)
        gradient = context.op("Div", error, half)
    return value, gradient
