"""Frozen layers as one graph: against PyTorch, with weights that change, and the models that are left to PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from simulation.frozen_graph import AT_ONCE, FrozenGraph, suits_graph  # noqa: E402
from simulation.torch_engine import TorchEngine, infer  # noqa: E402
from tests.edge_runtime.conftest import relative  # noqa: E402


@pytest.mark.parametrize("tier", ["moderate", "weak"])
def test_a_graph_gives_what_pytorch_gives_with_the_weights_as_they_are(bundle_of, tier):
    bundle = bundle_of("resnet8")
    manifest, weights = bundle.manifest, np.array(bundle.weights)
    engine, boundary = TorchEngine(bundle.directory, manifest, weights), manifest.boundary(tier)
    assert suits_graph(bundle.directory, manifest.frozen(boundary))
    x = np.random.default_rng(0).random((AT_ONCE + 3, *manifest.input.shape), np.float32)
    first = engine.entering(boundary, x)
    assert first.shape == (len(x), *manifest.entry(boundary).shape)
    assert relative(first, infer(engine.frozen_part(boundary), x)) < 1e-5
    weights *= 1.1
    assert relative(engine.entering(boundary, x), infer(engine.frozen_part(boundary), x)) < 1e-5
    assert relative(engine.entering(boundary, x), first) > 1e-3


def test_a_session_is_opened_anew_only_when_its_own_weights_changed(bundle_of):
    bundle = bundle_of("resnet8")
    manifest, weights = bundle.manifest, np.array(bundle.weights)
    frozen = manifest.frozen(manifest.boundary("weak"))
    graph = FrozenGraph(bundle.directory, manifest.space, frozen, weights)
    x = np.zeros((2, *manifest.input.shape), np.float32)
    graph(x)
    opened = graph._session
    weights[manifest.space.suffix(len(frozen))] = 7.0
    graph(x)
    assert graph._session is opened
    weights[0] += 1.0
    graph(x)
    assert graph._session is not opened


@pytest.mark.parametrize("name", ["femnist_cnn", "mnist_2nn", "imdb_bilstm"])
def test_what_has_no_batch_norm_is_left_to_pytorch(bundle_of, name):
    bundle = bundle_of(name)
    assert not suits_graph(bundle.directory, bundle.manifest.layers)
