"""Compute what a training step should give by other means: PyTorch's autograd, or onnxruntime for ONNX files."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from federation.inputs import pack
from federation.manifest import CLASSIFYING, Boundary, Layer, Loss, Manifest
from model_export.autodiff.rules.dropout import reference_mask, reference_normal, reference_uniform
from model_export.crossing import split_row
from model_export.errors import ExportError
from model_export.inputs import parts_of, sample_row
from model_export.modes import set_modes, training_modes
from model_export.own_loss import LossFunction, evaluate
from model_export.plain_operators import plain_operators
from model_export.ready_losses import check_of
from model_export.short_memory import find_heads, short_memory
from model_export.source import ModelSource

Arrays = dict[str, np.ndarray]
NOTHING = -100  # PyTorch's way to say that no label is ignored: its default, which no label equals
# Relative: as far as two programs differ in one tensor, and as far as a tensor may be off and still be that tensor.
SAME, NEAR = 1e-3, 1e-1
NOTHING_DRAWN = 1 << 30  # more than any model has layers that draw
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


@dataclass(frozen=True)
class StepResult:
    """One training step: the loss, a gradient per weight, a new value per statistic."""

    loss: float
    gradients: Arrays
    statistics: Arrays


class Oracle(Protocol):
    """The reference that a bundle is compared with."""

    def layer_outputs(self, x: np.ndarray, found: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """For each layer its true output, or None where the reference cannot tell."""

    def step(
        self,
        boundary: Boundary,
        x: np.ndarray,
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        entering: np.ndarray | None = None,
    ) -> StepResult | None:
        """A step that trains from a boundary on, given the MODEL's input; None if there is no gradient to be had.

        `entering` is what enters the boundary's first layer; it is asked for where frozen layers use trained weights.
        """

    def precise_step(
        self,
        boundary: Boundary,
        x: np.ndarray,
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        entering: np.ndarray | None = None,
    ) -> StepResult | None:
        """The same step in float64, to tell rounding from errors; None if the reference cannot compute it."""

    def calm(self, boundary: Boundary, vector: np.ndarray) -> np.ndarray:
        """Other weights, from the boundary on, with which activations stay away from their kinks."""


class TorchOracle:
    """The PyTorch module itself, in eager mode."""

    def __init__(
        self,
        source: ModelSource,
        manifest: Manifest,
        vector: np.ndarray,
        frozen: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """`frozen` has the weights that no device trains, as the bundle stores them."""
        self._frozen = frozen or {}
        self.module = load_values(source.module(), self._frozen)
        self._modes = training_modes(self.module)
        self._source = source
        self.manifest = manifest
        self._vector = vector
        self._function = loss_function(source, manifest.loss)
        missing = sorted({p.name for p in manifest.space} - set(self.module.state_dict()))
        if missing:
            raise ExportError(f"the source model has no parameter {missing[0]!r}: it changed since the export")

    def _load(self, module: nn.Module, vector: np.ndarray) -> None:
        state = module.state_dict()
        for name, value in self.manifest.space.views(vector).items():
            state[name].copy_(torch.from_numpy(value))

    @cached_property
    def _precise(self) -> nn.Module:
        return load_values(self._source.module(), self._frozen).double()

    def calm(self, boundary: Boundary, vector: np.ndarray) -> np.ndarray:
        """Normalisation with a spread of 1 around 3: halfway between the kinks of ReLU and ReLU6."""
        space = self.manifest.space
        moved: np.ndarray = vector.copy()
        for path, module in self.module.named_modules():
            if isinstance(module, NORMALISATIONS):
                for name, value in ((f"{path}.weight", 1.0), (f"{path}.bias", 3.0)):
                    if (
                        name in {p.name for p in space}
                        and space.slice_of(name).start >= space.suffix(boundary.layer).start
                    ):
                        moved[space.slice_of(name)] = value
        return moved

    def layer_outputs(self, x: np.ndarray, found: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Every tensor that PyTorch computes on the way is recorded; a layer's output must be among them, in order."""
        self._load(self.module, self._vector)
        self.module.eval()
        recorder = _Recorder()
        recorder.values += [x] if x.dtype == np.float32 else []
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole encoder layer would hide its tensors
        try:
            with torch.no_grad(), recorder, seeded_dropout(0, NOTHING_DRAWN), plain_operators():
                result = self.module(torch.from_numpy(x)).numpy()
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        rows = zip(self.manifest.layers, found[:-1], strict=False)
        return [*_in_order(recorder.values, [_parts(layer, row) for layer, row in rows]), result]

    def step(
        self,
        boundary: Boundary,
        x: np.ndarray,
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        entering: np.ndarray | None = None,
    ) -> StepResult | None:
        standing = self._standing_still(boundary, x, entering)
        return self._step(self.module, boundary, torch.from_numpy(x), torch.from_numpy(labels), seed, vector, standing)

    def precise_step(
        self,
        boundary: Boundary,
        x: np.ndarray,
        labels: np.ndarray,
        seed: int,
        vector: np.ndarray,
        entering: np.ndarray | None = None,
    ) -> StepResult | None:
        given, wanted = (t.double() if t.is_floating_point() else t for t in map(torch.from_numpy, (x, labels)))
        standing = self._standing_still(boundary, x, entering)
        try:
            return self._step(self._precise, boundary, given, wanted, seed, vector, standing)
        except RuntimeError:  # a module that asks for float32 somewhere
            return None

    def _standing_still(self, boundary: Boundary, x: np.ndarray, entering: np.ndarray | None) -> _Crossing:
        """Where a frozen layer uses a weight that is trained, no gradient may come from there."""
        if not any(layer.borrowed for layer in self.manifest.layers[: boundary.layer]):
            return _Crossing([])
        if entering is None:
            raise ExportError(f"boundary {boundary.name!r} shares weights with frozen layers: say what enters it")
        parts = [part for part in _parts(self.manifest.layers[boundary.layer - 1], entering) if part.is_float]
        return _Crossing([part.values for part in parts if not _is_same(x, part.values)])

    def _step(
        self,
        module: nn.Module,
        boundary: Boundary,
        x: torch.Tensor,
        labels: torch.Tensor,
        seed: int,
        vector: np.ndarray,
        standing: _Crossing,
    ) -> StepResult | None:
        heads = None
        if boundary.head is not None and boundary.last_steps is not None:
            self._load(module, self._vector)  # as a device does: with the round's weights, whatever is trained
            heads = find_heads(module.eval(), x, boundary.last_steps)
        self._load(module, vector)
        frozen = self.manifest.layers[: boundary.layer]
        trained = self.manifest.layers[boundary.layer :]
        set_modes(module, self._modes)
        for layer in frozen:
            for parameter in layer.parameters:
                if parameter.kind == "statistic":
                    module.get_submodule(parameter.name.rpartition(".")[0]).eval()
        module.zero_grad()
        skip = sum(layer.dropouts for layer in frozen)
        with seeded_dropout(seed, skip), short_memory(boundary.last_steps, heads), plain_operators(), standing:
            predictions = module(x)
        if not standing.everything:
            return None
        value = torch_loss(self.manifest.loss, predictions, labels, self._function)
        value.backward()
        weights = dict(module.named_parameters())
        _refuse_forgotten(weights, self.manifest)
        buffers = dict(module.named_buffers())
        gradients, statistics = {}, {}
        for parameter in (p for layer in trained for p in layer.parameters):
            if parameter.kind == "statistic":
                statistics[parameter.name] = buffers[parameter.name].numpy().copy()
            else:
                gradient = weights[parameter.name].grad
                gradients[parameter.name] = (
                    np.zeros(parameter.shape, np.float32) if gradient is None else gradient.numpy().copy()
                )
        return StepResult(value.item(), gradients, statistics)


def load_values(module: nn.Module, values: Mapping[str, np.ndarray]) -> nn.Module:
    """Give a module's parameters other values, by name."""
    state = module.state_dict()
    for name, value in values.items():
        state[name].copy_(torch.from_numpy(value.copy()))
    return module


def _refuse_forgotten(weights: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """A trainable parameter that the bundle does not have would silently stay as it is."""
    known = {p.name for p in manifest.space}
    for name, parameter in weights.items():
        if parameter.requires_grad and parameter.grad is not None and name not in known:
            raise ExportError(f"the source model trains a parameter {name!r} that is not in the bundle")


def loss_function(source: ModelSource, loss: Loss) -> LossFunction | None:
    """What PyTorch computes for a loss that was traced; None for others."""
    if source.own is not None:
        return source.own.check or source.own.function
    return None if loss.own is None else check_of(loss.own)


def torch_loss(
    loss: Loss, predictions: torch.Tensor, labels: torch.Tensor, function: LossFunction | None = None
) -> torch.Tensor:
    """PyTorch's own version of a bundle's loss; `function` is that of a traced one."""
    if loss.own is not None:
        return evaluate(function or check_of(loss.own), loss.own, predictions, labels)
    if loss.heads is not None:
        outputs = parts_of(predictions, [head.output for head in loss.heads])
        wanted = parts_of(labels, [head.labels for head in loss.heads])
        parts = [head.weight * torch_loss(head.criterion, outputs[head.name], wanted[head.name]) for head in loss.heads]
        return torch.stack(parts).sum()
    predictions = predictions.movedim(-1, 1) if loss.classes_last else predictions
    if loss.next_token:
        predictions = predictions[:, :, :-1] if loss.name in CLASSIFYING else predictions[:, :-1]
        labels = labels[:, 1:]
    if loss.name == "cross_entropy":
        return F.cross_entropy(
            predictions,
            labels,
            ignore_index=NOTHING if loss.ignore_index is None else loss.ignore_index,
            label_smoothing=loss.label_smoothing,
        )
    if loss.name == "cosine":
        return (1 - F.cosine_similarity(predictions, labels, dim=1)).mean()
    each = _each_loss(loss, predictions, labels)
    if loss.ignore_index is None:
        return each.mean()
    counted = labels != loss.ignore_index
    return torch.where(counted, each, 0.0).sum() / counted.sum().clamp(min=1)


def _each_loss(loss: Loss, predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of every label."""
    if loss.name == "focal":
        known = labels if loss.ignore_index is None else torch.where(labels == loss.ignore_index, 0, labels)
        entropy = F.cross_entropy(predictions, known, reduction="none")
        return (1 - torch.exp(-entropy)) ** (2.0 if loss.gamma is None else loss.gamma) * entropy
    if loss.name == "huber":
        return F.huber_loss(predictions, labels, reduction="none", delta=loss.delta or 1.0)
    if loss.name == "bce_with_logits":
        soft = labels * (1.0 - loss.label_smoothing) + loss.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(predictions, soft, reduction="none")
    return F.mse_loss(predictions, labels, reduction="none")


@contextlib.contextmanager
def seeded_dropout(seed: int, skip: int, count: int = 0) -> Iterator[None]:
    """Dropout and random numbers of a seed, counted through the model from `count`; the first `skip` draw nothing."""
    numbers = itertools.count(count)

    def uniform(shape: Sequence[int]) -> torch.Tensor:
        number = next(numbers)
        if number < skip:
            return torch.full(shape, 0.5).as_subclass(Undrawn)
        return torch.from_numpy(reference_uniform(seed, number, tuple(shape)))

    def normal(shape: Sequence[int]) -> torch.Tensor:
        number = next(numbers)
        return torch.zeros(shape) if number < skip else torch.from_numpy(reference_normal(seed, number, tuple(shape)))

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training:
            return input
        number = next(numbers)
        if number < skip:
            return input
        rate = float(np.float32(p))  # as an ONNX file holds it
        return input * torch.from_numpy(reference_mask(seed, number, tuple(input.shape), rate))

    with contextlib.ExitStack() as replaced:
        for owner, name, function in (
            (F, "dropout", dropout),
            (torch, "dropout", dropout),
            *((torch, name, _sized(draw)) for name, draw in (("rand", uniform), ("randn", normal))),
            *((torch, f"{name}_like", _shaped_like(draw)) for name, draw in (("rand", uniform), ("randn", normal))),
        ):
            replaced.enter_context(mock.patch.object(owner, name, function))
        yield


def _sized(draw: Callable[[Sequence[int]], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As `torch.rand` is called: sizes one by one or in a tuple."""

    def run(*size: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        shape = more.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        return draw(tuple(int(n) for n in shape)).to(dtype or torch.get_default_dtype())

    return run


def _shaped_like(draw: Callable[[Sequence[int]], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(input: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return draw(tuple(input.shape)).to(dtype or input.dtype)

    return run


class Undrawn(torch.Tensor):
    """Uniform numbers of a frozen layer: compared with a constant they are the share that would be below it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, share = getattr(func, "__name__", ""), getattr(args[0], "share", None)
        numbers = [each for each in args[1:] if isinstance(each, (int, float))]
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name in ("add", "__add__", "__radd__") and numbers and share is None:
            result.share = float(numbers[0])
        elif name in ("floor", "floor_") and share is not None:
            return torch.full(args[0].shape, share, dtype=args[0].dtype)
        elif name in ("lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__") and numbers:
            share = numbers[0] if name.strip("_")[0] == "l" else 1.0 - numbers[0]
            return torch.full(args[0].shape, share, dtype=args[0].dtype)
        return result


class _Recorder(TorchDispatchMode):
    """Keeps every floating-point tensor that an eager forward pass computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[np.ndarray] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and item.dtype == torch.float32:
                self.values.append(item.detach().numpy().copy())
        return result


class _Crossing(TorchFunctionMode):
    """Lets no gradient pass through the tensors that cross a boundary, found by their values."""

    def __init__(self, values: Sequence[np.ndarray]) -> None:
        super().__init__()
        self._values = values
        self._found = [False for _ in values]

    @property
    def everything(self) -> bool:
        """Whether all of them were met."""
        return all(self._found)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            return type(result)(map(self._cut, result)) if type(result) in (tuple, list) else result
        return self._cut(result)

    def _cut(self, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        own = result.detach().numpy()
        met = [number for number, value in enumerate(self._values) if _is_same(own, value)]
        for number in met:
            self._found[number] = True
        if not met or result.is_leaf:
            return result
        return result.detach() if result._is_view() else result.detach_()


@dataclass(frozen=True)
class _Part:
    """One of the tensors that cross a boundary, as columns of the row that a device stores."""

    values: np.ndarray
    is_float: bool


def _parts(layer: Layer, row: np.ndarray) -> list[_Part]:
    if layer.packed is None:
        return [_Part(row, is_float=True)]
    pieces = split_row(row, [(part.dtype, part.shape) for part in layer.packed])
    kinds = [part.dtype == "float32" for part in layer.packed]
    return [_Part(piece, is_float=kind) for piece, kind in zip(pieces, kinds, strict=True)]


def _gap(value: np.ndarray, wanted: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest difference of two arrays of one size, whichever of the first two dimensions is the batch."""
    turned = [value, value.swapaxes(0, 1)] if value.ndim > 1 else [value]
    arranged = [one.reshape(wanted.shape) for one in turned]
    gaps = [float(differences(one, wanted).max(initial=0.0)) for one in arranged]
    return min(zip(gaps, arranged, strict=True), key=lambda pair: pair[0] if np.isfinite(pair[0]) else np.inf)


def differences(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How far apart numbers are; infinities that are equal, as in masks of attention, are not apart."""
    with np.errstate(invalid="ignore"):
        apart: np.ndarray = np.where(found == expected, np.float32(0), np.abs(found - expected))
    return apart


def largest(values: np.ndarray, at_least: float) -> float:
    """The largest magnitude, without infinities."""
    return max(float(np.abs(values[np.isfinite(values)]).max(initial=0.0)), at_least)


def _is_same(value: np.ndarray, wanted: np.ndarray) -> bool:
    if value.size != wanted.size:
        return False
    return _gap(value, wanted)[0] <= SAME * largest(wanted, 1e-6)


def _in_order(values: Sequence[np.ndarray], found: Sequence[Sequence[_Part]]) -> Iterator[np.ndarray | None]:
    """For each layer's output the recorded tensor it should be: same size, smallest difference, not before the last."""
    start = 0
    for parts in found:
        if len(parts) > 1:
            rows = [_nearest(values, part.values) if part.is_float else part.values for part in parts]
            known = [row for row in rows if row is not None]
            yield np.concatenate(known, 1) if len(known) == len(rows) else None
            continue
        value = parts[0].values
        gaps = {i: _gap(values[i], value)[0] for i in range(start, len(values)) if values[i].size == value.size}
        best = min(gaps, key=lambda i: gaps[i], default=None)
        yield None if best is None else _gap(values[best], value)[1]
        start = start if best is None else best


def _nearest(values: Sequence[np.ndarray], wanted: np.ndarray) -> np.ndarray | None:
    """The recorded tensor that one of several crossing ones should be; PyTorch need not have every one of them."""
    near = [_gap(value, wanted) for value in values if value.size == wanted.size]
    gap, value = min(near, key=lambda found: found[0], default=(float("inf"), wanted))
    return value if gap <= NEAR * largest(wanted, 1e-6) else None


def random_labels(manifest: Manifest, batch: int, seed: int) -> np.ndarray:
    """Labels that fit the loss."""
    if manifest.loss.heads is not None or manifest.loss.own is not None:
        return _random_rows(manifest, batch, seed)
    rng = np.random.default_rng(seed)
    shape = (batch, *manifest.labels.shape)
    if manifest.label_count is not None:
        return rng.integers(0, manifest.label_count, shape)
    if manifest.loss.name == "bce_with_logits":
        return rng.integers(0, 2, shape).astype(np.float32)
    return rng.standard_normal(shape).astype(np.float32)


def _random_rows(manifest: Manifest, batch: int, seed: int) -> np.ndarray:
    """Labels of a traced loss, or of several heads side by side."""
    loss = manifest.loss
    if loss.own is not None:
        labels = sample_row(loss.own.labels, batch, seed)
        return labels.reshape(batch, *manifest.labels.shape).astype(manifest.labels.dtype)
    arrays = {}
    for number, head in enumerate(loss.heads or ()):
        rng, shape = np.random.default_rng([seed, number]), (batch, *head.labels.shape)
        classes = head.shape[-1 if head.classes_last else 0] if head.labels.dtype == "int64" else 2
        whole = head.labels.dtype == "int64" or head.loss == "bce_with_logits"
        arrays[head.name] = rng.integers(0, classes, shape) if whole else rng.standard_normal(shape)
    return pack([head.labels for head in loss.heads or ()], arrays)
