"""Ordered dropout: every step is PyTorch's step of a sub-network whose weights are slices of the wide one's."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.data import from_arrays
from edge_runtime.engine.engine import OnnxEngine
from edge_runtime.engine.ordered_dropout import OrderedDropoutStep, draw_width, open_coverage
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer, batches, step_seed
from federation.axes.local import LocalStep, Momentum, Start, WeightDecay, runs
from federation.coverage import coverage, width_of
from federation.messages import Task
from tests.edge_runtime.conftest import ENGINES, relative, sliced_module

torch = pytest.importorskip("torch")
RATE, MOMENTUM, DECAY, TOLERANCE = 0.05, 0.9, 1e-4, 5e-5
TEXTS = ["conv1|conv1@0.45|conv1@0.2", "conv1@0.75|conv1@0.2"]


def opened(bundle, text, engine="portable"):
    source = BundleSource(bundle.directory, bundle.manifest)
    covered = coverage(bundle.manifest, text)
    step = open_coverage(OnnxEngine(bundle.directory, source, engine, RuntimeSettings()), bundle.manifest, covered)
    step.parameters[:] = bundle.suffix(covered.boundary.name)
    return covered, step


def prefix(tensor, like):
    return tensor[tuple(slice(size) for size in like.shape)]


class TorchOrderedDropout:
    """The wide module, and in every step a fresh narrow one that is filled with slices of it."""

    def __init__(self, bundle, widest):
        self.bundle = bundle
        self.wide = sliced_module(bundle, widest).train()
        self.optimiser = torch.optim.SGD(self.wide.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)

    def step(self, width, x, labels):
        thin = self.bundle.source.build(width=width).train()
        wide = self.wide.state_dict()
        for name, value in thin.state_dict().items():
            value.copy_(prefix(wide[name], value))
        loss = torch.nn.functional.cross_entropy(thin(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        for name, parameter in self.wide.named_parameters():
            own = thin.get_parameter(name)
            parameter.grad = torch.zeros_like(parameter)
            prefix(parameter.grad, own).copy_(own.grad)
        for name, buffer in thin.named_buffers():
            prefix(wide[name], buffer).copy_(buffer)
        return loss.item()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("text", TEXTS)
def test_step_by_step_with_pytorch(narrowed, images, text, engine):
    samples = from_arrays(*images, narrowed.manifest)
    covered, step = opened(narrowed, text, engine)
    space = covered.boundary.space(narrowed.manifest)
    task = Task(text, 12, 32, RATE, (WeightDecay(DECAY), Momentum(MOMENTUM)), seed=6)
    local = LocalStep(task.rules, Start(step.parameters, task.steps, RATE), *runs(space, 0))
    expected = TorchOrderedDropout(narrowed, width_of(covered.boundary))
    drawn, losses = set(), []
    for number, (_, indices) in enumerate(batches(len(samples), task.batch, task)):
        x, labels = samples.batch(indices)
        seed = step_seed(task, number)
        boundary = covered.ordered[draw_width(seed, len(covered.ordered))]
        drawn.add(boundary.name)
        losses.append(expected.step(width_of(boundary), x, labels))
        assert step.run(x, labels, seed) == pytest.approx(losses[-1], rel=TOLERANCE)
        results = space.views(step.gradients)
        gradients = {name: parameter.grad.numpy() for name, parameter in expected.wide.named_parameters()}
        largest = max(np.abs(gradient).max() for gradient in gradients.values())
        for name, gradient in gradients.items():  # in front of batch norm a scale has none in theory: noise
            assert np.abs(results[name] - gradient).max() < TOLERANCE * max(np.abs(gradient).max(), 0.01 * largest)
            assert np.array_equal(results[name] == 0, gradient == 0), (number, name)
        local.step(step.gradients, RATE)
        expected.optimiser.step()
        state = expected.wide.state_dict()
        for name, value in space.views(local.x).items():
            assert relative(value, state[name].numpy()) < TOLERANCE, (number, name)
    assert drawn == {boundary.name for boundary in covered.ordered}, "every width was tried"

    # The trainer runs the same.
    source = BundleSource(narrowed.directory, narrowed.manifest)
    trainer = Trainer(narrowed.directory, source, samples, engine=engine)
    outcome = trainer.run(task, Received(narrowed.suffix(covered.boundary.name)))
    assert np.array_equal(outcome.parameters, local.x)
    assert outcome.report.boundary == text
    assert outcome.report.loss == pytest.approx(np.mean(losses), rel=TOLERANCE)


def test_what_the_drawn_width_leaves_out_has_no_gradient_and_keeps_its_statistics(narrowed):
    covered, step = opened(narrowed, TEXTS[0])
    space = covered.boundary.space(narrowed.manifest)
    x, labels = narrowed.batch("conv1", 16)
    step.parameters[space.slice_of("conv1.1.running_mean")] = 7.0
    step.gradients[:] = 99.0  # left by an earlier step
    seed = next(seed for seed in range(100) if draw_width(seed, 3) == 2)
    before = step.parameters.copy()
    step.run(x, labels, seed)
    assert np.array_equal(step.parameters, before)
    found = space.views(step.gradients)
    kernel, mean = found["conv2.0.weight"], found["conv1.1.running_mean"]
    assert kernel.shape == (16, 8, 3, 3)
    assert kernel[:3, :1].any() and not kernel[3:].any() and not kernel[:, 1:].any()
    assert mean[0] != 7.0 and (mean[1:] == 7.0).all()


def test_widths_are_drawn_evenly_and_by_the_seed_alone():
    draws = [draw_width(seed, 3) for seed in range(6000)]
    assert draws == [draw_width(seed, 3) for seed in range(6000)]
    counts = np.bincount(draws, minlength=3)
    assert ((counts - 2000) ** 2 / 2000).sum() < 20  # chi-squared with two degrees of freedom: one in 20,000
    assert {draw_width(seed, 1) for seed in range(100)} == {0}


def test_one_width_is_an_ordinary_step(narrowed):
    _, step = opened(narrowed, "conv1@0.2")
    assert not isinstance(step, OrderedDropoutStep)


def test_everything_in_front_of_a_layer_is_trained_and_nothing_else(digits, samples):
    """The input side: the gradients of the whole model, of which the last layers are not applied."""
    task = Task("..dense", 5, 32, RATE, (WeightDecay(DECAY), Momentum(MOMENTUM)), seed=3)
    trainer = Trainer(digits.directory, BundleSource(digits.directory, digits.manifest), samples)
    outcome = trainer.run(task, Received(digits.suffix("strong")))
    module = digits.module().train()
    front = [p for name, p in module.named_parameters() if name.startswith("conv")]
    optimiser = torch.optim.SGD(front, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    for _, indices in batches(len(samples), task.batch, task):
        x, labels = map(torch.from_numpy, samples.batch(indices))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(x), labels).backward()
        optimiser.step()
    state = module.state_dict()
    for name, value in digits.manifest.space.views(outcome.parameters).items():
        assert relative(value, state[name].numpy()) < TOLERANCE, name
    back = digits.manifest.space.suffix(3)
    assert np.array_equal(outcome.parameters[back], digits.weights[back])
