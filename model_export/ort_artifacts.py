"""The onnxruntime-training flavour of a boundary: the files with which its own Module and Optimizer train a suffix.

    training_model.onnx    forward, loss, gradients added to buffers; batch norm updates its statistics in place
    eval_model.onnx        forward and loss
    optimizer_model.onnx   plain SGD, all that the package has besides AdamW
    checkpoint             the parameters' values; with `nominal`, only their names and shapes

The same input gives the same bytes, in every process.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from federation.manifest import Loss
from model_export.errors import ExportError
from model_export.graph import Emitter, attribute, serialise
from model_export.ort_preflight import unsupported
from model_export.ort_repair import repair, softplus
from model_export.ort_runner import (
    CHECKPOINT,
    EVAL_MODEL,
    LABELS_INPUT,
    OPTIMIZER_MODEL,
    TRAINING_MODEL,
    ArtifactStep,
    training_module,
)
from model_export.quiet import silence

LOSS_OUTPUT = "loss"
NO_LABEL = -100  # a number that no label has
NEWEST_IR = 10  # the newest that onnxruntime 1.19.2 loads

__all__ = ["ArtifactStep", "Loss", "unsupported", "write_artifacts"]


def write_artifacts(
    forward: onnx.ModelProto,
    trainable: Sequence[str],
    statistics: Sequence[str],
    loss: Loss,
    directory: Path,
    *,
    nominal: bool = False,
) -> list[Path]:
    """Write the four files into a directory that exists; `forward` stays as it is.

    `trainable` and `statistics` (running means and variances of batch norm) name initialisers; in this order they
    lie in the package's flat parameter buffer. A nominal checkpoint saves the bytes of the weights, but such a module
    works only after `copy_buffer_to_parameters(..., trainable_only=False)`.
    """
    artifacts = training_module("artifacts")
    _check(forward, trainable, statistics, loss)
    model = repair(forward)
    model.ir_version = min(model.ir_version, NEWEST_IR)
    _put_first(model, [*trainable, *statistics])
    _add_loss(model, loss)
    with tempfile.TemporaryDirectory() as name, silence(2):
        made = Path(name)
        try:
            artifacts.generate_artifacts(
                model,
                requires_grad=list(trainable),
                frozen_params=list(statistics),
                optimizer=artifacts.OptimType.SGD,
                artifact_directory=made,
                nominal_checkpoint=nominal,
            )
        except Exception as error:  # it raises whatever C++ or onnx threw
            last = str(error).strip().splitlines()[-1]
            raise ExportError(f"onnxruntime-training cannot differentiate this graph: {last}") from error
        training, evaluation, optimizer = (onnx.load(made / n) for n in (TRAINING_MODEL, EVAL_MODEL, OPTIMIZER_MODEL))
        checkpoint = (made / ("nominal_checkpoint" if nominal else CHECKPOINT)).read_bytes()
    _unbias_variances(training.graph)
    _drop_tokens(optimizer.graph)
    files = {
        TRAINING_MODEL: _bytes(training),
        EVAL_MODEL: _bytes(evaluation),
        OPTIMIZER_MODEL: _bytes(optimizer),
        CHECKPOINT: checkpoint,
    }
    for file, data in files.items():
        (directory / file).write_bytes(data)
    return [directory / file for file in files]


def _check(forward: onnx.ModelProto, trainable: Sequence[str], statistics: Sequence[str], loss: Loss) -> None:
    """Refuse what onnxruntime-training would reject with a riddle, or accept and train wrongly."""
    reasons = unsupported(forward, loss, trainable)
    if reasons:
        raise ExportError(f"onnxruntime-training cannot train this graph: {'; '.join(reasons)}")
    types = {item.name: item.data_type for item in forward.graph.initializer}
    wrong = [name for name in [*trainable, *statistics] if types.get(name) != TensorProto.FLOAT]
    if wrong:
        raise ExportError(f"parameters that are not float32 initialisers of the graph: {', '.join(wrong)}")
    used = {name for node in forward.graph.node for name in node.input}
    unused = [name for name in [*trainable, *statistics] if name not in used]
    if unused:
        raise ExportError(f"parameters that no node of the graph reads: {', '.join(unused)}")
    for node in forward.graph.node:
        if node.op_type == "BatchNormalization" and not set(node.input[3:5]) <= set(statistics):
            raise ExportError(f"node {node.name!r}: batch norm updates its statistics, so they must be listed as such")


def _put_first(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Initialisers become inputs in their order, and so does the flat buffer."""
    tensors = {item.name: item for item in model.graph.initializer}
    ordered = [tensors.pop(name) for name in names] + list(tensors.values())
    del model.graph.initializer[:]
    model.graph.initializer.extend(ordered)


def _add_loss(model: onnx.ModelProto, loss: Loss) -> None:
    """Make the mean loss the only output and the labels an input."""
    predictions = model.graph.output[0]
    emitter = Emitter("loss.")
    with emitter.scope("loss"):
        write = {"cross_entropy": _cross_entropy, "bce_with_logits": _bce_with_logits, "mse": _mse}[loss.name]
        emitter.ops("Identity", [LOSS_OUTPUT], write(emitter, loss, predictions.name))
    labels = onnx.ValueInfoProto()
    labels.CopyFrom(predictions)
    labels.name = LABELS_INPUT
    if loss.name == "cross_entropy":
        labels.type.tensor_type.elem_type = TensorProto.INT64
        del labels.type.tensor_type.shape.dim[1]
    model.graph.input.append(labels)
    model.graph.node.extend(emitter.nodes)
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in emitter.constants.items())
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(LOSS_OUTPUT, TensorProto.FLOAT, []))


def _cross_entropy(emitter: Emitter, loss: Loss, predictions: str) -> str:
    """Smoothing mixes in the mean over all classes, of the labels that count."""
    unwanted = NO_LABEL if loss.ignore_index is None else loss.ignore_index
    settings = {"ignore_index": unwanted, "reduction": "mean"}
    value, _ = emitter.ops("SoftmaxCrossEntropyLoss", 2, predictions, LABELS_INPUT, **settings)
    if not loss.label_smoothing:
        return value
    ignored = emitter.op("Equal", emitter.op("Unsqueeze", LABELS_INPUT, [1]), unwanted)
    counted = emitter.op("Cast", emitter.op("Not", ignored), to=TensorProto.FLOAT)
    total = emitter.op("Max", emitter.op("ReduceSum", counted, keepdims=0), 1.0)
    even = emitter.op("ReduceMean", emitter.op("LogSoftmax", predictions, axis=1), [1], keepdims=1)
    spread = emitter.op("Div", emitter.op("ReduceSum", emitter.op("Mul", even, counted), keepdims=0), total)
    kept = emitter.op("Mul", value, 1.0 - loss.label_smoothing)
    return emitter.op("Sub", kept, emitter.op("Mul", spread, loss.label_smoothing))


def _bce_with_logits(emitter: Emitter, loss: Loss, predictions: str) -> str:
    target = LABELS_INPUT
    if loss.label_smoothing:
        kept = emitter.op("Mul", target, 1.0 - loss.label_smoothing)
        target = emitter.op("Add", kept, loss.label_smoothing / 2)
    each = emitter.op("Sub", softplus(predictions, emitter), emitter.op("Mul", predictions, target))
    return emitter.op("ReduceMean", each, keepdims=0)


def _mse(emitter: Emitter, loss: Loss, predictions: str) -> str:
    error = emitter.op("Sub", predictions, LABELS_INPUT)
    return emitter.op("ReduceMean", emitter.op("Mul", error, error), keepdims=0)


def _unbias_variances(graph: onnx.GraphProto) -> None:
    """Let running variances follow PyTorch.

    BatchNormInternal moves the running variance towards the batch's biased variance v; PyTorch moves it towards
    v * n / (n - 1), n being the number of values per channel. The difference, (1 - momentum) * v / (n - 1), is added to
    the same memory by the operator that also accumulates gradients. v comes from the saved 1 / sqrt(v + epsilon).
    """
    for node in [node for node in graph.node if node.op_type == "BatchNormInternal"]:
        emitter = Emitter(f"{node.output[0]}.unbias")
        with emitter.scope(f"{node.name}/unbias"):
            per_channel = emitter.op("Div", emitter.op("Size", node.input[0]), emitter.op("Size", node.input[1]))
            others = emitter.op("Max", emitter.op("Sub", per_channel, 1), 1)
            inverse = emitter.op("Mul", node.output[4], node.output[4])
            variance = emitter.op("Sub", emitter.op("Reciprocal", inverse), attribute(node, "epsilon", 1e-5))
            share = emitter.op("Mul", variance, 1.0 - attribute(node, "momentum", 0.9))
            missing = emitter.op("Div", share, emitter.op("Cast", others, to=TensorProto.FLOAT))
            emitter.op("InPlaceAccumulatorV2", node.output[2], missing)
        emitter.nodes[-1].domain = "com.microsoft"
        graph.node.extend(emitter.nodes)
        graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in emitter.constants.items())


def _drop_tokens(graph: onnx.GraphProto) -> None:
    """Names made by onnxblock end in a number that counts calls in this process."""
    for node in graph.node:
        node.name = re.sub(r"::\d+$", "", node.name)
        node.output[:] = [re.sub(r"::\d+$", "", name) for name in node.output]
    for value in graph.output:
        value.name = re.sub(r"::\d+$", "", value.name)


def _bytes(model: onnx.ModelProto) -> bytes:
    """With onnx 1.18 and later the package writes files that it cannot load, but for their version."""
    model.ir_version = min(model.ir_version, NEWEST_IR)
    return serialise(model)
