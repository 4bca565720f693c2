"""A loss function of the user's own, as nodes of a graph: it is traced once, and no device runs its code.

The function takes outputs and labels (tensors, or dictionaries of several by name) and returns a number for the batch,
a number for each sample, of which the mean is taken, or a pair (total, count), of which the loss is the quotient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import NodeProto
from torch import Tensor, nn

from edge_runtime.bundle_files import file_ref
from edge_runtime.user_module import import_file, neighbours, one_line
from federation.errors import InputError
from federation.inputs import NamedInput, row_dtype, row_size
from federation.manifest import Loss, OwnLoss, Reduction, TensorSpec
from model_export.autodiff.engine import FLOAT, active_values
from model_export.autodiff.losses import LABELS_INPUT
from model_export.autodiff.registry import find_rule, has_rule
from model_export.capture import EXPORTERS, Exporter, cause, export_forward
from model_export.errors import ExportError, MissingRule
from model_export.graph import Emitter, Graph, Shape, make_model, module_of, serialise, tensor_info, write_batch_values
from model_export.inputs import parts_of, sample_row
from model_export.normalise import normalise
from model_export.plain_operators import plain_operators
from model_export.shapes import run_values

GRAPH_NAME = "loss.onnx"
PREFIX = "loss:"  # of values: none of the model's begins so
BATCH_SIZES = (1, 2, 5)  # at which the graph has to be the function
TOLERANCE = 1e-4
COUPLING_SAMPLES, COUPLING_BATCHES = (
    4,
    range(1, 17),
)  # by which it is found out; a label that is ignored has to be drawn
IN_MEMORY = "memory"  # the reference of what was given as an object
UNNAMED = "labels"  # of labels that are one tensor
REMEDY = "write it with operations on whole tensors, and x.shape[0] where it has len(x)"
Values = Tensor | dict[str, Tensor]
LossFunction = Callable[[Any, Any], Any]
_NO_GRAPH = Graph([], "", "", 0, {}, {}, {})


@dataclass(frozen=True)
class OwnFunction:
    """A loss function before it is traced."""

    reference: str
    function: LossFunction
    labels: tuple[NamedInput, ...] | None = None  # None: found by trying
    check: LossFunction | None = None  # PyTorch's own version, which `verify` asks; None: the function itself


def load_function(reference: str) -> LossFunction:
    """Take a function out of FILE.py:function."""
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise InputError(f"the loss {reference}: there is no file {path}; expected FILE.py:function")
    with neighbours(path):
        found = getattr(import_file(path), name, None)
    if not callable(found):
        raise InputError(f"the loss {reference}: {path} has no function {name!r}")

    def run(outputs: Values, labels: Values) -> Any:
        with neighbours(path):
            return found(outputs, labels)

    return run


def is_in_memory(own: OwnLoss) -> bool:
    """Whether a function was given as an object, which no other process has."""
    return own.function.startswith(f"{IN_MEMORY}:")


def in_memory(function: LossFunction, labels: tuple[NamedInput, ...] | None) -> OwnFunction:
    """Take a function as it is."""
    return OwnFunction(f"{IN_MEMORY}:{getattr(function, '__name__', type(function).__name__)}", function, labels)


def evaluate(function: LossFunction, own: OwnLoss, row: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a batch as PyTorch does; rows are taken apart if there are several outputs or labels."""
    return _value(function(_named(row.flatten(1), own.outputs), _named(labels.reshape(len(labels), -1), own.labels)))[0]


def _named(row: Tensor, parts: Sequence[NamedInput]) -> Values:
    found = parts_of(row, parts)
    return found if len(parts) > 1 else next(iter(found.values()))


def _value(result: Any) -> tuple[Tensor, Tensor | None]:
    """(loss of the batch, what it is a mean over or None)."""
    if isinstance(result, (tuple, list)) and len(result) == 2 and all(isinstance(each, Tensor) for each in result):
        total, count = result[0].sum(), result[1].sum().to(result[0].dtype)
        return total / torch.where(count > 0, count, torch.ones_like(count)), count
    if not isinstance(result, Tensor) or not result.is_floating_point() or result.ndim > 1:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ExportError(f"expected a number, a number for each sample, or the pair (total, count), got {shown}")
    return (result.mean() if result.ndim else result), None


class _LossModule(nn.Module):
    """The function of a row: outputs and labels of a sample side by side."""

    def __init__(self, function: LossFunction, outputs: Sequence[NamedInput], labels: Sequence[NamedInput]) -> None:
        super().__init__()
        self.function = function
        self.outputs = outputs
        self.labels = labels
        self.split = row_size(outputs)

    def forward(self, row: Tensor) -> Tensor:
        outputs, labels = _named(row[:, : self.split], self.outputs), _named(row[:, self.split :], self.labels)
        value, count = _value(self.function(outputs, labels))
        return torch.stack([value, value.detach() * 0 + row.shape[0] if count is None else count])


@dataclass(frozen=True)
class TracedLoss:
    """A loss function as a graph of one input, the row, and one output: the loss and what it is a mean over."""

    reference: str
    reduction: Reduction
    outputs: tuple[NamedInput, ...]
    labels: tuple[NamedInput, ...]
    graph: Graph

    @property
    def label_spec(self) -> TensorSpec:
        """What labels look like for one sample."""
        if len(self.labels) == 1:
            return TensorSpec("float32" if self.labels[0].dtype == "float32" else "int64", self.labels[0].shape)
        return TensorSpec(row_dtype(self.labels), (row_size(self.labels),))

    def entry(self, predictions: str) -> list[NodeProto]:
        """Write outputs and labels side by side."""
        emitter = Emitter(f"{PREFIX}row")
        with emitter.scope("loss"):
            outputs = emitter.op("Reshape", predictions, [-1, row_size(self.outputs)])
            labels = emitter.op("Reshape", LABELS_INPUT, [-1, row_size(self.labels)])
            labels = emitter.op("Cast", labels, to=FLOAT)
            emitter.ops("Concat", [self.graph.input], outputs, labels, axis=1)
        shapes: dict[str, Shape] = {outputs: (None, row_size(self.outputs)), labels: (None, row_size(self.labels))}
        self.graph.shapes.update(shapes)
        self.graph.dtypes.update(dict.fromkeys(shapes, np.dtype(np.float32)))
        self.graph.constants.update(emitter.constants)
        return emitter.nodes

    def write(self, directory: Path) -> Loss:
        """Write the graph that scores by this loss, and describe all of it."""
        (directory / GRAPH_NAME).write_bytes(serialise(self.alone()))
        graph = file_ref(directory, GRAPH_NAME)
        return Loss("own", own=OwnLoss(self.reference, self.reduction, self.labels, self.outputs, graph))

    def alone(self) -> onnx.ModelProto:
        """The loss of predictions and labels: `loss`, and `counted`, what it is a mean over."""
        emitter = Emitter()
        write_batch_values(emitter, self.graph, LABELS_INPUT)
        for node in [*self.entry("predictions"), *self.graph.nodes]:
            emitter.copy(node)
        for number, name in enumerate(("loss", "counted")):
            emitter.ops("Gather", [name], self.graph.output, number, axis=0)
        outputs = self.outputs
        shape = outputs[0].shape if len(outputs) == 1 else (row_size(outputs),)
        labels = self.label_spec
        inputs = [
            tensor_info("predictions", np.float32, (None, *shape)),
            tensor_info(LABELS_INPUT, labels.dtype, (None, *labels.shape)),
        ]
        results = [tensor_info(name, np.float32, ()) for name in ("loss", "counted")]
        constants = {**self.graph.constants, **emitter.constants}
        return make_model("loss", emitter.nodes, inputs, results, constants, self.graph.opset)


def trace_loss(own: OwnFunction, outputs: tuple[NamedInput, ...]) -> TracedLoss:
    """Make a graph of a loss function, and make sure that it computes what the function does."""
    labels = own.labels or _find_labels(own, outputs)
    with _blamed(own):
        module = _LossModule(own.function, outputs, labels)
        reduction = _reduction(own, outputs, labels)
        _check_labels_count(own, outputs, labels)
        return _traced(module, TracedLoss(own.reference, reduction, outputs, labels, _NO_GRAPH))


@contextlib.contextmanager
def _blamed(own: OwnFunction) -> Iterator[None]:
    """Say of which function an error speaks, in one line."""
    try:
        yield
    except MissingRule:
        raise
    except ExportError as error:
        raise ExportError(f"the loss {own.reference}: {error}") from None
    except Exception as error:  # whatever the user's function raises
        raise ExportError(f"the loss {own.reference} failed: {one_line(error)}") from error


def _sampler(outputs: Sequence[NamedInput], labels: Sequence[NamedInput]) -> Callable[[int], np.ndarray]:
    def sample(batch: int) -> np.ndarray:
        rows = [sample_row(outputs, batch, batch), sample_row(labels, batch, batch + 100)]
        return np.concatenate([row.astype(np.float32) for row in rows], 1)

    return sample


def _find_labels(own: OwnFunction, outputs: Sequence[NamedInput]) -> tuple[NamedInput, ...]:
    """Try labels of the usual kinds; the one that the function takes is meant."""
    shape = outputs[0].shape
    kinds = [NamedInput(UNNAMED, "float32", shape)] if len(outputs) == 1 else []
    if shape:
        kinds.append(NamedInput(UNNAMED, "int64", (), shape[0]))
    if len(shape) > 1:
        kinds += [
            NamedInput(UNNAMED, "int64", shape[1:], shape[0]),
            NamedInput(UNNAMED, "int64", shape[:-1], shape[-1]),
        ]
    found: list[NamedInput] = []
    refusals: list[str] = []
    for kind in kinds:
        try:
            _reduction(own, tuple(outputs), (kind,))
            found.append(kind)
        except Exception as error:  # what the function raises says that these are not its labels
            refusals.append(str(error) if isinstance(error, ExportError) else one_line(error))
    if len(found) == 1:
        return (found[0],)
    known = ", ".join(f"{kind.dtype} {kind.shape}" for kind in found)
    known = known or f"none of the usual kinds ({'; '.join(dict.fromkeys(refusals))[:300]})"
    raise ExportError(
        f"the loss {own.reference} takes labels of {known}; say which: --labels SHAPE:TYPE, as in --labels 10:float32, "
        "--labels :int64:10 for class numbers, or --labels NAME=SHAPE:TYPE for several"
    )


def _reduction(own: OwnFunction, outputs: tuple[NamedInput, ...], labels: tuple[NamedInput, ...]) -> Reduction:
    """Find what the loss of a batch is of its samples, by random batches; in float64 if the function takes it."""
    try:
        found = {_reduction_of(own, outputs, labels, seed, torch.float64) for seed in COUPLING_BATCHES}
    except RuntimeError:  # tensors of its own, as weights of classes, are float32
        found = {_reduction_of(own, outputs, labels, seed, torch.float32) for seed in COUPLING_BATCHES}
    return found.pop() if len(found) == 1 else "batch"


def _reduction_of(
    own: OwnFunction, outputs: tuple[NamedInput, ...], labels: tuple[NamedInput, ...], seed: int, dtype: torch.dtype
) -> Reduction:
    rows = torch.from_numpy(sample_row(outputs, COUPLING_SAMPLES, seed)).to(dtype)
    wanted = torch.from_numpy(sample_row(labels, COUPLING_SAMPLES, seed + 100)).to(dtype)
    within = 1e-9 if dtype == torch.float64 else 1e-5

    def run(part: slice, shift: float = 0.0) -> tuple[float, float | None, Any]:
        result = own.function(_named(rows[part] + shift, outputs), _named(wanted[part], labels))
        value, count = _value(result)
        return float(value), None if count is None else float(count), result

    whole, counted, result = run(slice(None))
    if counted is not None:
        counts = [counted, run(slice(None), 0.5)[1], *(run(slice(n, n + 1))[1] for n in range(COUPLING_SAMPLES))]
        if any(count is None or count != round(count) for count in counts) or counts[1] != counted:
            raise ExportError("the count of (total, count) must be a whole number that follows from the labels alone")
        parts = [run(slice(n, n + 1)) for n in range(COUPLING_SAMPLES)]
        total = sum(value * float(count or 0) for value, count, _ in parts)
        same = sum(float(count or 0) for _, count, _ in parts) == counted and _near(total, whole * counted, within)
        return "counted" if same else "batch"
    if result.ndim and len(result) != COUPLING_SAMPLES:
        raise ExportError(f"expected a number for each of {COUPLING_SAMPLES} samples, got {len(result)}")
    try:
        alone = [run(slice(n, n + 1))[0] for n in range(COUPLING_SAMPLES)]
    except Exception:  # a function that compares samples need not take a single one
        return "batch"
    if _near(sum(alone) / len(alone), whole, within):
        return "mean"
    return "sum" if _near(sum(alone), whole, within) else "batch"


def _check_labels_count(own: OwnFunction, outputs: tuple[NamedInput, ...], labels: tuple[NamedInput, ...]) -> None:
    """Refuse a loss that is the same for all labels: devices train by labels alone."""
    rows = torch.from_numpy(sample_row(outputs, COUPLING_SAMPLES))
    drawn = [torch.from_numpy(sample_row(labels, COUPLING_SAMPLES, seed)) for seed in range(8)]
    found = {float(_value(own.function(_named(rows, outputs), _named(wanted, labels)))[0]) for wanted in drawn}
    if len(found) == 1:
        raise ExportError("it does not depend on the labels; where nothing is labelled, compare with the inputs")


def _near(found: float, wanted: float, within: float) -> bool:
    return abs(found - wanted) <= within * max(1.0, abs(wanted))


def _traced(module: nn.Module, plain: TracedLoss) -> TracedLoss:
    """Export the function with the first of PyTorch's exporters whose graph is the function, and has a gradient."""
    sample = _sampler(plain.outputs, plain.labels)
    failures: list[str] = []
    missing: MissingRule | None = None
    for exporter in EXPORTERS:
        try:
            found = replace(plain, graph=_differentiable(_exported(module, sample, exporter)))
            _check_same(found, module, sample)
            return found
        except MissingRule as error:
            missing = missing or error
        except Exception as error:  # the exporters raise dozens of types; the next one may still succeed
            failures.append(cause(error))
    if missing is not None:
        raise missing
    raise ExportError(f"it cannot become a graph: {'; then: '.join(dict.fromkeys(failures))}; {REMEDY}")


def _exported(module: nn.Module, sample: Callable[[int], np.ndarray], exporter: Exporter) -> Graph:
    with plain_operators():
        model = export_forward(module, torch.from_numpy(sample(2)), exporter)
    graph = normalise(model, [], sample, has_rule, keep_inference=True, prefix=PREFIX, follows_batch=False)
    for node in graph.nodes:  # whose names the model may have, too
        node.name = f"loss/{node.name.strip('/')}"
    return graph


def _differentiable(graph: Graph) -> Graph:
    active = active_values(graph.nodes, [graph.input], graph.dtypes)
    if graph.output not in active:
        raise ExportError("it does not depend on the outputs")
    for node in graph.nodes:
        if any(name in active for name in node.output) and find_rule(node.op_type) is None:
            raise MissingRule(node.op_type, node.name, f"the loss, {module_of(node)}")
    return graph


def _check_same(traced: TracedLoss, module: nn.Module, sample: Callable[[int], np.ndarray]) -> None:
    """Refuse a graph that is right for the traced batch only: branches and loops over samples are not in it."""
    model = traced.alone()
    split, spec = row_size(traced.outputs), traced.label_spec
    for batch in BATCH_SIZES if traced.reduction != "batch" else BATCH_SIZES[1:]:
        row = sample(batch)
        with torch.no_grad():
            expected = module(torch.from_numpy(row)).numpy()
        shape = traced.outputs[0].shape if len(traced.outputs) == 1 else (split,)
        feed = {
            "predictions": np.ascontiguousarray(row[:, :split].reshape(batch, *shape)),
            LABELS_INPUT: row[:, split:].reshape(batch, *spec.shape).astype(spec.dtype),
        }
        found = run_values(model, feed, ["loss", "counted"])
        for name, wanted in zip(("loss", "counted"), expected, strict=True):
            if not abs(float(found[name]) - wanted) <= TOLERANCE * max(1.0, abs(wanted)):
                raise ExportError(
                    f"its trace gives {float(found[name]):.6g} for a batch of {batch}, the function itself "
                    f"{wanted:.6g}: it branches or loops over samples"
                )
