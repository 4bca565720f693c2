"""Where a model may be cut, and how the pieces are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from federation.manifest import BatchNorm
from model_export.autodiff.registry import has_rule
from model_export.capture import capture_torch
from model_export.errors import ExportError
from model_export.layers import find_layer, split_layers
from model_export.normalise import normalise
from model_export.shapes import sample_input
from model_export.training import measured_norms


def cut(module, shape, dtype="float32", vocabulary=None):
    def sample(batch):
        return sample_input(shape, dtype, vocabulary, batch)

    captured = capture_torch(module, torch.from_numpy(sample(2)))
    return split_layers(normalise(captured.model, captured.trainable, sample, has_rule))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def test_a_residual_block_stays_whole():
    layers = cut(nn.Sequential(nn.Linear(4, 8), Residual(), Residual(), nn.Linear(8, 3)), (4,))
    assert [layer.name for layer in layers] == ["0", "1", "2", "3"]
    assert [p.name for p in layers[1].parameters] == [
        "1.first.weight",
        "1.first.bias",
        "1.second.weight",
        "1.second.bias",
    ]


def test_normalisation_and_pooling_stay_with_their_convolution_and_statistics_come_last():
    block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    layers = cut(nn.Sequential(block, nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 2)), (1, 10, 10))
    assert [layer.name for layer in layers] == ["0", "1", "3"]
    kinds = {p.name: p.kind for p in layers[0].parameters}
    assert list(kinds.values()) == ["weight"] * 4 + ["statistic"] * 2
    assert list(kinds)[-2:] == ["0.1.running_mean", "0.1.running_var"]


def test_the_smallest_tensor_is_stored():
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    layers = cut(module, (1, 10, 10))
    assert [n.op_type for n in layers[1].nodes] == ["Gemm"]


def test_dropout_belongs_to_what_follows_it():
    layers = cut(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), (4,))
    assert [n.op_type for n in layers[0].nodes] == ["Gemm", "Relu"]
    assert [n.op_type for n in layers[1].nodes] == ["Dropout", "Gemm"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)

    def forward(self, x):
        return self.body(self.embedding(x).mean(1)) @ self.embedding.weight.T


def test_a_shared_weight_belongs_to_the_last_layer_that_uses_it():
    layers = cut(Tied(), (5,), "int64", 11)
    assert [[p.name for p in layer.parameters] for layer in layers] == [
        [],
        ["body.weight", "body.bias"],
        ["embedding.weight"],
    ]
    assert [[p.name for p in layer.borrowed] for layer in layers] == [["embedding.weight"], [], []]


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.join(self.left(x) * self.right(x))


def test_where_two_tensors_cross_a_small_model_has_a_boundary():
    layers = cut(TwoRoads(), (4,))
    assert [layer.name for layer in layers] == ["left", "right", "join"]
    assert len(layers[1].entering) == 2 and layers[1].input not in layers[1].entering
    assert layers[2].input in layers[2].entering


class LengthFromTheInput(nn.Module):
    """Shape arithmetic refers to the first tensor from behind the boundary."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.second(hidden.reshape(x.size(0), 3, 4)).mean(1)


def test_shape_arithmetic_does_not_tie_layers_together():
    assert [layer.name for layer in cut(LengthFromTheInput(), (6,))] == ["first", "second"]


def test_a_layer_is_found_by_the_module_it_holds():
    layers = cut(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)), (4,))
    assert find_layer(layers, "0") == find_layer(layers, "0.0") == 0
    with pytest.raises(ExportError, match=r"no layer starts with a module named 'x'; boundaries of this model: 0, 1"):
        find_layer(layers, "x")


def test_a_model_without_weights_has_nothing_to_train():
    with pytest.raises(ExportError, match="nothing to train"):
        cut(nn.Sequential(nn.Flatten(), nn.ReLU()), (2, 2))


class Twice(nn.Module):
    """One batch norm that two layers use, and one of its own."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)])
        self.shared, self.own = nn.BatchNorm2d(2), nn.BatchNorm2d(2, momentum=0.25)

    def forward(self, x):
        for convolution in self.convolutions:
            x = torch.relu(self.shared(convolution(x)))
        return self.own(x).mean((2, 3))


def test_a_batch_norm_is_measured_where_it_has_one_place():
    def sample(batch):
        return sample_input((2, 4, 3), "float32", None, batch)

    captured = capture_torch(Twice(), torch.from_numpy(sample(2)))
    graph = normalise(captured.model, captured.trainable, sample, has_rule)
    found = [norm for layer in split_layers(graph) for norm in measured_norms(graph, layer)]
    assert found == [BatchNorm("own.running_mean", "own.running_var", 0.25, 12)]
