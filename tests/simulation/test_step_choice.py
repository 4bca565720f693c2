"""What computes a step: the bundle alone decides it, and processes change no bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from edge_runtime.bundle_files import read_manifest
from edge_runtime.engine.portable import TrainingStep
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from simulation.step_choice import find_tail, suits_portable
from simulation.torch_engine import TorchEngine, TorchStep
from tests.edge_runtime.conftest import relative
from tests.simulation.test_simulate import fleet_of


@pytest.mark.parametrize(
    ("name", "tier", "portable"),
    [
        ("resnet8", "strong", False),
        ("resnet8", "moderate", True),
        ("resnet8", "weak", True),
        ("femnist_cnn", "weak", True),
        ("mnist_2nn", "weak", False),  # no convolution
        ("imdb_bilstm", "weak", False),
    ],
)
def test_the_bundle_decides(bundle_of, name, tier, portable):
    bundle = bundle_of(name)
    boundary = bundle.manifest.boundary(tier)
    assert suits_portable(bundle.directory, bundle.manifest, boundary) == portable
    step = TorchEngine(bundle.directory, bundle.manifest, np.array(bundle.weights)).open_step(boundary)
    assert isinstance(step, TrainingStep if portable else TorchStep)


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("resnet8", "layer3"),
        ("digits", None),  # few channels
        ("femnist_cnn", "conv2"),
        ("mnist_2nn", None),  # no convolution
        ("imdb_bilstm", None),
    ],
)
def test_the_bundle_decides_where_a_graph_follows_pytorch(bundle_of, name, tail):
    bundle = bundle_of(name)
    boundary = bundle.manifest.boundary("strong")
    first = find_tail(bundle.directory, bundle.manifest, boundary)
    assert (first if first is None else bundle.manifest.layers[first].name) == tail
    last = bundle.manifest.boundaries[-1]
    assert find_tail(bundle.directory, bundle.manifest, last) is None, "only where all layers are trained"


GROUPS = """
from torch import nn

def network():
    body = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=GROUPS), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_by_groups_are_left_to_pytorch(tmp_path, groups):
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    (tmp_path / "model.py").write_text(GROUPS.replace("GROUPS", str(groups)))
    source = load_source(f"{tmp_path / 'model.py'}:network", input_shape=(1, 8, 8))
    export_bundle(source, tmp_path / "bundle", Choices(engines=("portable",)))
    manifest = read_manifest(tmp_path / "bundle")
    last = max(manifest.boundaries, key=lambda boundary: boundary.layer)
    assert last.layer > 0 and suits_portable(tmp_path / "bundle", manifest, last) == (groups == 1)


def test_a_mixed_fleet_of_a_network_too_large_to_be_stacked(bundle_of, tmp_path):
    """Bit for bit the same from one process and from three; within rounding what devices compute."""
    bundle = bundle_of("resnet8")
    job = {"num_rounds": 2, "local": {"steps": 2, "batch": 8, "rate": "0.01"}}
    job |= {"simulate": {"devices": 5, "tiers": {"strong": 1, "moderate": 2, "weak": 2}}}
    found = [
        bundle.manifest.space.flatten(
            Simulation(fleet_of(bundle, job), tmp_path / name, Options(engine, workers, InlinePool)).run().weights
        )
        for name, engine, workers in (("one", "torch", 1), ("three", "torch", 3), ("devices", "portable", 1))
    ]
    assert (found[0] == found[1]).all()
    assert relative(found[0], found[2]) < 1e-4
