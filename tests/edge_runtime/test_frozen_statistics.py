"""Statistics of batch norms that a device does not train: measured as PyTorch sees them, reported as training does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_runtime.forward import ForwardPlan
from edge_runtime.frozen_statistics import FrozenStatistics
from edge_runtime.graph_check import check_forward_graph
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer
from federation.axes.local import Momentum
from federation.coverage import STATISTICS, coverage
from federation.errors import BundleError, UnsafeGraph
from federation.exchange import measured_region
from federation.manifest import dumps, loads
from federation.messages import Task
from tests.edge_runtime.conftest import Bundle, RecordingSource, relative

torch = pytest.importorskip("torch")
TASK = Task(f"dense{STATISTICS}", 4, 16, 0.05, (Momentum(0.9),), seed=3)


def trainer_of(bundle: Bundle, samples, **more) -> Trainer:
    return Trainer(bundle.directory, BundleSource(bundle.directory, bundle.manifest), samples, **more)


def seen_by_torch(bundle: Bundle, x: np.ndarray, layers: int) -> dict[str, np.ndarray]:
    """Mean and unbiased variance of what enters the batch norms of the first layers, all samples at once."""
    module, found = bundle.module().eval(), {}
    own = {p.name for layer in bundle.manifest.layers[:layers] for p in layer.parameters}

    def watch(path):
        def hook(part, given):
            channels = given[0].double().transpose(0, 1).flatten(1)
            found[f"{path}.running_mean"] = channels.mean(1).numpy()
            found[f"{path}.running_var"] = channels.var(1).numpy()

        return hook

    for path, part in module.named_modules():
        if isinstance(part, torch.nn.BatchNorm2d) and f"{path}.running_mean" in own:
            part.register_forward_pre_hook(watch(path))
    with torch.inference_mode():
        module(torch.from_numpy(x))
    return found


def reported(bundle: Bundle, task: Task, measured: np.ndarray) -> dict[str, np.ndarray]:
    """What was reported, by name."""
    region, places, done = measured_region(bundle.manifest, coverage(bundle.manifest, task.boundary)), {}, 0
    for piece in (piece for layer in region.layers for piece in layer):
        places[piece.parameter.name] = measured[done : done + piece.size]
        done += piece.size
    assert done == measured.size
    return places


@pytest.mark.parametrize("batch", [7, 64])
@pytest.mark.parametrize("memory", [None, 1])
def test_what_is_reported_is_what_pytorch_sees(digits, samples, batch, memory):
    plan = ForwardPlan(batch=batch, memory=memory)
    outcome = trainer_of(digits, samples, plan=plan).run(TASK, Received(digits.suffix("dense")))
    expected = seen_by_torch(digits, samples.batch(np.arange(len(samples)))[0], 3)
    found, old = reported(digits, TASK, outcome.measured), digits.manifest.space.views(np.array(digits.weights))
    assert set(found) == set(expected) and len(found) == 6
    for name, values in found.items():
        assert relative(values, (1 - 0.9**4) * (expected[name] - old[name])) < 1e-5, name


def test_a_device_that_trains_the_layer_on_all_its_data_at_once_reports_the_same(digits, samples):
    """The first batch norm: what enters those behind it depends on how the ones in front normalise."""
    task = replace(TASK, boundary="conv1", batch=len(samples), rate=1e-9)
    trained = trainer_of(digits, samples).run(task, Received(digits.suffix("conv1"))).local.update()
    measured = trainer_of(digits, samples).run(TASK, Received(digits.suffix("dense"))).measured
    names = ["conv1.1.running_mean", "conv1.1.running_var"]
    for name in names:
        expected = trained[digits.manifest.space.slice_of(name)]
        assert relative(reported(digits, TASK, measured)[name], expected) < 1e-4


def test_parts_of_a_batch_move_statistics_each(digits, samples):
    found = [
        trainer_of(digits, samples).run(replace(TASK, micro_batch=parts), Received(digits.suffix("dense"))).measured
        for parts in (None, 4)
    ]
    assert relative(found[1] * (1 - 0.9**4), found[0] * (1 - 0.9**16)) < 1e-6


def summed(bundle: Bundle, means: np.ndarray, variances: np.ndarray, at_once: int) -> np.ndarray:
    """What one move reports if the same rows enter every batch norm, so many at once."""
    sums = FrozenStatistics(bundle.manifest, coverage(bundle.manifest, TASK.boundary))
    for layer, (norm,) in sums.norms.items():
        sums.begin(layer, np.array(bundle.weights).__getitem__)
        channels = bundle.manifest.space.slice_of(norm.mean)
        shape = len(means), channels.stop - channels.start
        for start in range(0, len(means), at_once):
            parts = (np.resize(rows, shape)[start : start + at_once] for rows in (means, variances))
            sums.add(norm, *parts)
    return sums.update(1)


def test_batches_change_no_bit_of_the_sums(digits):
    rows = np.random.default_rng(0).random((2, 50, 8)).astype(np.float32)
    expected = summed(digits, *rows, at_once=50)
    assert all((summed(digits, *rows, at_once=size) == expected).all() for size in (1, 7, 49))


def test_far_from_the_old_mean_no_digit_is_lost(digits):
    means = (1000 + np.random.default_rng(1).standard_normal((400, 8))).astype(np.float32)
    found = reported(digits, TASK, summed(digits, means, np.zeros_like(means), at_once=32))
    (norm,) = digits.manifest.layers[0].measuring.norms
    old = digits.manifest.space.views(np.array(digits.weights))[norm.variance]
    count = 400 * norm.positions
    expected = means.astype(np.float64).var(0) * count / (count - 1)
    assert relative(found[norm.variance] / 0.1 + old, expected) < 1e-5


def test_activations_that_are_still_good_have_their_statistics(digits, samples):
    source = RecordingSource(digits)
    trainer = Trainer(digits.directory, source, samples)
    plain = trainer.run(replace(TASK, boundary="dense"), Received(digits.suffix("dense")))
    assert plain.measured.size == 0
    first = trainer.run(TASK, Received(digits.suffix("dense"))).measured  # what was stored had none
    passes = len(source.fetched)
    again = trainer.run(TASK, Received(digits.suffix("dense"))).measured
    assert len(source.fetched) == passes == 6 and (again == first).all() and first.any()


def test_training_behind_is_the_same_but_for_rounding(digits, samples):
    plain = trainer_of(digits, samples).run(replace(TASK, boundary="dense"), Received(digits.suffix("dense")))
    measuring = trainer_of(digits, samples).run(TASK, Received(digits.suffix("dense")))
    assert relative(measuring.parameters, plain.parameters) < 1e-5


def test_the_manifest_keeps_what_measures_and_refuses_strange_names(digits):
    text = dumps(digits.manifest)
    assert loads(text) == digits.manifest
    with pytest.raises(BundleError, match="expected statistics of the layer"):
        loads(text.replace('"mean": "conv2.1.running_mean"', '"mean": "conv1.1.running_mean"'))
    with pytest.raises(BundleError, match="expected a momentum above 0"):
        loads(text.replace('"momentum": 0.1', '"momentum": 0.0', 1))


def test_a_graph_that_measures_is_checked_like_any_other(digits):
    layer = digits.manifest.layers[0]
    check_forward_graph(digits.directory / layer.graph(True).name, digits.manifest, layer, measuring=True)
    with pytest.raises(UnsafeGraph, match="outputs are not those of the manifest"):
        check_forward_graph(digits.directory / layer.forward.name, digits.manifest, layer, measuring=True)
    with pytest.raises(UnsafeGraph, match="outputs are not those of the manifest"):
        check_forward_graph(digits.directory / layer.graph(True).name, digits.manifest, layer)
