"""Loss and accuracy from a model's outputs, as the training graphs define them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.manifest import Loss


@dataclass(frozen=True)
class Score:
    """Sums over samples, so that scores of parts add up to the score of the whole."""

    loss: float = 0.0  # sum
    correct: int = 0
    counted: int = 0  # labels that are not ignored
    classifies: bool = False  # whether `correct` means anything

    def __add__(self, other: Score) -> Score:
        return Score(
            self.loss + other.loss,
            self.correct + other.correct,
            self.counted + other.counted,
            self.classifies or other.classifies,
        )

    @property
    def mean_loss(self) -> float:
        return self.loss / self.counted if self.counted else float("nan")

    @property
    def accuracy(self) -> float | None:
        """Share of labels predicted rightly; None where nothing is classified."""
        return self.correct / self.counted if self.classifies and self.counted else None


def score(loss: Loss, outputs: NDArray[Any], labels: NDArray[Any]) -> Score:
    """The score of one batch. Cross-entropy has its classes along axis 1; a yes/no output is a yes above zero."""
    z = outputs.astype(np.float64)
    if loss.name == "mse":
        return Score(float(np.square(z - labels).sum()), 0, labels.size)
    if loss.name == "bce_with_logits":
        target = labels.astype(np.float64) * (1 - loss.label_smoothing) + loss.label_smoothing / 2
        value = np.maximum(z, 0) - z * target + np.log1p(np.exp(-np.abs(z)))
        return Score(float(value.sum()), int(((z > 0) == (labels > 0.5)).sum()), labels.size, True)
    counts = np.ones(labels.shape, bool) if loss.ignore_index is None else labels != loss.ignore_index
    shifted = z - z.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    own = np.take_along_axis(logs, np.where(counts, labels, 0)[:, None], 1)[:, 0]
    value = -(1 - loss.label_smoothing) * own - loss.label_smoothing * logs.mean(1)
    right = (z.argmax(1) == labels) & counts
    return Score(float(value[counts].sum()), int(right.sum()), int(counts.sum()), True)
