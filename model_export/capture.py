"""From a PyTorch module to a forward ONNX model in training mode, parameters kept under their own names."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
import torch
from onnx import numpy_helper
from torch import nn

from model_export.errors import ExportError

OPSET = 18


@dataclass
class Captured:
    """A forward model and which of its initialisers are trained."""

    model: onnx.ModelProto
    trainable: list[str]


def capture_torch(module: nn.Module, sample: torch.Tensor) -> Captured:
    """Export with the TorchScript exporter, or, where that cannot, with the newer one."""
    module = module.train()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with _unchanged(module, buffers):
        _try_forward(module, sample)
    failures = []
    for export in (_export_script, _export_dynamo):
        try:
            with _quiet(), _unchanged(module, buffers):
                model = export(module, sample)
        except Exception as error:  # the exporters raise dozens of types; the next one may still succeed
            failures.append(str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__)
            continue
        names = {item.name for item in model.graph.initializer}
        trainable = [name for name, p in module.named_parameters() if p.requires_grad and name in names]
        _refuse_missing_modes(module, model)
        _put_back(model, buffers)
        return Captured(model, trainable)
    raise ExportError(f"PyTorch cannot export this model to ONNX: {'; then: '.join(failures)}")


@contextlib.contextmanager
def _unchanged(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A forward pass in training mode moves the statistics of batch norm; afterwards they are what they were."""
    try:
        yield
    finally:
        for name, buffer in module.named_buffers():
            buffer.data.copy_(buffers[name])


def _put_back(model: onnx.ModelProto, buffers: Mapping[str, torch.Tensor]) -> None:
    """The exporters run the model before they save it: give initialisers the values that the module had."""
    for item in model.graph.initializer:
        if item.name in buffers:
            item.CopyFrom(numpy_helper.from_array(buffers[item.name].numpy(), item.name))


def _try_forward(module: nn.Module, sample: torch.Tensor) -> None:
    """A clear message for a wrong input shape or type, before an exporter buries it."""
    try:
        with torch.no_grad():
            output = module(sample)
    except Exception as error:  # whatever the user's forward raises
        kind = str(sample.dtype).removeprefix("torch.")
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"the model does not accept an input of shape {tuple(sample.shape)} and type {kind}: {first}; "
            "check --input (shape without the batch) and --dtype"
        ) from None
    if not isinstance(output, torch.Tensor):
        raise ExportError(f"the model must return one tensor, it returns {type(output).__name__}")


def _export_script(module: nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    buffer = io.BytesIO()
    torch.onnx.export(
        module, (sample,), buffer, dynamo=False, opset_version=OPSET,
        training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        input_names=["input"], output_names=["predictions"],
        dynamic_axes={"input": {0: "N"}, "predictions": {0: "N"}},
    )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def _export_dynamo(module: nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    """The newer exporter turns batch norm and dropout into inference form; `_refuse_missing_modes` looks for that."""
    program = torch.onnx.export(
        module, (sample,), dynamo=True, opset_version=OPSET, input_names=["input"], output_names=["predictions"],
        dynamic_shapes=({0: torch.export.Dim("N", min=2)},), optimize=True, verbose=False,
    )  # fmt: skip
    return program.model_proto


def _refuse_missing_modes(module: nn.Module, model: onnx.ModelProto) -> None:
    """Dropout that vanished in the export would silently change what is trained."""
    wanted = sum(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
    found = sum(node.op_type == "Dropout" for node in model.graph.node)
    if wanted and not found:
        raise ExportError(
            "the exporter dropped the model's dropout layers; write the model with operators it can trace"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters warn about themselves at length; what matters is checked on the result."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
