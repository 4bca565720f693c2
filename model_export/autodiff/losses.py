"""Loss functions: value and gradient with respect to the predictions, written together because they share most work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from federation.inputs import columns, row_dtype, row_size
from federation.manifest import CLASSIFYING, Head, Loss, TensorSpec
from model_export.autodiff.engine import FLOAT, INT64, Context
from model_export.errors import ExportError

LABELS_INPUT = "labels"
END = 2**31 - 1  # of an axis


def labels_spec(loss: Loss, output: TensorSpec) -> TensorSpec:
    """What labels look like for one sample."""
    if loss.heads is not None:
        for head in loss.heads:
            labels_spec(head.criterion, TensorSpec("float32", head.shape))
        parts = [head.labels for head in loss.heads]
        return TensorSpec(row_dtype(parts), (row_size(parts),))
    wrong = len(output.shape) != 2 if loss.name in CLASSIFYING else not output.shape
    if loss.next_token and wrong:
        raise ExportError(f"next_token needs outputs for each position, the model gives {output.shape} per sample")
    if loss.name not in CLASSIFYING:
        return TensorSpec("float32", output.shape)
    axis = -1 if loss.classes_last else 0
    if not output.shape or output.shape[axis] < 2:
        raise ExportError(
            f"{loss.name} needs one output per class, the model gives shape {output.shape} per sample; "
            "for a single logit use --loss bce_with_logits"
        )
    return TensorSpec("int64", output.shape[:-1] if loss.classes_last else output.shape[1:])


def write_loss(context: Context, loss: Loss, predictions: str, labels: str = LABELS_INPUT) -> tuple[str, str]:
    """(mean loss, gradient of the predictions)."""
    if loss.heads is not None:
        return _heads(context, loss.heads, predictions)
    writers: dict[str, Callable[[Context, Loss, str, str], tuple[str, str]]] = {
        "cross_entropy": _cross_entropy,
        "bce_with_logits": _bce_with_logits,
        "mse": _mse,
        "huber": _huber,
        "focal": _focal,
        "cosine": _cosine,
    }
    with context.emitter.scope("forward/loss"):
        arranged, labels = _arranged(context, loss, predictions, labels)
    value, gradient = writers[loss.name](context, loss, arranged, labels)
    with context.emitter.scope("backward/loss"):
        return value, _arranged_back(context, loss, gradient, context.rank(predictions))


def _heads(context: Context, heads: Sequence[Head], predictions: str) -> tuple[str, str]:
    """Outputs and labels are rows of what the heads have; each loss counts by its weight."""
    outputs, labels = columns([head.output for head in heads]), columns([head.labels for head in heads])
    values, gradients = [], []
    for head in heads:
        with context.emitter.scope("forward/loss"):
            own = _columns(context, predictions, outputs[head.name], head.shape)
            wanted = _columns(context, LABELS_INPUT, labels[head.name], head.labels.shape)
            wanted = context.op("Cast", wanted, to=INT64 if head.labels.dtype == "int64" else FLOAT)
            context.shapes[own], context.shapes[wanted] = (None, *head.shape), (None, *head.labels.shape)
        value, gradient = write_loss(context, head.criterion, own, wanted)
        with context.emitter.scope("forward/loss"):
            values.append(context.op("Mul", value, head.weight))
        with context.emitter.scope("backward/loss"):
            flat = context.op("Reshape", gradient, [-1, head.output.size])
            gradients.append(context.op("Mul", flat, head.weight))
    with context.emitter.scope("forward/loss"):
        whole = context.op("Sum", *values)
    with context.emitter.scope("backward/loss"):
        return whole, context.op("Concat", *gradients, axis=1)


def _columns(context: Context, row: str, where: slice, shape: Sequence[int]) -> str:
    return context.op("Reshape", context.op("Slice", row, [where.start], [where.stop], [1]), [-1, *shape])


def _arranged(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    """Predictions with their classes along axis 1, without the last position if labels are those of the next one."""
    shape = list(context.shape(predictions))
    if loss.next_token:
        axis = _positions(loss)
        predictions = context.op("Slice", predictions, [0], [-1], [axis])
        shape[axis] = None if shape[axis] is None else int(shape[axis] or 0) - 1
        labels = next_labels(context, labels)
    if loss.classes_last and len(shape) > 2:
        order = [0, len(shape) - 1, *range(1, len(shape) - 1)]
        predictions = context.op("Transpose", predictions, perm=order)
        shape = [shape[i] for i in order]
    context.shapes[predictions] = tuple(shape)
    return predictions, labels


def next_labels(context: Context, labels: str) -> str:
    """Labels without those of the first position, which nothing predicts."""
    return context.op("Slice", labels, [1], [END], [1])


def _arranged_back(context: Context, loss: Loss, gradient: str, rank: int) -> str:
    if loss.classes_last and rank > 2:
        gradient = context.op("Transpose", gradient, perm=[0, *range(2, rank), 1])
    return context.op("Pad", gradient, [0, 1], "", [_positions(loss)]) if loss.next_token else gradient


def _positions(loss: Loss) -> int:
    """The axis along which the positions of a sample lie."""
    return 2 if loss.name in CLASSIFYING and not loss.classes_last else 1


def _of_classes(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str, str | None, str]:
    """(log-probabilities, 1 at each label's class, what counts or None, how many count)."""
    shape = context.shape(predictions)
    classes = int(shape[1] or 0)
    numbers = np.arange(classes, dtype=np.int64).reshape(classes, *[1] * (len(shape) - 2))
    log_probability = context.op("LogSoftmax", predictions, axis=1)
    column = context.op("Unsqueeze", labels, [1])
    target = context.op("Cast", context.op("Equal", column, numbers), to=FLOAT)
    counted, total = count_labels(context, loss, labels)
    return log_probability, target, context.op("Unsqueeze", counted, [1]) if counted else None, total


def count_labels(context: Context, loss: Loss, labels: str) -> tuple[str | None, str]:
    """(1 for labels that count and 0 for others, None if all do; how many count)."""
    if loss.ignore_index is None:
        return None, context.op("Cast", context.op("Size", labels), to=FLOAT)
    ignored = context.constant(loss.ignore_index, np.int64 if loss.name in CLASSIFYING else np.float32)
    counted = context.op("Where", context.op("Equal", labels, ignored), 0.0, 1.0)
    return counted, context.op("Max", context.op("ReduceSum", counted, keepdims=0), 1.0)


def _cross_entropy(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    """Class axis 1, labels are class numbers; ignored labels count neither above nor below the fraction line."""
    classes = int(context.shape(predictions)[1] or 0)
    with context.emitter.scope("forward/loss"):
        log_probability, target, counted, total = _of_classes(context, loss, predictions, labels)
        if loss.label_smoothing:
            even = loss.label_smoothing / classes
            target = context.op("Add", context.op("Mul", target, 1.0 - loss.label_smoothing), even)
        if counted:
            target = context.op("Mul", target, counted)
        cross = context.op("ReduceSum", context.op("Mul", target, log_probability), keepdims=0)
        value = context.op("Neg", context.op("Div", cross, total))
    with context.emitter.scope("backward/loss"):
        probability = context.op("Exp", log_probability)
        if counted:
            probability = context.op("Mul", probability, counted)
        gradient = context.op("Div", context.op("Sub", probability, target), total)
    return value, gradient


def _focal(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    """Cross-entropy of which a label counts by (1 - its probability)^gamma."""
    gamma = 2.0 if loss.gamma is None else loss.gamma
    with context.emitter.scope("forward/loss"):
        log_probability, target, counted, total = _of_classes(context, loss, predictions, labels)
        own = context.op("ReduceSum", context.op("Mul", target, log_probability), [1], keepdims=1)
        unsure = context.op("Sub", 1.0, context.op("Exp", own))
        each = context.op("Mul", context.op("Pow", unsure, gamma), own)
        each = context.op("Mul", each, counted) if counted else each
        value = context.op("Neg", context.op("Div", context.op("ReduceSum", each, keepdims=0), total))
    with context.emitter.scope("backward/loss"):
        turned = context.op("Mul", context.op("Pow", unsure, gamma - 1.0), context.op("Mul", own, gamma))
        slope = context.op("Sub", context.op("Mul", turned, context.op("Exp", own)), context.op("Pow", unsure, gamma))
        slope = context.op("Mul", slope, counted) if counted else slope
        away = context.op("Sub", target, context.op("Exp", log_probability))
        gradient = context.op("Mul", away, context.op("Div", slope, total))
    return value, gradient


def _mean(
    context: Context, loss: Loss, each: str, slope: str, predictions: str, labels: str, share: float = 1.0
) -> tuple[str, str]:
    """(mean of the labels that count, its gradient), given the loss and `share` of the slope of every element."""
    if loss.ignore_index is None:
        with context.emitter.scope("forward/loss"):
            value = context.op("ReduceMean", each, keepdims=0)
        with context.emitter.scope("backward/loss"):
            total: str | float = context.count(predictions, range(context.rank(predictions)))
    else:
        with context.emitter.scope("forward/loss"):
            counted, total = count_labels(context, loss, labels)
            value = context.op("Div", context.op("ReduceSum", context.op("Mul", each, str(counted)), keepdims=0), total)
        with context.emitter.scope("backward/loss"):
            slope = context.op("Mul", slope, str(counted))
    with context.emitter.scope("backward/loss"):
        return value, context.op("Div", slope, total if share == 1.0 else context.op("Div", total, 1.0 / share))


def _bce_with_logits(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    with context.emitter.scope("forward/loss"):
        target = labels
        if loss.label_smoothing:
            target = context.op("Add", context.op("Mul", target, 1.0 - loss.label_smoothing), loss.label_smoothing / 2)
        each = context.op("Sub", context.op("Softplus", predictions), context.op("Mul", predictions, target))
    with context.emitter.scope("backward/loss"):
        slope = context.op("Sub", context.op("Sigmoid", predictions), target)
    return _mean(context, loss, each, slope, predictions, labels)


def _mse(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    with context.emitter.scope("forward/loss"):
        error = context.op("Sub", predictions, labels)
        each = context.op("Mul", error, error)
    return _mean(context, loss, each, error, predictions, labels, share=0.5)


def _huber(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    """Half the square of a small error; a large one counts linearly."""
    delta = loss.delta or 1.0
    with context.emitter.scope("forward/loss"):
        error = context.op("Sub", predictions, labels)
        bent = context.op("Clip", error, -delta, delta)
        each = context.op("Mul", bent, context.op("Sub", error, context.op("Div", bent, 2.0)))
    return _mean(context, loss, each, bent, predictions, labels)


def _cosine(context: Context, loss: Loss, predictions: str, labels: str) -> tuple[str, str]:
    """One less the cosine between prediction and label, along axis 1."""

    def length(value: str) -> str:
        return context.op("Max", context.op("ReduceL2", value, [1], keepdims=1), 1e-8)

    with context.emitter.scope("forward/loss"):
        own, other = length(predictions), length(labels)
        direction, wanted = context.op("Div", predictions, own), context.op("Div", labels, other)
        cosine = context.op("ReduceSum", context.op("Mul", direction, wanted), [1], keepdims=1)
        total = context.op("Cast", context.op("Size", cosine), to=FLOAT)
        summed = context.op("ReduceSum", context.op("Sub", 1.0, cosine), keepdims=0)
        value = context.op("Div", summed, total)
    with context.emitter.scope("backward/loss"):
        away = context.op("Sub", context.op("Mul", direction, cosine), wanted)
        gradient = context.op("Div", context.op("Div", away, own), total)
    return value, gradient
