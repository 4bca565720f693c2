"""One weak round here equals the same round written in plain PyTorch: losses, gradients, weights and statistics."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest

from edge_runtime.data import Samples, from_arrays
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer, batches
from federation.axes.local import LocalStep, Momentum, Start, WeightDecay, runs
from federation.messages import Task
from tests.edge_runtime.conftest import ENGINES, Bundle, relative

torch = pytest.importorskip("torch")
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-4
TOLERANCE = 2e-5


@dataclass
class TorchRound:
    """What PyTorch did: per step the loss and the gradients, and the state of the module after each."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    states: list[dict[str, np.ndarray]] = field(default_factory=list)


def torch_round(bundle: Bundle, boundary: str, samples: Samples, task: Task) -> TorchRound:
    """The round as a user of PyTorch would write it: freeze, put in evaluation mode, train the rest with SGD."""
    module, result = bundle.module().train(), TorchRound()
    layers = bundle.manifest.layers[: bundle.manifest.boundary(boundary).layer]
    frozen = {p.name for layer in layers for p in layer.parameters}
    for path, part in module.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if any(f"{path}.{name}" in frozen for name, _ in own):
            part.eval().requires_grad_(False)
    optimiser = torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM, weight_decay=DECAY
    )
    for _, indices in batches(len(samples), task.batch, task):
        x, labels = map(torch.from_numpy, samples.batch(indices))
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), labels)
        loss.backward()
        result.losses.append(loss.item())
        result.gradients.append({n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None})
        optimiser.step()
        result.states.append({n: v.numpy().copy() for n, v in module.state_dict().items()})
    return result


def compare(bundle: Bundle, boundary: str, samples: Samples, task: Task, engine: str, tolerance: float) -> dict:
    """Step by step with the trainer's own parts, then as a whole; gives the largest errors."""
    manifest, expected = bundle.manifest, torch_round(bundle, boundary, samples, task)
    layer = manifest.boundary(boundary).layer
    start = manifest.space.suffix(layer).start
    trained = [p for part in manifest.layers[layer:] for p in part.parameters]
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "statistic": 0.0}
    trainer = Trainer(bundle.directory, BundleSource(bundle.directory, manifest), samples, engine=engine)

    def check_state(vector: np.ndarray, state: dict[str, np.ndarray]) -> None:
        views = manifest.space.views(vector, start=start)
        assert set(views) == {p.name for p in trained}
        for p in trained:
            error = relative(views[p.name], state[p.name])
            worst[p.kind] = max(worst[p.kind], error)
            assert error < tolerance, p.name

    # Every step: the stored activations through the engine's step and the chained rules.
    outcome = trainer.run(task, Received(bundle.suffix(boundary)))
    rows = trainer._stored.rows
    step = bundle.step(boundary, engine)
    local = LocalStep(task.rules, Start(step.parameters, task.steps, RATE), *runs(manifest.space, layer))
    losses = []
    for number, (_, indices) in enumerate(batches(len(samples), task.batch, task)):
        x = np.empty((task.batch, *manifest.layers[layer].input.shape), np.float32)
        rows.read(indices, x)
        losses.append(step.run(x, samples.batch(indices)[1]))
        worst["loss"] = max(worst["loss"], abs(losses[-1] - expected.losses[number]) / expected.losses[number])
        assert set(expected.gradients[number]) == {p.name for p in trained if p.kind == "weight"}
        for name, gradient in expected.gradients[number].items():
            error = relative(step.results[name], gradient)
            worst["gradient"] = max(worst["gradient"], error)
            assert error < tolerance, (number, name)
        local.step(step.gradients, RATE)
        check_state(local.x, expected.states[number])
    assert worst["loss"] < tolerance
    # The whole round, as a device runs it.
    assert outcome.report.loss == pytest.approx(np.mean(expected.losses), rel=tolerance)
    assert outcome.report.last_loss == pytest.approx(expected.losses[-1], rel=tolerance)
    assert np.array_equal(outcome.parameters, local.x)
    check_state(outcome.parameters, expected.states[-1])
    # PyTorch left the frozen layers alone, so what the device keeps and what it trained make up PyTorch's whole model.
    before = manifest.space.views(np.array(bundle.weights))
    for p in (p for part in manifest.layers[:layer] for p in part.parameters):
        assert np.array_equal(expected.states[-1][p.name], before[p.name]), p.name
    return worst


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("boundary", ["weak", "moderate"])
def test_a_round_on_digits_is_pytorchs(digits, images, boundary, engine):
    samples = from_arrays(*images, digits.manifest)
    task = Task(boundary, 10, 32, RATE, (WeightDecay(DECAY), Momentum(MOMENTUM)), seed=5)
    kept = digits.weights.copy()
    worst = compare(digits, boundary, samples, task, engine, TOLERANCE)
    print(f"digits, {boundary}, {engine}:", {name: f"{error:.1e}" for name, error in worst.items()})
    assert (worst["statistic"] > 0) == (boundary == "moderate"), "batch norm is trained in the moderate tier only"
    assert np.array_equal(digits.weights, kept), "the bundle itself is not trained"


def test_a_round_on_resnet8_is_pytorchs(resnet8):
    rng = np.random.default_rng(0)
    samples = from_arrays(rng.random((48, 3, 32, 32), np.float32), rng.integers(0, 10, 48), resnet8.manifest)
    boundary = resnet8.manifest.boundaries[-1].name
    assert boundary.startswith("layer3")
    task = Task(boundary, 3, 16, RATE, (WeightDecay(DECAY), Momentum(MOMENTUM)), seed=5)
    worst = compare(resnet8, boundary, samples, task, "portable", TOLERANCE)
    print("resnet8, weak, portable:", {name: f"{error:.1e}" for name, error in worst.items()})
    assert worst["statistic"] > 0


def test_the_comparison_would_notice_a_frozen_batch_norm_in_training_mode(digits, images):
    """The two ways to run a frozen prefix differ far beyond the tolerance, so the tests above tell them apart."""
    module = digits.module()
    x = torch.from_numpy(images[0][:32])
    with torch.no_grad():
        evaluated = copy.deepcopy(module)[:3].eval()(x).numpy()
        trained = module[:3].train()(x).numpy()
    assert relative(trained, evaluated) > 100 * TOLERANCE
