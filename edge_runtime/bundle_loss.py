"""The loss of a bundle as scores and parts of a batch need it: by numpy, or by the graph of a loss that was traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.session import RuntimeSettings, inference_session
from federation.errors import BundleError, InputError
from federation.manifest import Manifest, OwnLoss
from federation.metrics import Score, count_labels, score

_ROWS = 1024  # predictions that are scored at a time


class BundleLoss:
    """Scores outputs, and tells what the loss of some samples is a mean over."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._loss = manifest.loss
        self._directory = directory
        self._graph: _LossGraph | None = None

    @property
    def rows(self) -> int:
        """How many samples are scored at once: of a loss that compares samples, a batch as the bundle has it."""
        own = self._loss.own
        return self.manifest.batch if own is not None and own.reduction == "batch" else _ROWS

    def score(self, outputs: NDArray[Any], labels: NDArray[Any]) -> Score:
        """Score a batch."""
        own = self._loss.own
        if own is None:
            return score(self._loss, outputs, labels)
        value, counted = self._opened(own)(outputs, labels)
        total = value if own.reduction == "sum" else value * counted
        right = int((outputs.argmax(1) == labels.reshape(-1)).sum()) if own.classes is not None else 0
        return Score(total, right, counted, own.classes is not None)

    def counted(self, labels: NDArray[Any]) -> int:
        """Count what the loss of samples with these labels is a mean over: the samples, or labels that count."""
        loss = self._loss
        if loss.own is not None and loss.own.reduction == "counted":
            shape = self.manifest.output.shape
            return self._opened(loss.own)(np.zeros((len(labels), *shape), np.float32), labels)[1]
        return len(labels) if loss.own is not None or loss.heads is not None else count_labels(loss, labels)

    def shares(self, counted: list[int]) -> list[float]:
        """Turn what the parts of a batch count into their shares of its loss."""
        if self._loss.own is not None and self._loss.own.reduction == "sum":
            return [1.0 for _ in counted]
        return [count / max(1, sum(counted)) for count in counted]

    def _opened(self, own: OwnLoss) -> _LossGraph:
        if self._graph is None:
            self._graph = _LossGraph(self._directory / own.graph.name)
        return self._graph


class _LossGraph:
    """The graph of a traced loss: its value for a batch, and what that is a mean over."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"the bundle's loss {path} is not there; export or fetch the bundle again")
        self._session = inference_session(path, RuntimeSettings())

    def __call__(self, outputs: NDArray[Any], labels: NDArray[Any]) -> tuple[float, int]:
        given = {"predictions": np.ascontiguousarray(outputs, np.float32), "labels": labels}
        value, counted = self._session.run(["loss", "counted"], given)
        if not 0 <= counted < 2**48:
            raise BundleError(f"the bundle's loss counts {float(counted)} of {len(labels)} samples; export it again")
        return float(value), round(float(counted))
