"""From a PyTorch module to a forward ONNX model in training mode, parameters kept under their own names."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

from federation.errors import EmbraceError
from model_export.errors import ExportError
from model_export.modes import set_modes, training_modes
from model_export.plain_operators import plain_operators
from model_export.power_iteration import PowerIteration, refuse_repeated, standing_still
from model_export.quiet import silence

OPSET = 18
Exporter = Literal["script", "dynamo"]
EXPORTERS: Sequence[Exporter] = ("script", "dynamo")
REMEDY = (
    "write that part of the model with plain tensor operations, or export it with torch.onnx.export yourself and give "
    "the file: embrace export model.onnx"
)
INPUT_NAME, OUTPUT_NAME = "embrace.input", "embrace.output"  # names that no parameter has


@dataclass
class Captured:
    """A forward model and which of its initialisers are trained."""

    model: onnx.ModelProto
    trainable: list[str]
    fixed_rows: dict[str, int] = field(default_factory=dict)  # embeddings: the row that looking up does not train
    power_iterations: list[PowerIteration] = field(default_factory=list)
    others: Sequence[Exporter] = ()  # PyTorch's exporters that were not tried
    from_torch: bool = False  # then batch norm in inference form stays so; files have no other form
    untrained: Sequence[str] = ()  # of `trainable` those that the model itself freezes


def capture_torch(module: nn.Module, sample: torch.Tensor, exporters: Sequence[Exporter] = EXPORTERS) -> Captured:
    """Export with the first of PyTorch's exporters that can: the one by TorchScript, and the newer one."""
    set_modes(module, training_modes(module))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    _refuse_unfaithful(module)
    with (
        _unchanged(module, buffers),
        plain_operators(),
        standing_still(module) as iterations,
        _padding_rows(module) as rows,
    ):
        trainable = _trained_parameters(module, sample)
    refuse_repeated(iterations)
    vectors = [name for item in iterations for name in (item.u, item.v)]
    failures = []
    for number, exporter in enumerate(exporters):
        try:
            with _unchanged(module, buffers), plain_operators(), standing_still(module):
                model = export_forward(module, sample, exporter)
            _merge_shared(module, model)
            _check_complete(module, model, [*trainable, *vectors])
        except Exception as error:  # the exporters raise dozens of types; the next one may still succeed
            failures.append(cause(error))
            continue
        _put_back(model, buffers)
        return Captured(model, trainable, rows, iterations, exporters[number + 1 :], from_torch=True)
    raise ExportError(f"PyTorch cannot export this model to ONNX: {'; then: '.join(failures)}; {REMEDY}")


def cause(error: BaseException) -> str:
    """One line: what went wrong, and the last line of the model's own code on the way there."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0][:200] if isinstance(error, EmbraceError) else f"{type(error).__name__}: {lines[0][:200]}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    return f"{text} (at {Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


def _is_machinery(file: str) -> bool:
    """Whether a file belongs to PyTorch, to ONNX, to Python or to this project, and so not to the user's model."""
    ours = Path(__file__).parents[1]
    folders = [Path(str(package.__file__)).parent for package in (torch, onnx)]
    folders += [ours / room for room in ("model_export", "edge_runtime", "embrace")]
    return file in ("<string>", contextlib.__file__) or any(folder in Path(file).parents for folder in folders)


@contextlib.contextmanager
def _padding_rows(module: nn.Module) -> Iterator[dict[str, int]]:
    """Inside, note which row of which weight is padding where the module looks up rows; no gradient reaches it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    rows: dict[str, int] = {}
    seen: dict[str, int | None] = {}
    embedding = F.embedding

    def noting(
        input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *more: Any, **named: Any
    ) -> Any:
        name = names.get(id(weight))
        row = None if padding_idx is None else padding_idx % len(weight)
        if (name is None and row is not None) or (name is not None and seen.setdefault(name, row) != row):
            raise ExportError(
                f"an embedding of {name or 'a computed weight'} has the padding row {row}; expected a parameter that "
                "all embeddings use with the same padding_idx"
            )
        if name is not None and row is not None:
            rows[name] = row
        return embedding(input, weight, padding_idx, *more, **named)

    with mock.patch.object(F, "embedding", noting):
        yield rows


@contextlib.contextmanager
def _unchanged(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A forward pass in training mode moves the statistics of batch norm; afterwards they are what they were."""
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.data.copy_(buffers[name])


def _put_back(model: onnx.ModelProto, buffers: Mapping[str, torch.Tensor]) -> None:
    """The exporters run the model before they save it: give initialisers the values that the module had."""
    for item in model.graph.initializer:
        if item.name in buffers:
            item.CopyFrom(numpy_helper.from_array(buffers[item.name].numpy(), item.name))


def _merge_shared(module: nn.Module, model: onnx.ModelProto) -> None:
    """A parameter that a module has under several names is one initialiser, under the first of them."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    others = {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}
    held = {item.name for item in model.graph.initializer}
    for item in list(model.graph.initializer):
        if item.name in others:
            if others[item.name] in held:
                model.graph.initializer.remove(item)
            else:
                held.add(others[item.name])
                item.name = others[item.name]
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        for index, name in enumerate(node.input):
            node.input[index] = others.get(name, name)


def _refuse_unfaithful(module: nn.Module) -> None:
    """Settings that an ONNX graph cannot express; the exporters ignore them silently."""
    for path, part in module.named_modules():
        statistics = getattr(part, "track_running_stats", None)
        trained = isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
        if trained and (part.momentum is None or not statistics):
            raise ExportError(
                f"module {path!r}: batch norm needs a momentum and running statistics, "
                f"it has momentum={part.momentum} and track_running_stats={statistics}"
            )
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and statistics:
            raise ExportError(f"module {path!r}: instance norm with running statistics cannot be exported for training")
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and (part.max_norm or part.scale_grad_by_freq):
            raise ExportError(f"module {path!r}: embeddings with max_norm or scale_grad_by_freq cannot be exported")


def _trained_parameters(module: nn.Module, sample: torch.Tensor) -> list[str]:
    """Parameters that get a gradient, found by running the model once.

    That also gives a clear message for a wrong input shape or type, before an exporter buries it.
    """
    try:
        output = module(sample)
    except ExportError:
        raise
    except Exception as error:  # whatever the user's forward raises
        kind = str(sample.dtype).removeprefix("torch.")
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"the model does not accept an input of shape {tuple(sample.shape)} and type {kind}: {first}; "
            "check --input (shape without the batch) and --dtype"
        ) from None
    if not output.requires_grad:
        raise ExportError("the model has no trainable parameters: there is nothing to train")
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output.sum(), [p for _, p in named], allow_unused=True)
    return [name for (name, _), gradient in zip(named, gradients, strict=True) if gradient is not None]


def export_forward(module: nn.Module, sample: torch.Tensor, exporter: Exporter) -> onnx.ModelProto:
    """Export with one of PyTorch's exporters, without its remarks."""
    with _quiet():
        return _export_script(module, sample) if exporter == "script" else _export_dynamo(module, sample)


def _export_script(module: nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        (sample,),
        cast(Any, buffer),  # this exporter takes a file, too
        dynamo=False,
        opset_version=OPSET,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        input_names=[INPUT_NAME],
        output_names=[OUTPUT_NAME],
        dynamic_axes={INPUT_NAME: {0: "N"}, OUTPUT_NAME: {0: "N"}},
    )
    return onnx.load_from_string(buffer.getvalue())


def _export_dynamo(module: nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    """Its optimiser folds weights into constants, so it stays off; `_check_complete` looks for other losses."""
    program = torch.onnx.export(
        module,
        (sample,),
        dynamo=True,
        opset_version=OPSET,
        input_names=[INPUT_NAME],
        output_names=[OUTPUT_NAME],
        dynamic_shapes=({0: torch.export.Dim("N", min=2)},),
        optimize=False,
        verbose=False,
    )
    assert program is not None  # it is None for the other exporter only
    return program.model_proto


def _check_complete(module: nn.Module, model: onnx.ModelProto, trainable: list[str]) -> None:
    """What an exporter folded into constants or left out would silently not be trained, or be trained otherwise."""
    kept = {item.name for item in model.graph.initializer}
    lost = [name for name in trainable if name not in kept]
    if lost:
        raise ExportError(f"the exporter turned parameter {lost[0]!r} into something else")
    operators = {node.op_type for node in model.graph.node}
    for part in (part for part in module.modules() if part.training):
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and "Dropout" not in operators:
            raise ExportError("the exporter dropped the model's dropout layers")
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and "BatchNormalization" not in operators:
            raise ExportError("the exporter wrote out batch norm as something else")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters warn about themselves at length; what matters is checked on the result."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), silence(1, 2):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
