"""Devices that are stacked get what each of them gets alone but for rounding, whichever the others are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

# ruff: noqa: E402
torch = pytest.importorskip("torch")

import warnings

from torch import nn

from edge_runtime.data import from_arrays
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer
from federation.axes.local import AdamW, ControlVariate, Momentum, Proximal, ServerMomentum, WeightDecay
from federation.coverage import coverage
from federation.errors import EmbraceError, NonFiniteLoss
from federation.messages import Task
from model_export.source import load_source
from simulation.kept_trainers import KeptTrainers
from simulation.shared_samples import SharedSamples, convert
from simulation.stacked_trainer import StackedTrainer
from simulation.torch_engine import TorchEngine, one_thread
from tests.edge_runtime.conftest import Bundle, relative

RULES = (WeightDecay(1e-3), Momentum(0.9))
# (model, boundary): dense layers; convolutions and batch norm; frozen layers in front
CASES = [("mnist_lr", "first"), ("mnist_2nn", "hidden1"), ("digits", "conv1"), ("digits", "weak")]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def trainer_of(bundle: Bundle) -> StackedTrainer:
    engine = TorchEngine(bundle.directory, bundle.manifest, np.array(bundle.weights))
    return StackedTrainer(engine, BundleSource(bundle.directory, bundle.manifest), KeptTrainers())


def devices(bundle: Bundle, count: int, seed: int = 0, size: int = 40) -> list[SharedSamples]:
    rng = np.random.default_rng(seed)
    x = rng.random((count * size, *bundle.manifest.input.shape), np.float32)
    inputs, labels = convert(from_arrays(x, rng.integers(0, 10, count * size), bundle.manifest))
    return [SharedSamples(inputs, labels, np.arange(i * size, (i + 1) * size)) for i in range(count)]


def starts(bundle: Bundle, boundary: str, count: int, *, with_vectors: bool = False) -> list[Received]:
    """Slightly different weights for every device, as devices that keep some of theirs have."""
    found = []
    for number in range(count):
        rng = np.random.default_rng(number)
        x = bundle.suffix(boundary)

        def small(like=x, rng=rng):
            return (1e-3 * rng.standard_normal(like.size)).astype(np.float32)

        names = ("momentum", "control", "server_momentum") if with_vectors else ()
        brought = {name: small() for name in names}
        found.append(Received(x + np.abs(small()), brought))
    return found


def alone(bundle: Bundle, task: Task, start: Received, samples) -> object:
    engine = TorchEngine(bundle.directory, bundle.manifest, np.array(bundle.weights))
    source = BundleSource(bundle.directory, bundle.manifest)
    return Trainer(bundle.directory, source, samples, engine=engine).run(task, start)


def first_boundary(bundle: Bundle, boundary: str) -> str:
    names = [b.name for b in bundle.manifest.boundaries]
    return boundary if boundary in names or boundary in bundle.manifest.tiers else names[0]


@pytest.mark.parametrize(("name", "boundary"), CASES)
def test_each_device_gets_what_it_gets_alone(bundle_of, name, boundary):
    bundle = bundle_of(name)
    boundary = first_boundary(bundle, boundary)
    tasks = [Task(boundary, 5, 16, 0.05, RULES, seed=number) for number in range(4)]
    received, samples = starts(bundle, boundary, 4), devices(bundle, 4)
    outcomes = trainer_of(bundle).train(tasks, received, samples)
    for task, start, data, outcome in zip(tasks, received, samples, outcomes, strict=True):
        expected = alone(bundle, task, start, data)
        assert outcome.report.seconds["together"] == 4, "the devices were not trained together"
        assert outcome.report.loss == pytest.approx(expected.report.loss, rel=1e-5)
        assert outcome.report.last_loss == pytest.approx(expected.report.last_loss, rel=1e-4)
        assert relative(outcome.local.update(), expected.local.update()) < 1e-4
        assert relative(outcome.parameters, expected.parameters) < 1e-5
        assert relative(outcome.local.state()["momentum"], expected.local.state()["momentum"]) < 1e-3
        assert outcome.local.rates == expected.local.rates


@pytest.mark.parametrize(("name", "boundary"), CASES[1:3])
def test_every_device_has_a_norm_and_moments_of_its_own(bundle_of, name, boundary):
    bundle = bundle_of(name)
    tasks = [Task(boundary, 4, 16, 1e-3, (AdamW(between="keep"),), seed=n, clip_norm=0.5) for n in range(5)]
    received, samples = starts(bundle, boundary, 5), devices(bundle, 5)
    moments = {"first_moment": received[0].parameters * 1e-3, "second_moment": np.abs(received[0].parameters) * 1e-3}
    received = [replace(start, brought=moments, steps_before=9) for start in received]
    outcomes = trainer_of(bundle).train(tasks, received, samples)
    for task, start, data, outcome in zip(tasks, received, samples, outcomes, strict=True):
        expected = alone(bundle, task, start, data)
        assert outcome.report.seconds["together"] == 5
        assert relative(outcome.parameters, expected.parameters) < 1e-5
        for name, vector in expected.local.state().items():
            assert relative(outcome.local.state()[name], vector) < 1e-3
        loose = alone(bundle, replace(task, clip_norm=None), start, data)
        assert relative(loose.parameters, expected.parameters) > 1e-5, "nothing was clipped"


def test_devices_with_different_numbers_of_steps_are_no_stack(bundle_of):
    bundle = bundle_of("mnist_lr")
    boundary = bundle.manifest.boundaries[0].name
    tasks = [Task(boundary, 1, 16, 1e-3, (AdamW(between="keep"),), seed=n) for n in range(6)]
    received = [replace(start, steps_before=n) for n, start in enumerate(starts(bundle, boundary, 6))]
    outcomes = trainer_of(bundle).train(tasks, received, devices(bundle, 6))
    assert not any("together" in outcome.report.seconds for outcome in outcomes)


@pytest.mark.parametrize(("name", "boundary"), CASES)
def test_the_size_of_a_stack_and_its_other_members_change_nothing_but_rounding(bundle_of, name, boundary):
    bundle = bundle_of(name)
    boundary = first_boundary(bundle, boundary)
    trainer, received = trainer_of(bundle), starts(bundle, boundary, 16)
    samples, others = devices(bundle, 16), devices(bundle, 16, seed=9)
    tasks = [Task(boundary, 4, 10, 0.05, RULES, seed=number) for number in range(16)]
    expected = alone(bundle, tasks[2], received[2], samples[2]).parameters
    for company in ([0, 1, 3], [4, 3, 0], [1] * 6, [*range(2), *range(3, 16)]):
        places = [2, *company]
        data = [samples[2], *(others[place] for place in company)]
        found = trainer.train([tasks[p] for p in places], [received[p] for p in places], data)
        assert found[0].report.seconds["together"] == len(places)
        assert relative(found[0].parameters, expected) < 1e-5


def test_the_same_stack_gives_the_same_bits(bundle_of):
    bundle = bundle_of("digits")
    tasks = [Task("conv1", 3, 16, 0.05, RULES, seed=number) for number in range(5)]
    received, samples = starts(bundle, "conv1", 5), devices(bundle, 5)
    kept = []  # memory that is in use moves what comes next to other places
    expected = trainer_of(bundle).train(tasks, received, samples)
    for size in (3, 40, 1000):
        kept.append(np.zeros(size))
        found = trainer_of(bundle).train(tasks, received, [replace(data) for data in samples])
        for mine, first in zip(found, expected, strict=True):
            assert np.array_equal(mine.parameters, first.parameters)


class Odd(nn.Flatten):
    """Has an operator without a rule for stacks, or with a slow one, which PyTorch warns about."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "no rule":
            raise RuntimeError("vmap: there is no batching rule")
        if self.how == "slow":
            warnings.warn("There is a performance drop: we have not implemented the batching rule for x.", stacklevel=1)
        if self.how == "processor":
            warnings.warn("Could not initialize NNPACK! Reason: Unsupported hardware.", stacklevel=1)
        return super().forward(x)


@pytest.mark.parametrize(("how", "stacks"), [("", True), ("no rule", False), ("slow", False), ("processor", True)])
def test_what_pytorch_cannot_stack_is_trained_one_by_one(bundle_of, monkeypatch, how, stacks):
    """What only this processor lacks is no reason: the same devices are stacked everywhere."""
    bundle = bundle_of("mnist_lr")
    boundary = bundle.manifest.boundaries[0].name
    monkeypatch.setattr(TorchEngine, "trained_part", lambda *_: nn.Sequential(Odd(how), nn.Linear(784, 10)))
    trainer, tasks = trainer_of(bundle), [Task(boundary, 1, 8, 0.05)] * 4
    if how == "no rule":  # devices are trained one by one, which this model cannot either
        with pytest.raises(EmbraceError, match="no batching rule"):
            trainer.train(tasks, starts(bundle, boundary, 4), devices(bundle, 4))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trainer.train(tasks, starts(bundle, boundary, 4), devices(bundle, 4))
    assert all(("together" in outcome.report.seconds) == stacks for outcome in found)


def test_every_vector_of_a_task_reaches_its_own_device(bundle_of):
    bundle = bundle_of("mnist_2nn")
    rules = (Proximal(0.1), ControlVariate(), Momentum(0.5), ServerMomentum(0.9, "before"))
    tasks = [Task("hidden1", 4, 16, 0.05, rules, seed=number) for number in range(4)]
    received, samples = starts(bundle, "hidden1", 4, with_vectors=True), devices(bundle, 4)
    outcomes = trainer_of(bundle).train(tasks, received, samples)
    for task, start, data, outcome in zip(tasks, received, samples, outcomes, strict=True):
        expected = alone(bundle, task, start, data)
        assert outcome.report.seconds["together"] == 4
        assert relative(outcome.local.update(), expected.local.update()) < 1e-4


def test_devices_that_differ_are_sorted_out_and_answers_keep_their_order(bundle_of):
    bundle = bundle_of("mnist_2nn")
    kinds = ["hidden1", "weak", "hidden1", "weak", "moderate", "weak", "weak"]
    tasks = [Task(kind, 3, 16, 0.05, RULES, seed=number) for number, kind in enumerate(kinds)]
    received = [starts(bundle, kind, 1)[0] for kind in kinds]
    samples = devices(bundle, 7)
    samples[2] = SharedSamples(samples[2].inputs, samples[2].all_labels, samples[2].numbers[:9])  # a smaller batch
    outcomes = trainer_of(bundle).train(tasks, received, samples)
    assert ["together" in o.report.seconds for o in outcomes] == [kind == "weak" for kind in kinds]
    for task, start, data, outcome in zip(tasks, received, samples, outcomes, strict=True):
        assert relative(outcome.parameters, alone(bundle, task, start, data).parameters) < 1e-5


@pytest.mark.parametrize("covered", ["conv1@0.5", "..conv3"])
def test_widths_and_the_front_of_the_model(narrow, covered):
    tasks = [Task(covered, 3, 16, 0.05, RULES, seed=number) for number in range(4)]
    size = coverage(narrow.manifest, covered).boundary.space(narrow.manifest).size
    start = Received(np.random.default_rng(0).random(size, np.float32) * 0.1)
    samples = devices(narrow, 4)
    for task, data, outcome in zip(tasks, samples, trainer_of(narrow).train(tasks, [start] * 4, samples)):
        assert outcome.report.seconds["together"] == 4 and outcome.report.boundary == covered
        assert relative(outcome.parameters, alone(narrow, task, start, data).parameters) < 1e-5


def test_augmented_images_are_each_devices_own(bundle_of):
    bundle = bundle_of("digits")
    tasks = [Task("conv1", 3, 16, 0.05, RULES, seed=number, crop=1, flip=True) for number in range(4)]
    received, samples = starts(bundle, "conv1", 4), devices(bundle, 4)
    outcomes = trainer_of(bundle).train(tasks, received, samples)
    for task, start, data, outcome in zip(tasks, received, samples, outcomes, strict=True):
        assert relative(outcome.parameters, alone(bundle, task, start, data).parameters) < 1e-5


def test_a_device_that_diverges_does_not_harm_the_others(bundle_of):
    bundle = bundle_of("mnist_lr")
    boundary = bundle.manifest.boundaries[0].name
    tasks = [Task(boundary, 3, 16, 0.05, seed=number) for number in range(4)]
    received, samples = starts(bundle, boundary, 4), devices(bundle, 4)
    sound = trainer_of(bundle).train(tasks, received, samples)
    received[1] = Received(np.full_like(received[1].parameters, np.nan))
    found = trainer_of(bundle).train(tasks, received, samples)
    assert isinstance(found[1], NonFiniteLoss) and "nan" in str(found[1])
    for place in (0, 2, 3):
        assert relative(found[place].parameters, sound[place].parameters) < 1e-6


def test_large_models_and_dropout_are_trained_one_by_one(bundle_of):
    for name, boundary in (("resnet8", "stem"), ("text_transformer", "weak")):
        bundle = bundle_of(name)
        task = Task(boundary, 1, 2, 0.01)
        count = bundle.manifest.output.shape[0]
        data = from_arrays(load_source(name).sample(8), np.arange(8) % count, bundle.manifest)
        outcomes = trainer_of(bundle).train([task] * 4, [Received(bundle.suffix(boundary))] * 4, [data] * 4)
        assert all("together" not in outcome.report.seconds for outcome in outcomes)
        assert relative(outcomes[0].parameters, outcomes[1].parameters) < 1e-6
