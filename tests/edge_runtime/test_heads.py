"""A device that trains the last steps of a recurrent layer: the steps before run once per version and are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.budget import Allowance
from edge_runtime.bundle_files import file_ref, map_weights, read_manifest
from edge_runtime.data import from_arrays
from edge_runtime.engine.engine import OnnxEngine
from edge_runtime.engine.portable import LayerForward
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.fine_tune import Settled, fine_tune
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource, TrainedSource
from edge_runtime.remote import RemoteBundle, RemoteSource
from edge_runtime.timing import Stopwatch
from edge_runtime.trainer import Received, Trainer
from federation.capacity import forward_macs, predicted_peak, training_macs
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, Manifest
from federation.messages import Task, TaskOffer
from federation.schedule import parse_schedule
from federation.weights import header

TEXT = Path(__file__).parents[1] / "golden" / "files" / "text"
SHORT = "lstm@2"
OFFER = TaskOffer("job-0-0-1", "job", "bundle", 4, 0.0, {})
TASK = Task(SHORT, 6, 4, 0.1, seed=3)


@pytest.fixture
def manifest() -> Manifest:
    return read_manifest(TEXT)


@pytest.fixture
def samples(manifest):
    rng = np.random.default_rng(0)
    return from_arrays(rng.integers(1, 20, (12, 7)), rng.integers(0, 2, 12), manifest)


def suffix(manifest: Manifest) -> np.ndarray:
    where = manifest.space.suffix(manifest.boundary(SHORT).layer)
    return np.array(map_weights(TEXT / manifest.weights.name, manifest.space)[where])


class Counted(BundleSource):
    """A bundle directory that counts how often the head was asked for."""

    heads = 0

    def fetch_head(self, boundary):
        self.heads += 1
        return super().fetch_head(boundary)


def test_the_first_steps_run_once_per_version(manifest, samples):
    source = Counted(TEXT, manifest)
    trainer = Trainer(TEXT, source, samples)
    first = trainer.run(TASK, Received(suffix(manifest)))
    assert source.heads == 1 and first.report.steps == 6
    row = manifest.boundary(SHORT).head.output.shape[0]
    assert first.report.bytes["stored_activations"] == 12 * row * 4
    trainer.run(replace(TASK, round=1), Received(suffix(manifest)))
    assert source.heads == 1, "the same weights give the same states"
    source.version = "another"
    trainer.run(replace(TASK, round=2), Received(suffix(manifest)))
    assert source.heads == 2


def test_what_another_boundary_stored_is_of_no_use(manifest, samples):
    """The classifier's own activations lie behind the same embedding; whichever came first, each is as if alone."""
    source = BundleSource(TEXT, manifest)
    trainer = Trainer(TEXT, source, samples)
    last = manifest.space.suffix(manifest.boundary("classifier").layer)
    classifier = np.array(map_weights(TEXT / manifest.weights.name, manifest.space)[last])
    trainer.run(replace(TASK, boundary="classifier"), Received(classifier))
    found = trainer.run(TASK, Received(suffix(manifest))).parameters.copy()
    alone = Trainer(TEXT, source, samples).run(TASK, Received(suffix(manifest))).parameters
    assert np.array_equal(found, alone)


def test_a_device_that_trains_alone_runs_the_first_steps_with_what_it_trained(manifest, samples, tmp_path):
    allowance = Allowance(
        manifest.boundary(SHORT), "portable", RuntimeSettings(), ForwardPlan(), 1 << 30, "asked for", 0, 0, None
    )
    settled = Settled(TASK, parse_schedule("0.1"))
    found, _ = fine_tune(TEXT, manifest, samples, None, settled, allowance, num_rounds=3, checkpoint=tmp_path / "kept")
    weights = suffix(manifest)
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = TrainedSource(TEXT, manifest, 0, everything(manifest, weights), folder)
        weights = Trainer(TEXT, source, samples).run(replace(TASK, round=number), Received(weights)).parameters.copy()
    assert np.array_equal(found, weights)


def everything(manifest: Manifest, trained: np.ndarray) -> np.ndarray:
    vector = np.array(map_weights(TEXT / manifest.weights.name, manifest.space))
    vector[manifest.space.suffix(manifest.boundary(SHORT).layer)] = trained
    return vector


class Elsewhere:
    """A coordinator's files, without a network; counts the weights that are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def manifest(self, bundle: str) -> bytes:
        return (TEXT / MANIFEST_NAME).read_bytes()

    def save_graph(self, sha256: str, path: Path, size: int) -> None:
        name = next(file.name for file in read_manifest(TEXT).files() if file.sha256 == sha256)
        path.write_bytes((TEXT / name).read_bytes())

    def weights(self, job: str, version: int, start: int, stop: int, storage: str | None = None) -> Iterator[bytes]:
        self.asked.append((start, stop))
        yield (TEXT / "weights.safetensors").read_bytes()[start:stop]


def test_a_device_far_away_uses_the_weights_that_came_with_the_task(manifest, samples, tmp_path):
    elsewhere, boundary = Elsewhere(), manifest.boundary(SHORT)
    bundle = RemoteBundle(
        elsewhere,  # type: ignore[arg-type]
        file_ref(TEXT, MANIFEST_NAME).sha256,
        tmp_path / "cache",
        tmp_path / "work",
    )
    trained = bundle.weights(OFFER, manifest.space.suffix(boundary.layer))
    source = RemoteSource(bundle, OFFER)
    engine = OnnxEngine(bundle.directory, source, "portable", RuntimeSettings())
    x, _ = samples.batch(np.arange(12))
    rows = engine.store(
        boundary, lambda start, stop: x[start:stop], 12, ForwardPlan(batch=5), Stopwatch(), lambda *_: None
    )
    expected = x
    for layer in manifest.frozen(boundary):
        expected = LayerForward(TEXT / layer.forward.name)(expected)
    np.testing.assert_array_equal(rows.rows(0, 12), expected)
    start = len(header(manifest.space))
    places = [manifest.space.suffix(boundary.layer), manifest.space.layer(0)]
    assert elsewhere.asked == [(start + 4 * p.start, start + 4 * p.stop) for p in places], "nothing came twice"
    np.testing.assert_array_equal(trained, suffix(manifest), "the embedding is gone again, what is trained is not")


def test_costs_count_the_head_among_what_is_frozen(manifest):
    short, head = manifest.boundary(SHORT), manifest.boundary(SHORT).head
    without = replace(short, head=None)
    assert forward_macs(manifest, short) == forward_macs(manifest, without) + head.macs > 0
    assert training_macs(manifest, short) < training_macs(manifest, without)
    states = head.output.shape[0] - int(np.prod(head.input.shape))
    assert predicted_peak(manifest, short, 8) == predicted_peak(manifest, without, 8) + 8 * 4 * states


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda b, m: replace(b, last_steps=None), "last_steps, which is null"),
        (lambda b, m: replace(b, head=replace(b.head, input=m.input)), "take what enters its layer"),
        (lambda b, m: replace(b, head=replace(b.head, output=m.input)), "give float32"),
        (lambda b, m: replace(b, head=replace(b.head, parameters=m.layers[0].parameters)), "does not train"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(manifest, change, problem):
    boundary = change(manifest.boundary(SHORT), manifest)
    with pytest.raises(BundleError, match=problem):
        replace(manifest, boundaries=(boundary,), tiers={})
