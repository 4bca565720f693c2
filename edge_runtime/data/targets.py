"""Labels: checked against the model's loss before anything trains.

A class number that does not exist is no error to an ONNX graph: it matches no class, and the model would quietly learn
something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import (
    Array,
    Rows,
    check_range,
    chunks,
    first_bad,
    same_but_for_ones,
    shape_text,
)
from edge_runtime.data.named_inputs import pack_named
from federation.errors import DataError
from federation.manifest import CLASSIFYING, Loss, Manifest
from federation.preprocessing import Preprocessing

AS_STORED = Preprocessing(scale=1.0)  # bytes are numbers here, not brightness


class Labels(Protocol):
    """Labels in the model's type and shape, the first axis counting samples: in memory, or converted when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> Array: ...


@dataclass(frozen=True)
class Targets:
    """Stored labels and how the model takes them."""

    raw: Rows
    manifest: Manifest

    @property
    def ignored(self) -> int | None:
        """The label that does not count."""
        return self.manifest.loss.ignore_index

    def take(self, indices: NDArray[np.int64] | slice) -> Array:
        """Read labels of some samples, as the training graph takes them."""
        chosen = np.asarray(self.raw[indices])
        spec = self.manifest.labels
        return np.ascontiguousarray(chosen.reshape(len(chosen), *spec.shape), spec.dtype)

    def view(self, chosen: NDArray[np.int64] | None) -> Labels:
        """Return labels of some samples, or of all; many to a sample are converted when they are asked for."""
        if math.prod(self.manifest.labels.shape) == 1:
            return self.take(slice(None) if chosen is None else chosen)
        return _Converted(self, np.arange(self.raw.shape[0]) if chosen is None else chosen)

    def are_classes(self, labels: Labels) -> bool:
        return are_classes(labels, self.manifest)


class _Converted:
    """Labels that stay where they lie: those of a language model are as many as its tokens."""

    def __init__(self, targets: Targets, chosen: NDArray[np.int64]) -> None:
        self._targets = targets
        self._chosen = chosen
        self.shape = (len(chosen), *targets.manifest.labels.shape)
        self.dtype: np.dtype[Any] = np.dtype(targets.manifest.labels.dtype)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, indices: Any, /) -> Array:
        one = isinstance(indices, (int, np.integer))
        found = self._targets.take(np.atleast_1d(self._chosen[indices]))
        return found[0] if one else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)


def are_classes(labels: Labels, manifest: Manifest) -> bool:
    """Whether each sample belongs to one class: a class number, or 0 or 1 for a single logit."""
    if manifest.class_count is None:
        return False
    numbers = labels[:] if manifest.loss.name == "bce_with_logits" else np.zeros(0)
    return bool(((numbers == 0) | (numbers == 1)).all())


def order_classes(name: str, what: str, found: list[str], manifest: Manifest, remedy: str) -> list[str]:
    """Return the names of all classes in the order of their numbers.

    A bundle that has names decides, and others are refused. Else the names found here get numbers by their order, which
    devices have to share: all must be there.
    """
    if manifest.classes is not None:
        if others := [each for each in found if each not in manifest.classes]:
            raise DataError(
                f"{name} has {what} {_shown(others)} that are no classes of the model {manifest.name!r}: found "
                f"{_shown(found)}; expected {_shown(manifest.classes)}"
            )
        return list(manifest.classes)
    if len(found) != manifest.class_count:
        raise DataError(
            f"{name} has {len(found)} {what} ({_shown(found)}), the model {manifest.name!r} has {manifest.class_count} "
            f"classes: classes are numbered by the order of their names, so all must be there; {remedy}"
        )
    return found


def _shown(names: Sequence[str]) -> str:
    return " ".join(", ".join(names[:10]).split())[:200] + (", …" if len(names) > 10 else "") or "none"


def fit_targets(name: str, labels: Array | Mapping[str, Array], count: int, manifest: Manifest) -> Targets:
    """Check the labels of `count` samples; a DataError shows what they are and what the loss takes."""
    if manifest.loss.labels is not None:
        return _fit_several(name, labels, count, manifest)
    if isinstance(labels, Mapping):
        raise DataError(f"{name} has labels by name, the model {manifest.name!r} takes one array of them")
    if not labels.shape or labels.shape[0] != count:
        raise DataError(f"{name}: {count} inputs but {labels.shape[0] if labels.shape else 'no'} labels")
    wanted, stored = manifest.labels.shape, labels.shape[1:]
    loss = manifest.loss
    if labels.dtype.kind not in "biuf":
        raise DataError(f"{name} has labels of type {labels.dtype}, expected numbers")
    if not same_but_for_ones(stored, wanted):
        one_hot = loss.name in CLASSIFYING and stored == (manifest.label_count,)
        raise DataError(
            f"{name} has labels of {shape_text(stored)} per sample, the model {manifest.name!r} takes "
            f"{shape_text(wanted)} ({loss.name})" + (": class numbers, not one-hot rows" if one_hot else "")
        )
    dtype = np.dtype(manifest.labels.dtype)
    if loss.name in CLASSIFYING or manifest.label_count is not None:
        _check_class_numbers(name, labels, manifest.label_count or 0, loss.ignore_index, manifest)
    elif loss.own is not None and dtype.kind == "i":
        check_range(name, labels, loss.own.labels[0].limits, "label", f"{loss.own.function} takes")
    else:
        _check_numbers(name, labels, dtype, loss)
    return Targets(labels, manifest)


def _fit_several(name: str, labels: Array | Mapping[str, Array], count: int, manifest: Manifest) -> Targets:
    """Check labels by name, or side by side in rows: those of several heads, or of a traced loss."""
    loss = manifest.loss
    rows = pack_named(name, labels, loss.labels or (), manifest, "labels", AS_STORED)
    if rows.shape[0] != count:
        raise DataError(f"{name}: {count} inputs but {rows.shape[0]} labels")
    for head in loss.heads or ():
        own, what = np.asarray(rows.arrays[head.name]), f"{name}: {head.name}"
        if head.loss in CLASSIFYING:
            classes = head.shape[-1 if head.classes_last else 0]
            _check_class_numbers(what, own, classes, head.ignore_index, manifest)
        else:
            _check_numbers(what, own, np.dtype(np.float32), head.criterion)
    return Targets(rows, manifest)


def _check_class_numbers(name: str, labels: Array, classes: int, ignored: int | None, manifest: Manifest) -> None:
    for start, chunk in chunks(labels):
        numbers = chunk.astype(np.uint8) if chunk.dtype.kind == "b" else chunk
        bad = (numbers < 0) | (numbers >= classes)
        if chunk.dtype.kind == "f":
            bad |= numbers != np.floor(numbers)  # also true for what is no number
        if ignored is not None:
            bad &= numbers != ignored
        if bad.any():
            row, value = first_bad(numbers, bad)
            extra = "" if ignored is None else f", or {ignored} for none"
            guess = "; are the labels counted from 1?" if value == classes else ""
            raise DataError(
                f"{name}: sample {start + row} has label {value}, the model {manifest.name!r} has classes "
                f"0 to {classes - 1}{extra}{guess}"
            )


def _check_numbers(name: str, labels: Array, dtype: np.dtype[Any], loss: Loss) -> None:
    highest = 1.0 if loss.name == "bce_with_logits" else None
    for start, chunk in chunks(labels):
        with np.errstate(over="ignore"):
            numbers = chunk.astype(dtype)
        bad = ~np.isfinite(numbers) if highest is None else ~((numbers >= 0) & (numbers <= highest))
        if loss.ignore_index is not None:
            bad &= numbers != loss.ignore_index
        if bad.any():
            row, value = first_bad(chunk, bad)
            what = f"finite numbers of type {dtype}" if highest is None else "0 to 1"
            raise DataError(f"{name}: sample {start + row} has label {value}, {loss.name} takes {what}")
