"""A whole export of a PyTorch module against the module itself in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import NodeProto
from torch import Tensor, nn

from federation.manifest import Loss
from model_export.autodiff.rules.dropout import SEED_INPUT, SEEDED
from model_export.bundle import usable_graph
from model_export.capture import capture_torch
from model_export.graph import Graph, needed_nodes
from model_export.layers import LayerGraph, split_layers
from model_export.modes import training_modes
from model_export.oracle import seeded_dropout, torch_loss
from model_export.plain_operators import plain_operators
from model_export.training import inference_graph, training_graph
from tests.model_export.autodiff.harness import RUN_BATCH, Arrays, assert_close, journal, normal, run


@dataclass(frozen=True)
class Exported:
    """A module as the exporter sees it."""

    graph: Graph
    layers: list[LayerGraph]
    train: onnx.ModelProto


def sampler(sample: Tensor) -> Callable[[int], np.ndarray]:
    """Inputs like `sample` for any batch size."""

    def draw(batch: int) -> np.ndarray:
        rng = np.random.default_rng(batch)
        shape = (batch, *sample.shape[1:])
        if sample.is_floating_point():
            return normal(rng, shape)
        return rng.integers(0, int(sample.max()) + 1, shape)

    return draw


def export(
    module: nn.Module, sample: Tensor, loss: Loss, *, boundary: int = 0, last_steps: int | None = None
) -> Exported:
    """The training graph of a copy of a module from a layer on."""
    graph = usable_graph(lambda exporters: capture_torch(copy.deepcopy(module), sample, exporters), sampler(sample))
    layers = split_layers(graph)
    with journal():
        return Exported(graph, layers, training_graph(graph, layers[boundary:], loss, last_steps))


@dataclass(frozen=True)
class Step:
    """A training graph, what it reads, and what PyTorch says it should give."""

    exported: Exported
    feed: Arrays
    expected: Arrays

    def check(self, found: Mapping[str, np.ndarray]) -> None:
        """Loss, predictions, all gradients, and each new statistic on its own scale."""
        gradients = {name: value for name, value in self.expected.items() if name.endswith(".grad")}
        assert_close(found, gradients, "gradients")
        for name in self.expected.keys() - gradients.keys():
            assert_close(found, {name: self.expected[name]}, name)


def prepare_step(
    module: nn.Module,
    sample: Tensor,
    loss: Loss | None = None,
    *,
    batch: int = RUN_BATCH,
    boundary: int = 0,
    seed: int = 7,
) -> Step:
    """Export a module and take one training step with PyTorch in eager mode."""
    loss = loss or Loss("mse")
    exported = export(module, sample, loss, boundary=boundary)
    graph, layers = exported.graph, exported.layers
    x = sampler(sample)(batch)
    state = graph.parameters()
    expected, labels = eager_step(module, state, x, loss, layers, boundary, seed)
    feed = {
        **state,
        "input": forward(graph, layers[:boundary], x),
        "labels": labels,
        "seed": np.array(seed, np.int64),
    }
    wanted = {value.name for value in exported.train.graph.input}
    return Step(exported, {name: value for name, value in feed.items() if name in wanted}, expected)


def check_module(module: nn.Module, sample: Tensor, loss: Loss | None = None, **options: int) -> Exported:
    """A module's training graph against the module in training mode: loss, gradients, new statistics.

    `options` are those of `prepare_step`: batch, boundary, seed.
    """
    step = prepare_step(module, sample, loss, **options)
    step.check(run(step.exported.train, step.feed))
    return step.exported


def eager_step(
    module: nn.Module,
    state: Mapping[str, np.ndarray],
    x: np.ndarray,
    loss: Loss,
    layers: Sequence[LayerGraph],
    boundary: int,
    seed: int,
) -> tuple[Arrays, np.ndarray]:
    """(what the training graph should give, labels), from PyTorch; frozen layers work as in inference."""
    module = copy.deepcopy(module)
    training_modes(module)
    known = module.state_dict()
    values = {name: torch.from_numpy(state[name].copy()) for name in state if name in known}
    module.load_state_dict(values, strict=False)
    for layer in layers[:boundary]:
        for parameter in layer.parameters:
            if parameter.kind == "statistic":
                module.get_submodule(parameter.name.rpartition(".")[0]).eval()
    frozen = sum(node.op_type in SEEDED for layer in layers[:boundary] for node in layer.nodes)
    with seeded_dropout(seed, skip=frozen), plain_operators():
        predictions = module(torch.from_numpy(x))
    labels = random_labels(loss, tuple(predictions.shape))
    value = torch_loss(loss, predictions, torch.from_numpy(labels))
    value.backward()
    result = {"loss": value.detach().numpy(), "predictions": predictions.detach().numpy()}
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    for parameter in (p for layer in layers[boundary:] for p in layer.parameters):
        if parameter.kind == "statistic":
            result[f"{parameter.name}.new"] = buffers[parameter.name].numpy()
        else:
            slope = weights[parameter.name].grad
            zeros = np.zeros(parameter.shape, np.float32)
            result[f"{parameter.name}.grad"] = zeros if slope is None else slope.numpy()
    return result, labels


def forward(graph: Graph, layers: Sequence[LayerGraph], x: np.ndarray) -> np.ndarray:
    """The frozen layers, one after the other."""
    for layer in layers:
        x = run(inference_graph(graph, layer, None), {"input": x})["output"]
    return x


def random_labels(loss: Loss, shape: tuple[int, ...]) -> np.ndarray:
    """Labels that fit predictions of a shape."""
    rng = np.random.default_rng(3)
    if loss.name == "cross_entropy":
        return rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if loss.name == "bce_with_logits":
        return rng.integers(0, 2, shape).astype(np.float32)
    return normal(rng, shape)


def gradient_nodes(model: onnx.ModelProto) -> list[NodeProto]:
    """The backward part of a training graph."""
    return [node for node in model.graph.node if node.name.startswith("backward")]


def is_free_of_dead_nodes(model: onnx.ModelProto) -> bool:
    nodes = list(model.graph.node)
    return len(needed_nodes(nodes, [value.name for value in model.graph.output])) == len(nodes)


def seed_input(model: onnx.ModelProto) -> bool:
    """Whether a training graph asks for a seed."""
    return SEED_INPUT in {value.name for value in model.graph.input}
