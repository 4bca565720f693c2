"""Forward nodes that are rewritten before they are differentiated: the same gradients, fewer passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation.manifest import Loss
from tests.model_export.autodiff.harness import operator
from tests.model_export.autodiff.module_harness import check_module, export

MSE = Loss("mse")
LENGTH, WIDTH = 9, 4


class Activated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(3 * self.dense(x))


def share(x: Tensor) -> Tensor:
    return 1 + torch.erf(x * math.sqrt(0.5))


GELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "PyTorch's": F.gelu,
    "half first": lambda x: 0.5 * x * share(x),
    "half of the sum": lambda x: x * (0.5 * share(x)),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "another factor": lambda x: 0.25 * x * share(x),
    "another input": lambda x: 0.5 * (x + 1) * share(x),
    "another sum": lambda x: 0.5 * x * (share(x) + 1),
    "read twice": lambda x: 0.5 * x * share(x) + share(x),
    "a square": lambda x: 0.5 * x * x,
}


@operator("ExactGelu")
@pytest.mark.parametrize("name", GELUS)
def test_gelu_is_one_operator(name: str) -> None:
    torch.manual_seed(1)
    check_module(Activated(GELUS[name]), torch.randn(2, 6), MSE)
    assert count(Activated(GELUS[name]), torch.randn(2, 6), "HardSigmoid") == 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_gelu_stays(name: str) -> None:
    torch.manual_seed(1)
    check_module(Activated(OTHERS[name]), torch.randn(2, 6), MSE)
    assert count(Activated(OTHERS[name]), torch.randn(2, 6), "HardSigmoid") == 0


def test_gelu_of_images() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.GELU())
    check_module(nn.Sequential(module, nn.Flatten(), nn.Linear(64, 2)), torch.randn(2, 2, 4, 4), MSE)


class Attention(nn.Module):
    """Long rows of scores beside narrow rows of values; `twice`: the probabilities are read once more."""

    def __init__(self, twice: bool = False, scale: Callable[[Tensor], Tensor] = lambda scores: scores / 2.0) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice = twice
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.scale(self.query(x) @ self.key(x).transpose(1, 2)), -1)
        found = weights @ self.value(x)
        return found + weights.square().sum(-1, keepdim=True) if self.twice else found


@operator("Softmax", "MatMul")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("scale", [lambda s: s / 2.0, lambda s: s * 0.3, lambda s: 0.3 * s, lambda s: 2.0 / (s + 9)])
def test_attention_with_long_rows(twice: bool, scale: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(2)
    check_module(Attention(twice, scale), torch.randn(2, LENGTH, WIDTH), MSE)


def test_scores_are_neither_scaled_nor_turned() -> None:
    """Nothing but the product, softmax and two nodes of its gradient goes over [rows, rows]."""
    model = onnx.shape_inference.infer_shapes(export(Attention(), torch.randn(2, LENGTH, WIDTH), MSE).train)
    sizes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    large = [n.op_type for n in model.graph.node if sizes.get(n.output[0], [])[-2:] == [LENGTH, LENGTH]]
    assert sorted(large) == ["MatMul", "MatMul", "Mul", "Softmax", "Sub"]


def test_weights_of_wide_inputs() -> None:
    """Of a sequence: the product over rows turns the narrow operand, whichever it is."""
    torch.manual_seed(3)
    check_module(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 3)), torch.randn(2, 5, 3), MSE)


def count(module: nn.Module, sample: Tensor, op_type: str) -> int:
    return sum(node.op_type == op_type for node in export(module, sample, MSE).train.graph.node)
