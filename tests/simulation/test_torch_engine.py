"""The PyTorch engine against the portable one and against plain autograd: loss, every gradient, every statistic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edge_runtime.data import from_arrays  # noqa: E402
from edge_runtime.engine.portable import LayerForward  # noqa: E402
from edge_runtime.layers import BundleSource  # noqa: E402
from edge_runtime.trainer import Received, Trainer  # noqa: E402
from federation.axes.local import Momentum, WeightDecay  # noqa: E402
from federation.coverage import coverage  # noqa: E402
from federation.errors import EmbraceError, InputError  # noqa: E402
from federation.manifest import Boundary, Source  # noqa: E402
from federation.messages import Task  # noqa: E402
from model_export.oracle import TorchOracle  # noqa: E402
from simulation.torch_engine import TorchEngine, TorchStep, one_thread  # noqa: E402
from tests.edge_runtime.conftest import Bundle, relative  # noqa: E402

MODELS = ("digits", "resnet8", "femnist_cnn", "mnist_lr", "mnist_2nn", "imdb_bilstm", "text_transformer")
TOLERANCE = 1e-4
BATCH, SEED = 4, 7


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def engine_of(bundle: Bundle) -> TorchEngine:
    return TorchEngine(bundle.directory, bundle.manifest, np.array(bundle.weights))


def entering(bundle: Bundle, x: np.ndarray, boundary: Boundary) -> np.ndarray:
    for piece in bundle.manifest.frozen(boundary):
        x = LayerForward(bundle.directory / piece.forward.name)(x)
    return x


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Each tensor relative to its own largest element; one that is zero but for rounding, to the largest of all."""
    assert set(found) == set(expected)
    most = max(float(np.abs(value).max()) for value in expected.values())
    for name, value in expected.items():
        own = float(np.abs(value).max())
        scale = own if own > 1e-4 * most else 0.1 * most
        assert float(np.abs(found[name] - value).max()) <= TOLERANCE * max(scale, 1e-6), name


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_portable_engine_and_of_autograd(bundle_of, name):
    bundle = bundle_of(name)
    manifest, engine = bundle.manifest, engine_of(bundle)
    oracle = TorchOracle(bundle.source, manifest, np.array(bundle.weights))
    names = [manifest.boundaries[0].name, *manifest.tiers]
    for boundary in {b.name: b for b in map(manifest.boundary, names)}.values():
        x, labels = bundle.batch(manifest.boundaries[0].name, BATCH, SEED)
        step, portable = engine.torch_step(boundary), bundle.step(boundary.name)
        step.parameters[:] = bundle.weights[step.suffix]
        inputs = entering(bundle, x, boundary)
        loss, other = step.run(inputs, labels, SEED), portable.run(inputs, labels, SEED)
        truth = oracle.step(boundary, x, labels, SEED, np.array(bundle.weights))
        assert loss == pytest.approx(other, rel=TOLERANCE) and loss == pytest.approx(truth.loss, rel=TOLERANCE)
        assert step.kinds == portable.kinds
        for kind, wanted in (("weight", truth.gradients), ("statistic", truth.statistics)):
            if wanted:
                mine = {n: v for n, v in step.results.items() if step.kinds[n] == kind}
                assert_same(mine, wanted)
                assert_same(mine, {n: portable.results[n] for n in mine})
        assert np.array_equal(step.parameters, bundle.weights[step.suffix]), "a step changes nothing but gradients"


@pytest.mark.parametrize("name", ["resnet8", "femnist_cnn"])
def test_a_graph_behind_pytorch_gives_the_same_step(bundle_of, name):
    bundle = bundle_of(name)
    manifest, engine = bundle.manifest, engine_of(bundle)
    boundary = manifest.boundaries[0]
    oracle = TorchOracle(bundle.source, manifest, np.array(bundle.weights))
    step, alone = engine.open_step(boundary), engine.torch_step(boundary)
    for vector in (step.parameters, alone.parameters):
        vector[:] = bundle.weights
    for batch in (BATCH, BATCH + 3, BATCH):
        x, labels = bundle.batch(boundary.name, batch, SEED)
        loss, truth = step.run(x, labels), oracle.step(boundary, x, labels, 0, np.array(bundle.weights))
        assert loss == pytest.approx(alone.run(x, labels), rel=TOLERANCE)
        assert loss == pytest.approx(truth.loss, rel=TOLERANCE)
        assert_same(step.results, truth.gradients | truth.statistics)
        assert_same(step.results, alone.results)
        assert step.gradients.tobytes() != alone.gradients.tobytes(), "the graph did not run"
    assert np.array_equal(step.parameters, bundle.weights), "a step changes nothing but gradients"


def test_a_model_that_cannot_be_cut_trains_by_pytorch_alone(bundle_of, monkeypatch):
    bundle = bundle_of("resnet8")
    engine, boundary = engine_of(bundle), bundle.manifest.boundaries[0]

    def refuse(*_):
        raise EmbraceError("PyTorch cannot cut it")

    monkeypatch.setattr("simulation.torch_model._place", refuse)
    assert set(dict(engine.open_step(boundary)._module.named_parameters())) > {"fc.weight"}


def test_a_second_run_does_not_remember_the_first(bundle_of):
    bundle = bundle_of("digits")
    step = engine_of(bundle).torch_step(bundle.manifest.boundary("moderate"))
    step.parameters[:] = bundle.weights[step.suffix]
    x, labels = bundle.batch("moderate", BATCH)
    first, gradients = step.run(x, labels), step.gradients.copy()
    assert step.run(*bundle.batch("moderate", BATCH + 3, 1)) != first
    assert step.run(x, labels) == first and np.array_equal(step.gradients, gradients)


@pytest.mark.parametrize("name", ["resnet8", "femnist_cnn", "imdb_bilstm"])
def test_frozen_layers_give_what_they_give_on_a_device(bundle_of, name):
    bundle = bundle_of(name)
    boundary = bundle.manifest.boundary("weak")
    x, _ = bundle.batch(bundle.manifest.boundaries[0].name, BATCH)
    front = engine_of(bundle).frozen_part(boundary)
    with torch.no_grad():
        assert relative(front(torch.from_numpy(x)).numpy(), entering(bundle, x, boundary)) < TOLERANCE


@pytest.mark.parametrize("boundary", ["conv1", "moderate", "weak"])
def test_a_task_in_the_trainer_is_that_of_the_portable_engine(bundle_of, images, boundary):
    bundle = bundle_of("digits")
    samples = from_arrays(*images, bundle.manifest)
    task = Task(boundary, 10, 32, 0.05, (WeightDecay(1e-4), Momentum(0.9)), seed=5)
    outcomes = []
    for engine in (engine_of(bundle), "portable"):
        trainer = Trainer(bundle.directory, BundleSource(bundle.directory, bundle.manifest), samples, engine=engine)
        outcomes.append(trainer.run(task, Received(bundle.suffix(boundary))))
    found, expected = outcomes
    assert (found.report.engine, expected.report.engine) == ("torch", "portable")
    assert found.report.loss == pytest.approx(expected.report.loss, rel=1e-4)
    assert relative(found.local.update(), expected.local.update()) < 1e-3


@pytest.mark.parametrize("covered", ["conv1@0.5", "conv1@0.5|conv1@0.25", "..conv3"])
def test_widths_and_the_front_of_the_model_are_those_of_the_portable_engine(narrow, images, covered):
    samples = from_arrays(*images, narrow.manifest)
    task = Task(covered, 6, 32, 0.05, (WeightDecay(1e-4), Momentum(0.9)), seed=5)
    found, expected = (
        Trainer(narrow.directory, BundleSource(narrow.directory, narrow.manifest), samples, engine=engine)
        for engine in (engine_of(narrow), "portable")
    )
    boundary = coverage(narrow.manifest, covered).boundary
    start = np.random.default_rng(0).random(boundary.space(narrow.manifest).size, np.float32) * 0.1
    mine, theirs = (trainer.run(task, Received(start)) for trainer in (found, expected))
    assert mine.report.loss == pytest.approx(theirs.report.loss, rel=1e-4)
    assert relative(mine.local.update(), theirs.local.update()) < 1e-3


def test_the_score_is_that_of_the_global_weights_as_they_are(bundle_of, images):
    bundle = bundle_of("digits")
    weights = np.array(bundle.weights)
    engine = TorchEngine(bundle.directory, bundle.manifest, weights)
    samples = from_arrays(*images, bundle.manifest)
    first = engine.score(samples)
    with torch.no_grad():
        predicted = bundle.module().eval()(torch.from_numpy(images[0])).numpy()
    assert first.accuracy == pytest.approx(float((predicted.argmax(1) == images[1]).mean()))
    weights *= 0.5
    assert engine.score(samples).loss != first.loss


def test_an_onnx_file_is_no_module(bundle_of):
    bundle = bundle_of("digits")
    manifest = replace(bundle.manifest, source=Source("onnx", "model.onnx"))
    with pytest.raises(InputError, match="ONNX file"):
        TorchEngine(bundle.directory, manifest, np.array(bundle.weights)).open_step(manifest.boundaries[0])


def test_a_model_that_changed_since_the_export_is_refused(bundle_of):
    bundle = bundle_of("digits")
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(EmbraceError, match="changed since the export"):
        TorchStep(other, bundle.manifest, bundle.manifest.boundaries[0])
