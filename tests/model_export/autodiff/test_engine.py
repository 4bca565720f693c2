"""The engine: what is written, what is left out, and in which form."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.autodiff.registry import has_rule
from model_export.capture import capture_torch
from model_export.errors import MissingRule
from model_export.graph import inputs_with_subgraphs, serialise
from model_export.layers import split_layers
from model_export.normalise import normalise
from model_export.training import training_graph
from tests.model_export.autodiff.module_harness import (
    check_module,
    export,
    gradient_nodes,
    is_free_of_dead_nodes,
    sampler,
)

MSE = Loss("mse")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
        nn.GELU(),
        nn.Linear(6, 3),
    )


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
        "import hashlib, pathlib, sys; from tests.model_export.autodiff.test_engine import train_bytes; "
        "print(hashlib.sha256(train_bytes(pathlib.Path(sys.argv[1]), sys.argv[2:])).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path), *captured.trainable],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
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
