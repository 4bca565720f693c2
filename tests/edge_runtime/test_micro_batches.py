"""A batch that goes through in parts: the same round in PyTorch, with AdamW and clipped gradients."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.data import from_arrays
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer, batches
from federation.axes.local import AdamW, Momentum
from federation.messages import Task
from tests.edge_runtime.conftest import ENGINES, relative

torch = pytest.importorskip("torch")


def torch_round(bundle, samples, task):
    """Accumulate gradients as a user of PyTorch does; batch norm sees one part after the other."""
    module = bundle.module().train()
    layers = bundle.manifest.layers[: bundle.manifest.boundary(task.boundary).layer]
    frozen = {p.name.rpartition(".")[0] for layer in layers for p in layer.parameters}
    for path in frozen:
        module.get_submodule(path).eval().requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimiser, losses = torch.optim.AdamW(trained, lr=task.rate), []
    for _, indices in batches(len(samples), task.batch, task):
        optimiser.zero_grad()
        total = 0.0
        for start in range(0, task.batch, task.at_once):
            part = indices[start : start + task.at_once]
            x, labels = map(torch.from_numpy, samples.batch(part))
            loss = torch.nn.functional.cross_entropy(module(x), labels) * len(part) / task.batch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, task.clip_norm)
        optimiser.step()
        losses.append(total)
    return losses, {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("micro_batch", [8, 12, 32])  # 12, 12 and 8; all at once
def test_a_round_in_parts_is_pytorchs(digits, images, engine, micro_batch):
    samples = from_arrays(*images, digits.manifest)
    task = Task("moderate", 6, 32, 1e-3, (AdamW(),), seed=5, clip_norm=0.5, micro_batch=micro_batch)
    losses, state = torch_round(digits, samples, task)
    trainer = Trainer(digits.directory, BundleSource(digits.directory, digits.manifest), samples, engine=engine)
    outcome = trainer.run(task, Received(digits.suffix("moderate")))
    assert outcome.report.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert outcome.report.last_loss == pytest.approx(losses[-1], rel=1e-4)
    layer = digits.manifest.boundary("moderate").layer
    views = digits.manifest.space.views(outcome.parameters, start=digits.manifest.space.suffix(layer).start)
    for name, found in views.items():
        assert relative(found, state[name]) < 2e-4, name


def test_fewer_samples_than_a_part(digits, images):
    samples = from_arrays(*(part[:5] for part in images), digits.manifest)
    trainer = Trainer(digits.directory, BundleSource(digits.directory, digits.manifest), samples)
    found = [
        trainer.run(
            Task("weak", 2, 32, 0.1, (Momentum(0.9),), micro_batch=size), Received(digits.suffix("weak"))
        ).parameters.copy()
        for size in (None, 8, 2)
    ]
    assert np.array_equal(found[0], found[1])
    assert relative(found[2], found[0]) < 1e-5


@pytest.mark.parametrize("micro_batch", [1, 3, 20])
def test_parts_count_by_the_labels_that_are_not_ignored(tmp_path, micro_batch):
    import embrace

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 6)).astype(np.float32), rng.integers(0, 3, 40)
    y[rng.permutation(40)[:33]] = -100
    bundle = embrace.export(torch.nn.Linear(6, 3), sample=x, ignore_index=-100)
    samples = from_arrays(x, y, bundle.manifest)
    found = []
    for size in (None, micro_batch):
        trainer = Trainer(bundle.path, BundleSource(bundle.path, bundle.manifest), samples)
        start = np.concatenate([value.ravel() for value in bundle.state_dict().values()])
        outcome = trainer.run(Task(bundle.manifest.whole.name, 1, 40, 0.5, (), micro_batch=size), Received(start))
        found.append((outcome.parameters.copy(), outcome.report.loss))
    assert relative(found[1][0], found[0][0]) < 1e-6 and found[1][1] == pytest.approx(found[0][1], rel=1e-6)
