"""The engine: what is written, what is left out, and in which form."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.autodiff.registry import has_rule
from model_export.capture import capture_torch
from model_export.errors import MissingRule
from model_export.graph import inputs_with_subgraphs, serialise
from model_export.layers import split_layers
from model_export.normalise import normalise
from model_export.training import training_graph
from tests.autodiff.drawing import distinct, off
from tests.autodiff.harness import RUN_BATCH, Fill, assert_close, journal, normal, operator, run
from tests.autodiff.module_harness import (
    check_module,
    export,
    gradient_nodes,
    is_free_of_dead_nodes,
    random_labels,
    sampler,
)

MSE = Loss("mse")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3),
    )  # fmt: skip


IMAGE = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("boundary", [0, 1, 2, 3])
def test_loss_gradients_and_statistics_from_every_boundary(boundary: int) -> None:
    check_module(network(), IMAGE, Loss("cross_entropy"), boundary=boundary)


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_the_backward_graph_stops_at_the_boundary(boundary: int) -> None:
    """Nothing of a frozen layer, and no gradient of what a device has stored: nobody would read it."""
    exported = export(network(), IMAGE, MSE, boundary=boundary)
    frozen = {p.name for layer in exported.layers[:boundary] for p in layer.parameters}
    trained = {p.name for layer in exported.layers[boundary:] for p in layer.parameters if p.kind == "weight"}
    model = exported.train
    names = {value.name for value in [*model.graph.input, *model.graph.output, *model.graph.initializer]}
    assert not names & frozen
    assert {name for name in names if name.endswith(".grad")} == {f"{name}.grad" for name in trained}
    modules = {name.rpartition(".")[0] for name in frozen}
    assert not [node.name for node in model.graph.node if node.name.split("/")[1] in modules]
    first = exported.layers[boundary].parameters[0].name
    assert not [node.name for node in gradient_nodes(model) if first in inputs_with_subgraphs(node)]


def test_a_smaller_part_has_fewer_nodes() -> None:
    sizes = [len(export(network(), IMAGE, MSE, boundary=boundary).train.graph.node) for boundary in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


@pytest.mark.parametrize("boundary", [0, 2])
def test_dead_nodes_and_constants_are_gone(boundary: int) -> None:
    model = export(network(), IMAGE, MSE, boundary=boundary).train
    assert is_free_of_dead_nodes(model)
    used = {name for node in model.graph.node for name in inputs_with_subgraphs(node)}
    assert {item.name for item in model.graph.initializer} <= used


class Bent(nn.Module):
    """An operator that has neither a rule nor a function body."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tan(x)


def test_a_missing_rule_is_an_error_that_names_node_operator_module_and_file() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Sequential(Bent(), nn.Linear(2, 2)))
    with pytest.raises(MissingRule) as caught:
        export(module, torch.randn(2, 3), MSE)
    message = str(caught.value)
    assert all(part in message for part in ("operator Tan", "/Tan'", "model_export/autodiff/rules/tan.py"))
    assert "module '1.0'" in message or "module '1.1.0'" in message


def test_an_operator_without_a_rule_does_not_matter_in_a_frozen_layer() -> None:
    module = nn.Sequential(nn.Linear(3, 2), Bent(), nn.Linear(2, 2))
    check_module(module, torch.randn(2, 3), boundary=1)


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


@pytest.mark.parametrize("times", [2, 3])
def test_the_gradients_of_a_parameter_used_several_times_add_up(times: int) -> None:
    torch.manual_seed(0)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times):
                x = torch.tanh(self.dense(x))
            return x

    check_module(Again(), torch.randn(2, 3))


def test_tied_weights_are_one_parameter_with_both_gradients() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.scores = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.scores.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(self.words(x).mean(1))

    exported = check_module(Tied(), torch.randint(0, 5, (2, 3)), Loss("cross_entropy"))
    assert sum(value.name.endswith(".grad") for value in exported.train.graph.output) == 1


@pytest.mark.parametrize("row", [0, 3, -1])
def test_the_padding_row_of_an_embedding_has_a_gradient_of_zero(row: int) -> None:
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.dense = nn.Embedding(5, 4, padding_idx=row), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(self.words(x).mean(1))

    check_module(Words(), torch.tensor([[0, 1, 2], [3, 4, 0]]))


def test_a_parameter_that_is_not_trained_has_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[1].bias.requires_grad_(False)
    exported = check_module(module, torch.randn(2, 3))
    assert "1.bias.grad" not in {value.name for value in exported.train.graph.output}


class Twice(nn.Module):
    """Two parameters with one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


def test_two_parameters_may_have_one_and_the_same_gradient() -> None:
    check_module(Twice(), torch.randn(2, 3))


def test_a_copy_of_a_gradient_is_named_as_part_of_the_backward_pass() -> None:
    nodes = export(Twice(), torch.randn(2, 3), MSE).train.graph.node
    assert {node.name.partition("/")[0] for node in nodes} == {"forward", "backward"}


@pytest.mark.parametrize("boundary", [0, 2])
def test_forward_and_backward_are_told_apart_by_the_names_of_nodes(boundary: int) -> None:
    nodes = export(network(), IMAGE, MSE, boundary=boundary).train.graph.node
    assert {node.name.partition("/")[0] for node in nodes} == {"forward", "backward"}


def test_no_two_nodes_have_the_same_name() -> None:
    """onnxruntime refuses them; exporters number their nodes like we do."""
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence = nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrence(x)[0]

    for module, sample in ((network(), IMAGE), (Reader(), torch.randn(2, 4, 3))):
        names = [node.name for node in export(module, sample, MSE).train.graph.node]
        assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_any_batch_size(batch: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4), nn.Softmax(1))
    check_module(module, IMAGE, batch=batch)


def test_only_standard_operators_that_old_runtimes_know() -> None:
    model = export(network(), IMAGE, MSE).train
    assert [(item.domain, item.version) for item in model.opset_import] == [("", 18)]
    assert model.ir_version <= 10
    onnx.checker.check_model(model, full_check=True)


def test_the_same_model_gives_the_same_bytes() -> None:
    first, second = (serialise(export(network(), IMAGE, MSE).train) for _ in range(2))
    assert first == second


def train_bytes(path: Path, trainable: list[str]) -> bytes:
    """The training graph of an ONNX file that takes images like IMAGE."""
    graph = normalise(onnx.load(path), trainable, sampler(IMAGE), has_rule)
    return serialise(training_graph(graph, split_layers(graph), MSE))


def test_the_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """The order of a set of names changes from process to process; files are known by their sha256."""
    path = tmp_path / "model.onnx"
    captured = capture_torch(network(), IMAGE)
    onnx.save(captured.model, path)
    program = (
        "import hashlib, pathlib, sys; from tests.autodiff.test_engine import train_bytes; "
        "print(hashlib.sha256(train_bytes(pathlib.Path(sys.argv[1]), sys.argv[2:])).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path), *captured.trainable],
        cwd=Path(__file__).resolve().parents[2], env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == hashlib.sha256(train_bytes(path, captured.trainable)).hexdigest()


def test_the_forward_graph_is_left_as_it_was() -> None:
    exported = export(network(), IMAGE, MSE)
    graph = exported.graph
    before = [node.SerializeToString() for node in graph.nodes], dict(graph.shapes), list(graph.constants)
    weights = {name: value.copy() for name, value in graph.parameters().items()}
    training_graph(graph, exported.layers[1:], MSE)
    training_graph(graph, exported.layers, MSE)
    assert (
        [node.SerializeToString() for node in graph.nodes],
        dict(graph.shapes),
        list(graph.constants),
    ) == before
    assert all(np.array_equal(value, weights[name]) for name, value in graph.parameters().items())


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
        nodes, "source",
        [helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(value, name) for name, value in parameters.items()],
    )  # fmt: skip
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
        ("ReduceLogSumExp", {"keepdims": 0}, (4,), 18, lambda x: torch.logsumexp(x, 1)),
        ("ReduceL1", {"keepdims": 0}, (4,), 18, lambda x: x.abs().sum(1)),
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
