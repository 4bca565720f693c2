"""`Samples`: local data that fits a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array, InputFit, Rows, check_inputs, chunks, fit_inputs
from edge_runtime.data.named_inputs import Inputs, pack_inputs
from edge_runtime.data.prng import shuffled
from edge_runtime.data.targets import Labels, Targets, fit_targets
from federation.errors import DataError, EmptyData, InputError, SingleClass
from federation.manifest import Manifest

_SPLIT = -1  # stands where an epoch does: no epoch's order is that of the split


class TrainingSamples(Protocol):
    """What training and scoring ask of local data."""

    @property
    def labels(self) -> Labels:
        """All labels in the model's type and shape."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """Return inputs and labels of some samples as the training graph takes them."""


class Samples:
    """Inputs and labels, read where they lie and converted batch by batch: memory does not grow with the data."""

    def __init__(
        self,
        name: str,
        rows: Rows,
        fit: InputFit,
        targets: Targets,
        *,
        about: Mapping[str, Any] | None = None,
        class_names: Sequence[str] | None = None,
        chosen: NDArray[np.int64] | None = None,
    ) -> None:
        self.name = name  # as the user gave it, for messages
        self._rows = rows
        self._fit = fit
        self._targets = targets
        self._about = about if about is not None else {}
        self.class_names = class_names  # in the order of their numbers; None: the data has none
        self._chosen = chosen  # numbers of the rows that belong to this view; None: all

    def __len__(self) -> int:
        return int(self._rows.shape[0]) if self._chosen is None else len(self._chosen)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The places of this view's samples in the data as it is stored."""
        return np.arange(len(self)) if self._chosen is None else self._chosen

    @cached_property
    def labels(self) -> Labels:
        """All labels in the model's type and shape, made when first asked for."""
        return self._targets.view(self._chosen)

    @property
    def ignored_label(self) -> int | None:
        """The label of samples that do not count."""
        return self._targets.ignored

    @property
    def are_classes(self) -> bool:
        """Whether each sample has one label that says its class."""
        return self._targets.are_classes(self.labels)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """Read inputs and labels of some samples, by their numbers in this view, as the training graph takes them."""
        rows = np.asarray(indices, np.int64) if self._chosen is None else self._chosen[indices]
        return self._fit.convert(np.asarray(self._rows[rows])), self._targets.take(rows)

    def split(self, fraction: float, seed: int) -> tuple[Samples, Samples]:
        """Split into views (for training, held out); about `fraction` is held out, the same share of each class.

        A class with a single sample stays in training. A fraction of 0 holds nothing out.
        """
        mask = hold_out(self.labels, self.are_classes, fraction, seed)
        return self._view(np.flatnonzero(~mask)), self._view(np.flatnonzero(mask))

    def describe(self) -> dict[str, Any]:
        """Report how many there are, of which classes (null if labels are no classes), how stored and converted."""
        classes: dict[str, int] | None = None
        if self.are_classes:
            values, counts = np.unique(self.labels[:], return_counts=True)
            classes = {self._class_name(int(value)): int(count) for value, count in zip(values, counts)}
        return {"count": len(self), "classes": classes, "input": self._fit.describe(), **self._about}

    def _class_name(self, number: int) -> str:
        names = self.class_names
        return str(number) if names is None or not 0 <= number < len(names) else names[number]

    def _view(self, numbers: NDArray[np.int64]) -> Samples:
        chosen = numbers if self._chosen is None else self._chosen[numbers]
        return Samples(
            self.name,
            self._rows,
            self._fit,
            self._targets,
            about=self._about,
            class_names=self.class_names,
            chosen=chosen,
        )


def hold_out(labels: Labels, are_classes: bool, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose the samples to hold out: about `fraction` of them, the same share of each class, never all.

    A class with a single sample stays in training.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the share of held-out samples must lie in [0, 1), got {fraction}")
    count = len(labels)
    order = shuffled(count, seed, _SPLIT)
    if are_classes:
        _, which, counts = np.unique(labels[:].reshape(-1), return_inverse=True, return_counts=True)
        order = order[np.argsort(which.reshape(-1)[order], kind="stable")]
        order = order[counts[which.reshape(-1)[order]] > 1]
    wanted = round(count * fraction) or int(fraction > 0)
    held = min(wanted, len(order), max(0, count - 1))
    picked = order[(np.arange(held) * len(order) + len(order) // 2) // max(1, held)]  # evenly through the classes
    mask = np.zeros(count, np.bool_)
    mask[picked] = True
    return mask


def from_arrays(
    inputs: Inputs,
    labels: Array | Mapping[str, Array],
    manifest: Manifest,
    *,
    name: str = "the data",
    about: Mapping[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
) -> Samples:
    """Make samples of anything that has rows, after every check. `name` stands in messages, `about` in descriptions.

    A model with several inputs takes an array for each by name, one with several heads labels likewise.
    """
    if manifest.inputs is not None:
        inputs = pack_inputs(name, inputs, manifest)
    elif isinstance(inputs, Mapping):
        raise DataError(f"{name} has arrays by name, the model {manifest.name!r} takes a single input")
    fit = fit_inputs(name, inputs, manifest)
    targets = fit_targets(name, labels, inputs.shape[0], manifest)
    if manifest.inputs is None:
        check_inputs(name, inputs, fit, manifest)
    about = {"stored": "in memory"} if about is None else about
    return Samples(name, inputs, fit, targets, about=about, class_names=class_names or manifest.classes)


def _first_labels(samples: Samples) -> Array:
    """Return different labels that count, all of those up to the samples that have a second one."""
    found: Array = np.zeros(0, samples.labels.dtype)
    for _, some in chunks(samples.labels):
        found = np.union1d(found, some)
        found = found[found != samples.ignored_label] if samples.ignored_label is not None else found
        if len(found) > 1:
            break
    return found


def check_trainable(samples: Samples, allow_single_class: bool = False) -> None:
    """Refuse data that a model cannot learn from: none, or (unless allowed) of one class only."""
    if len(samples) == 0:
        raise EmptyData(f"{samples.name} has no samples")
    if not (samples.are_classes or samples.labels.dtype.kind == "i"):
        return
    found = _first_labels(samples)
    if len(found) == 0:
        raise EmptyData(f"{samples.name}: every label is {samples.ignored_label}, which does not count")
    if len(found) == 1 and not allow_single_class:
        raise SingleClass(
            f"{samples.name}: all {len(samples)} samples have label {int(found[0])}, and training on one class makes a "
            "model forget the others; --allow-single-class trains all the same"
        )
