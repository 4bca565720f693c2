"""Loss and accuracy from a model's outputs, as the training graphs define them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.inputs import unpack
from federation.manifest import CLASSIFYING, Head, Loss

# Of a head: its weight, and loss, correct, counted, classifies as in Score.
HeadSums = tuple[float, float, int, int, bool]


@dataclass(frozen=True)
class Score:
    """Sums over samples, so that scores of parts add up to the score of the whole."""

    loss: float = 0.0  # sum
    correct: int = 0
    counted: int = 0  # labels that are not ignored
    classifies: bool = False  # whether `correct` means anything
    heads: Mapping[str, HeadSums] = field(default_factory=dict)  # of several outputs, each for itself

    def __add__(self, other: Score) -> Score:
        return Score(
            self.loss + other.loss,
            self.correct + other.correct,
            self.counted + other.counted,
            self.classifies or other.classifies,
            {
                name: _joined(self.heads.get(name), other.heads.get(name))
                for name in dict.fromkeys([*self.heads, *other.heads])
            },
        )

    @property
    def mean_loss(self) -> float:
        if self.heads:
            return sum(float(sums[0]) * part.mean_loss for sums, part in zip(self.heads.values(), self.parts.values()))
        return self.loss / self.counted if self.counted else float("nan")

    @property
    def parts(self) -> dict[str, Score]:
        """The score of every head."""
        return {name: Score(*sums[1:]) for name, sums in self.heads.items()}

    def describe(self) -> dict[str, Any]:
        """Return mean loss and accuracy, and of several heads each one's."""
        found = {"mean_loss": self.mean_loss, "accuracy": self.accuracy}
        return {**found, "by_head": {n: p.describe() for n, p in self.parts.items()}} if self.heads else found

    @property
    def accuracy(self) -> float | None:
        """Share of labels predicted rightly; None where nothing is classified."""
        return self.correct / self.counted if self.classifies and self.counted else None


def count_labels(loss: Loss, labels: NDArray[Any]) -> int:
    """Count the labels of a batch that its loss is a mean over: those that something predicts and that count."""
    predicted = labels[:, 1:] if loss.next_token else labels
    return int(predicted.size if loss.ignore_index is None else np.count_nonzero(predicted != loss.ignore_index))


def _joined(one: HeadSums | None, other: HeadSums | None) -> HeadSums:
    if one is None or other is None:
        found = one or other
        assert found is not None
        return found
    return (one[0], one[1] + other[1], one[2] + other[2], one[3] + other[3], one[4] or other[4])


def score(loss: Loss, outputs: NDArray[Any], labels: NDArray[Any]) -> Score:
    """The score of one batch. A yes/no output is a yes above zero."""
    if loss.heads is not None:
        return _of_heads(loss.heads, outputs, labels)
    z, labels = _arranged(loss, outputs.astype(np.float64), labels)
    if loss.name == "cosine":
        return _cosine(z, labels)
    counts = np.ones(labels.shape, bool) if loss.ignore_index is None else labels != loss.ignore_index
    counted = int(counts.sum())
    if loss.name in CLASSIFYING:
        value, right = _of_classes(loss, z, labels, counts)
    elif loss.name == "bce_with_logits":
        target = labels.astype(np.float64) * (1 - loss.label_smoothing) + loss.label_smoothing / 2
        value = np.maximum(z, 0) - z * target + np.log1p(np.exp(-np.abs(z)))
        right = (z > 0) == (labels > 0.5)
    else:
        error = z - labels
        bent = error if loss.name == "mse" else np.clip(error, -(loss.delta or 1.0), loss.delta or 1.0)
        value = error * error if loss.name == "mse" else bent * (error - bent / 2)
        return Score(float(value[counts].sum()), 0, counted)
    return Score(float(value[counts].sum()), int((right & counts).sum()), counted, True)


def _arranged(loss: Loss, z: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Outputs with their classes along axis 1, and the labels that they are compared with."""
    z = np.moveaxis(z, -1, 1) if loss.classes_last else z
    if loss.next_token:
        positions = 2 if loss.name in CLASSIFYING else 1
        return np.take(z, range(z.shape[positions] - 1), positions), labels[:, 1:]
    return z, labels


def _of_classes(
    loss: Loss, z: NDArray[Any], labels: NDArray[Any], counts: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(loss of each label, whether it was predicted)."""
    shifted = z - z.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    own = np.take_along_axis(logs, np.where(counts, labels, 0)[:, None], 1)[:, 0]
    right = z.argmax(1) == labels
    if loss.name == "focal":
        gamma = 2.0 if loss.gamma is None else loss.gamma
        return -((1 - np.exp(own)) ** gamma) * own, right
    return -(1 - loss.label_smoothing) * own - loss.label_smoothing * logs.mean(1), right


def _cosine(z: NDArray[Any], labels: NDArray[Any]) -> Score:
    """One less the cosine between output and label, along axis 1."""
    lengths = [np.maximum(np.sqrt(np.square(value).sum(1)), 1e-8) for value in (z, labels.astype(np.float64))]
    value = 1 - (z * labels).sum(1) / (lengths[0] * lengths[1])
    return Score(float(value.sum()), 0, value.size)


def _of_heads(heads: tuple[Head, ...], outputs: NDArray[Any], labels: NDArray[Any]) -> Score:
    """Score every head; the whole loss is the sum of their means, each times its weight."""
    z = unpack([head.output for head in heads], outputs)
    wanted = unpack([head.labels for head in heads], labels)
    parts = {head.name: score(head.criterion, z[head.name], wanted[head.name]) for head in heads}
    mean = sum(head.weight * part.loss / max(1, part.counted) for head, part in zip(heads, parts.values()))
    sums = {
        head.name: (head.weight, part.loss, part.correct, part.counted, part.classifies)
        for head, part in zip(heads, parts.values())
    }
    return Score(mean * len(outputs), 0, len(outputs), False, sums)
