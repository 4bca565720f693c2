"""A small heterogeneous problem whose gradient is written out by hand, in float64.

Three dense layers of different sizes, tanh between them, softmax cross entropy at the end; every device has its own
inputs (shifted its own way), its own number of samples and its own favourite class. The hidden layers may be narrower
than usual, so that the same problem serves width reduction. `Quadratics` is the other extreme: one vector, one parabola
per device, where fixed points and optima are known in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.oracles.model import Model

if TYPE_CHECKING:
    import torch

INPUTS, FIRST, SECOND, CLASSES = 5, 8, 6, 3
LAYERS = ("first", "second", "head")


@dataclass(frozen=True)
class Problem:
    inputs: list[np.ndarray]  # per device: samples × INPUTS
    labels: list[np.ndarray]
    batch: int | None = None  # samples per gradient; None takes all of the device's

    @property
    def devices(self) -> int:
        return len(self.inputs)

    @property
    def samples(self) -> list[int]:
        return [len(labels) for labels in self.labels]

    def batch_of(self, device: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples that belong to this step: the next `batch` ones, round and round."""
        count = len(self.labels[device])
        size = self.batch or count
        rows = [(step * size + offset) % count for offset in range(size)]
        return self.inputs[device][rows], self.labels[device][rows]

    def loss(self, device: int, model: Model, step: int = 0) -> float:
        x, y = self.batch_of(device, step)
        probabilities = _forward(model, x)[-1]
        return float(-np.mean(np.log(probabilities[np.arange(len(y)), y])))

    def gradient(self, device: int, model: Model, step: int = 0) -> Model:
        x, y = self.batch_of(device, step)
        first, second, probabilities = _forward(model, x)
        target = np.zeros_like(probabilities)
        target[np.arange(len(y)), y] = 1.0
        d_head = (probabilities - target) / len(y)
        d_second = (d_head @ model[2]["head.weight"]) * (1.0 - second**2)
        d_first = (d_second @ model[1]["second.weight"]) * (1.0 - first**2)
        return [
            {"first.weight": d_first.T @ x, "first.bias": d_first.sum(axis=0)},
            {"second.weight": d_second.T @ first, "second.bias": d_second.sum(axis=0)},
            {"head.weight": d_head.T @ second, "head.bias": d_head.sum(axis=0)},
        ]


def _forward(model: Model, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first = np.tanh(x @ model[0]["first.weight"].T + model[0]["first.bias"])
    second = np.tanh(first @ model[1]["second.weight"].T + model[1]["second.bias"])
    logits = second @ model[2]["head.weight"].T + model[2]["head.bias"]
    scaled = np.exp(logits - logits.max(axis=1, keepdims=True))
    return first, second, scaled / scaled.sum(axis=1, keepdims=True)


def make_problem(devices: int = 4, seed: int = 0, batch: int | None = None) -> Problem:
    rng = np.random.default_rng(seed)
    inputs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for device in range(devices):
        samples = 6 + 2 * device
        inputs.append(rng.normal(size=(samples, INPUTS)) + rng.normal(size=INPUTS))
        drawn = rng.integers(CLASSES, size=samples)
        labels.append(np.where(rng.random(samples) < 0.7, device % CLASSES, drawn))
    return Problem(inputs, labels, batch)


def make_model(seed: int = 1) -> Model:
    rng = np.random.default_rng(seed)
    model: Model = []
    for name, shapes in zip(LAYERS, narrow_shapes(1.0)):
        weight, bias = shapes[f"{name}.weight"], shapes[f"{name}.bias"]
        values = rng.normal(size=weight) / np.sqrt(weight[1])
        model.append({f"{name}.weight": values, f"{name}.bias": rng.normal(size=bias)})
    return model


def narrow_shapes(width: float) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the model that keeps the first `width` of the channels; inputs and classes stay."""
    first, second = int(np.ceil(width * FIRST)), int(np.ceil(width * SECOND))
    return [
        {"first.weight": (first, INPUTS), "first.bias": (first,)},
        {"second.weight": (second, first), "second.bias": (second,)},
        {"head.weight": (CLASSES, second), "head.bias": (CLASSES,)},
    ]


def torch_module(model: Model) -> torch.nn.Module:
    """The same network in PyTorch, float64, with these values; state_dict has the oracle's names in the same order.

    Its loss is `torch.nn.functional.cross_entropy(module(inputs), labels)`.
    """
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in zip(LAYERS, model):
                outputs, inputs = layer[f"{name}.weight"].shape
                setattr(self, name, torch.nn.Linear(inputs, outputs, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    network = Network()
    network.load_state_dict({name: torch.tensor(value) for layer in model for name, value in layer.items()})
    return network


def model_of(module: torch.nn.Module) -> Model:
    """A module's parameters as a model of the oracles."""
    state = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return [{name: value for name, value in state.items() if name.startswith(f"{layer}.")} for layer in LAYERS]


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = ½ Σ_e a_ie (x_e − b_ie)²: every element is a problem of its own."""

    curvature: np.ndarray  # devices × elements
    centre: np.ndarray

    def start(self) -> Model:
        return [{"x": np.zeros(self.curvature.shape[1])}]

    def gradient(self, device: int, model: Model, step: int = 0) -> Model:
        return [{"x": self.curvature[device] * (model[0]["x"] - self.centre[device])}]

    def optimum(self) -> np.ndarray:
        """Where the mean of the losses is least."""
        return (self.curvature * self.centre).sum(axis=0) / self.curvature.sum(axis=0)

    def fedavg_fixed_point(self, steps: int, rate: float) -> np.ndarray:
        """K steps take x − b_i to (1 − ηa_i)^K (x − b_i), so FedAvg rests where Σ (1 − (1 − ηa_i)^K)(x − b_i) = 0."""
        pull = 1.0 - (1.0 - rate * self.curvature) ** steps
        return (pull * self.centre).sum(axis=0) / pull.sum(axis=0)


def make_quadratics(devices: int = 4, elements: int = 3, seed: int = 2) -> Quadratics:
    rng = np.random.default_rng(seed)
    return Quadratics(rng.uniform(0.5, 2.0, size=(devices, elements)), rng.normal(size=(devices, elements)))
