"""Narrow boundaries on a device: a round is PyTorch's with sliced weights; memory never chooses one by itself."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.budget import allow, largest_fitting, parse_size
from edge_runtime.data import from_arrays
from edge_runtime.fine_tune import Settled, fine_tune
from edge_runtime.layers import BundleSource
from edge_runtime.measure import Case, measure_here
from edge_runtime.memory import current_memory
from edge_runtime.trainer import Received, Trainer, batches
from federation.axes.local import Momentum, WeightDecay
from federation.capacity import predicted_memory, predicted_peak
from federation.errors import InputError, OutOfMemory
from federation.messages import Task
from federation.schedule import parse_schedule
from tests.edge_runtime.conftest import ENGINES, relative, sliced_module

torch = pytest.importorskip("torch")
RULES = (WeightDecay(1e-4), Momentum(0.9))


def _room(size: str) -> str:
    """A budget of so much beside this process, which has the memory of all tests before it."""
    now = current_memory()
    return str(parse_size(size) + (now.anonymous if now else 0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("width", [0.45, 0.2])
def test_a_round_is_pytorchs_with_sliced_weights(narrowed, images, width, engine):
    samples = from_arrays(*images, narrowed.manifest)
    task = Task(f"conv1@{width}", 6, 32, 0.05, RULES, seed=4)
    module = sliced_module(narrowed, width).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = []
    for _, indices in batches(len(samples), task.batch, task):
        x, labels = map(torch.from_numpy, samples.batch(indices))
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    source = BundleSource(narrowed.directory, narrowed.manifest)
    trainer = Trainer(narrowed.directory, source, samples, engine=engine)
    outcome = trainer.run(task, Received(narrowed.suffix(task.boundary)))
    assert outcome.report.boundary == task.boundary
    assert outcome.report.loss == pytest.approx(np.mean(losses), rel=2e-5)
    space = narrowed.manifest.boundary(task.boundary).space(narrowed.manifest)
    assert outcome.parameters.size == space.size < narrowed.manifest.space.size
    state = module.state_dict()
    for name, value in space.views(outcome.parameters).items():
        assert relative(value, state[name].numpy()) < 2e-5, name


def test_a_vector_of_the_wide_model_is_refused(narrowed, samples):
    trainer = Trainer(narrowed.directory, BundleSource(narrowed.directory, narrowed.manifest), samples)
    with pytest.raises(InputError, match="parameters"):
        trainer.run(Task("conv1@0.2", 1, 8, 0.1), Received(np.array(narrowed.weights)))


def test_memory_chooses_narrow_boundaries_only_if_they_are_named(narrowed, tmp_path):
    manifest = narrowed.manifest
    least = predicted_peak(manifest, manifest.boundary("classifier"), 32)
    for room in range(least, predicted_peak(manifest, manifest.boundary("conv1"), 32) + 20_000, 20_000):
        assert largest_fitting(manifest, 32, room, None)[0].narrow is None
    with pytest.raises(OutOfMemory, match="the smallest, 'classifier'"):
        largest_fitting(manifest, 32, least - 1, None)
    told = dict(batch=32, samples=10, memory=_room("500MB"), work=tmp_path, try_out=False)
    assert allow(narrowed.directory, manifest, **told).boundary.name == "conv1"
    named = allow(narrowed.directory, manifest, boundary="conv1@0.2", **told)
    assert named.boundary.width == 0.2
    assert named.needed < predicted_peak(manifest, manifest.boundary("conv1@0.45"), 32)


def test_predicted_memory_follows_the_width(narrowed):
    needs = [predicted_memory(narrowed.manifest, b).total for b in narrowed.manifest.boundaries if b.layer == 0]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 4


def test_a_narrow_boundary_is_measured(narrowed):
    found = measure_here(Case(str(narrowed.directory), "conv1@0.2", batch=8, iterations=1, divide=False))
    assert len(found.training) == 1 and not found.forward_compute


def test_one_device_alone_does_not_train_a_part_of_the_channels(narrowed, samples, tmp_path):
    allowance = allow(
        narrowed.directory,
        narrowed.manifest,
        batch=8,
        samples=10,
        memory=_room("500MB"),
        boundary="conv1@0.2",
        work=tmp_path,
        try_out=False,
    )
    settled = Settled(Task("conv1@0.2", 1, 8, 0.1), parse_schedule("0.1"))
    with pytest.raises(InputError, match=r"'conv1@0.2' has a part of the channels"):
        fine_tune(
            narrowed.directory,
            narrowed.manifest,
            samples,
            None,
            settled,
            allowance,
            num_rounds=1,
            checkpoint=tmp_path / "c",
        )
