"""The engine on graphs that come as files: functions are inlined, names are not needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.autodiff.registry import has_rule
from model_export.layers import split_layers
from model_export.normalise import normalise
from model_export.training import training_graph
from tests.model_export.autodiff.drawing import distinct, off
from tests.model_export.autodiff.harness import RUN_BATCH, Fill, assert_close, journal, normal, operator, run
from tests.model_export.autodiff.module_harness import (
    check_module,
    random_labels,
)

MSE = Loss("mse")


def source_model(
    op_type: str,
    attrs: dict,
    weight: np.ndarray,
    opset: int,
    extra: dict[str, np.ndarray] | None = None,
    named: bool = True,
) -> tuple[onnx.ModelProto, list[str]]:
    """An ONNX file: op(input * weight, extra ...), all of whose initialisers are trained."""
    parameters = {"weight": weight, **(extra or {})}
    nodes = [
        helper.make_node("Mul", ["input", "weight"], ["scaled"], name="/Mul" if named else ""),
        helper.make_node(op_type, ["scaled", *(extra or {})], ["output"], name=f"/{op_type}" if named else "", **attrs),
    ]
    shape = ["N", *weight.shape]
    graph = helper.make_graph(
        nodes,
        "source",
        [helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(value, name) for name, value in parameters.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return model, list(parameters)


def check_source(
    model: onnx.ModelProto, trainable: list[str], reference: Callable[..., Tensor], fill: Fill = normal
) -> onnx.ModelProto:
    """The training graph of an ONNX file against a PyTorch function of its input and its initialisers."""
    shape = tuple(dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:])
    graph = normalise(model, trainable, lambda batch: fill(np.random.default_rng(batch), (batch, *shape)), has_rule)
    with journal():
        train = training_graph(graph, split_layers(graph), MSE)
    x = fill(np.random.default_rng(0), (RUN_BATCH, *shape))
    tensors = {name: torch.from_numpy(graph.weights[name].copy()).double().requires_grad_() for name in trainable}
    predictions = reference(torch.from_numpy(x).double(), *tensors.values())
    labels = random_labels(MSE, tuple(predictions.shape))
    loss = F.mse_loss(predictions, torch.from_numpy(labels).double())
    slopes = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
    found = run(train, {**graph.weights, "input": x, "labels": labels})
    assert_close(found, {"loss": loss.detach().numpy()}, "loss")
    assert_close(found, {f"{name}.grad": slope.numpy() for name, slope in zip(tensors, slopes)}, "gradients")
    return train


def layer_of(x: Tensor) -> Tensor:
    """MeanVarianceNormalization over its default axes, batch and image; epsilon as in its function body."""
    mean = x.mean((0, 2, 3), keepdim=True)
    return (x - mean) / (((x - mean) ** 2).mean((0, 2, 3), keepdim=True).sqrt() + 1e-9)


@pytest.mark.parametrize(
    ("op_type", "attrs", "shape", "opset", "reference"),
    [
        ("Gelu", {}, (4,), 20, F.gelu),
        ("Gelu", {"approximate": "tanh"}, (4,), 20, lambda x: F.gelu(x, approximate="tanh")),
        ("Mish", {}, (4,), 18, F.mish),
        ("Celu", {"alpha": 1.5}, (4,), 18, lambda x: F.celu(x, 1.5)),
        ("Celu", {}, (4,), 18, F.celu),
        ("Selu", {}, (4,), 18, F.selu),
        ("Softsign", {}, (4,), 18, F.softsign),
        ("ThresholdedRelu", {"alpha": 0.3}, (4,), 18, lambda x: F.threshold(x, 0.3, 0.0)),
        ("ThresholdedRelu", {}, (4,), 18, lambda x: F.threshold(x, 1.0, 0.0)),
        ("Shrink", {"lambd": 0.3, "bias": 0.3}, (4,), 18, lambda x: F.softshrink(x, 0.3)),
        ("MeanVarianceNormalization", {}, (2, 3, 3), 18, layer_of),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_operators_with_a_function_body_are_inlined(
    op_type: str, attrs: dict, shape: tuple[int, ...], opset: int, reference: Callable[[Tensor], Tensor]
) -> None:
    assert not has_rule(op_type)
    weight = normal(np.random.default_rng(1), shape)
    model, trainable = source_model(op_type, attrs, weight, opset)
    if op_type.startswith("Reduce"):
        model.graph.node[1].input.append("axes")
        model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))
    train = check_source(model, trainable, lambda x, w: reference(x * w), off(0.0, 0.3, -0.3, 1.0, fill=distinct))
    assert op_type not in {node.op_type for node in train.graph.node}


@pytest.mark.parametrize("opset", [18, 21])
def test_group_normalization_is_inlined_with_the_scale_of_its_opset(opset: int) -> None:
    """Opset 18 has one scale per group, opset 21 one per channel."""
    rng = np.random.default_rng(1)
    width = 2 if opset == 18 else 4
    extra = {"scale": normal(rng, (width,)), "bias": normal(rng, (width,))}
    model, trainable = source_model("GroupNormalization", {"num_groups": 2}, normal(rng, (4, 3, 2)), opset, extra)

    def reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        per_channel = 4 // width
        return F.group_norm(x * weight, 2, scale.repeat_interleave(per_channel), bias.repeat_interleave(per_channel))

    check_source(model, trainable, reference)


def test_nodes_of_a_file_need_no_names() -> None:
    weight = normal(np.random.default_rng(1), (3,))
    model, trainable = source_model("Mul", {}, weight, 18, {"second": weight + 1}, named=False)
    check_source(model, trainable, lambda x, w, second: x * w * second)


@operator("Gemm", "Softmax", "LayerNormalization", "MatMul")
def test_attention_written_with_matrix_products() -> None:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 3)
            self.token = nn.Parameter(torch.randn(1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1)
            heads = self.mix(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            query, key, value = heads[0], heads[1], heads[2]
            weights = torch.softmax(query @ key.transpose(-1, -2) / 2.0, -1)
            mixed = (weights @ value).transpose(1, 2).flatten(2)
            return self.out((x + mixed)[:, 0])

    check_module(Attention(), torch.randn(2, 5, 8), Loss("cross_entropy"))


def test_a_parameter_that_the_loss_does_not_depend_on_has_a_gradient_of_zero() -> None:
    """A threshold decides which branch is taken; its own slope is zero."""
    weight = normal(np.random.default_rng(1), (3,))
    model, trainable = source_model("Mul", {}, weight, 18, {"threshold": weight})
    del model.graph.node[1]
    model.graph.node.extend(
        [
            helper.make_node("Greater", ["input", "threshold"], ["above"], name="/Greater"),
            helper.make_node("Where", ["above", "scaled", "input"], ["output"], name="/Where"),
        ]
    )
    check_source(model, trainable, lambda x, w, threshold: torch.where(x > threshold, x * w, x))
