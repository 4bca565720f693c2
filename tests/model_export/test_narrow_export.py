"""Narrow boundaries: exported beside the others, compared with PyTorch's sliced weights, refused where they lie."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper

from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.choose import open_step
from federation.capacity import capacity
from federation.errors import InputError
from federation.manifest import dumps, loads
from federation.narrow import take_corners
from model_export.bundle import Choices, export_bundle
from model_export.source import load_source
from model_export.verify import TOLERANCE, verify_bundle
from model_export.zoo import zoo_model

MODELS = """
import torch
from torch import nn


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def own(width=1.0):
    kept = max(1, int(10 * width))
    return nn.Sequential(nn.Linear(4, kept), nn.Tanh(), nn.Linear(kept, kept), nn.Sigmoid(), nn.Linear(kept, 3))


def half_frozen(width=1.0):
    network = own(width)
    network[0].weight.requires_grad_(False)
    return network


class LastChannels(nn.Module):
    # Channels last before the flatten: the first columns are not those of the first channels.
    def __init__(self, width=1.0):
        super().__init__()
        kept = int(4 * width)
        self.conv, self.dense = nn.Conv2d(1, kept, 3, padding=1), nn.Linear(kept * 16, 3)

    def forward(self, x):
        return self.dense(torch.relu(self.conv(x)).permute(0, 2, 3, 1).flatten(1))


class Deeper(nn.Module):
    def __init__(self, width=1.0):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.more = nn.Linear(8, 8) if width < 1 else nn.Identity()

    def forward(self, x):
        return self.last(torch.relu(self.more(torch.relu(self.first(x)))))


class Renamed(nn.Module):
    def __init__(self, width=1.0):
        super().__init__()
        self.other = width < 1
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)
        if self.other:
            self.first, self.tail = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return (self.tail if self.other else self.last)(torch.relu(self.first(x)))


def wider(width=1.0):
    kept = 8 if width == 1 else 9
    return nn.Sequential(nn.Linear(4, kept), nn.ReLU(), nn.Linear(kept, 3))


class Gates(nn.Module):
    def __init__(self, width=1.0):
        super().__init__()
        kept = int(8 * width)
        self.cells, self.last = nn.GRU(4, kept, batch_first=True), nn.Linear(kept, 3)

    def forward(self, x):
        return self.last(self.cells(x)[0][:, -1])


def grouped(width=1.0):
    kept = int(8 * width)
    return nn.Sequential(
        nn.Conv2d(1, kept, 3, padding=1), nn.GroupNorm(2, kept), nn.ReLU(), nn.Flatten(), nn.Linear(16 * kept, 3)
    )
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


def test_the_published_sizes(tmp_path):
    manifest = export_bundle(load_source("resnet20"), tmp_path / "r", Choices(splits=["stem"], widths=[0.2, 0.45]))
    assert [b.name for b in manifest.boundaries] == ["stem", "stem@0.45", "stem@0.2"]
    found = [
        (manifest.weights_of(b), b.activations * 32, f"{capacity(manifest, b):.2f}") for b in manifest.boundaries[1:]
    ]
    assert found == [(52_874, 3_039_552, "0.43"), (10_006, 1_302_848, "0.18")]
    assert loads(dumps(manifest)) == manifest


@pytest.mark.parametrize("name", ["digits", "mnist_2nn", "femnist_cnn", "vgg11"])
def test_narrow_boundaries_agree_with_pytorch(name, tmp_path):
    manifest = export_bundle(load_source(name, seed=3), tmp_path / name, Choices(splits=["classifier"], widths=[0.2]))
    results = verify_bundle(tmp_path / name)
    assert [r.boundary for r in results][-1] == manifest.boundaries[-1].name
    assert manifest.boundaries[-1].width == 0.2
    assert not [result for result in results if result.skipped]
    assert max(result.largest() for result in results) < TOLERANCE


def test_a_step_of_a_narrow_graph_is_pytorchs_with_sliced_weights(tmp_path):
    """Without the exporter's own oracle: the zoo's narrow module, filled by hand."""
    manifest = export_bundle(load_source("digits", seed=1), tmp_path / "d", Choices(tiers={}, widths=[0.45]))
    boundary = manifest.boundary("conv1@0.45")
    wide = map_weights(tmp_path / "d" / manifest.weights.name, manifest.space)
    step = open_step(tmp_path / "d", manifest, boundary)
    step.parameters[:] = take_corners(manifest.space, wide, boundary.space(manifest))
    module = zoo_model("digits@0.45").build().train()
    for name, value in module.state_dict().items():
        if name in manifest.space.views(np.array(wide)):
            large = torch.from_numpy(manifest.space.views(np.array(wide))[name])
            value.copy_(large[tuple(slice(n) for n in value.shape)])
    rng = np.random.default_rng(0)
    x, labels = rng.random((8, 1, 8, 8), np.float32), rng.integers(0, 10, 8)
    loss = F.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
    loss.backward()
    assert step.run(x, labels) == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        expected = parameter.grad.numpy()
        assert np.abs(step.results[name] - expected).max() < 1e-4 * np.abs(expected).max(), name
    for name, buffer in module.named_buffers():
        if "running" in name:
            assert np.allclose(step.results[name], buffer.numpy(), rtol=1e-4, atol=1e-6)


def test_a_function_that_takes_a_width(models, tmp_path):
    source = load_source(f"{models}:own", input_shape=(4,), seed=2)
    manifest = export_bundle(source, tmp_path / "own", Choices(widths=[0.5]))
    assert manifest.boundaries[-1].narrow == (((5, 4), (5,)), ((5, 5), (5,)), ((3, 5), (3,)))
    assert max(result.largest() for result in verify_bundle(tmp_path / "own")) < TOLERANCE


def test_what_is_not_trained_is_taken_from_the_wide_model_too(models, tmp_path):
    source = load_source(f"{models}:half_frozen", input_shape=(4,), seed=2)
    manifest = export_bundle(source, tmp_path / "f", Choices(tiers={}, widths=[0.5]))
    graph = onnx.load(tmp_path / "f" / manifest.boundaries[-1].train.name).graph
    frozen = source.module()[0].weight[:5].detach().numpy()
    held = [numpy_helper.to_array(item) for item in graph.initializer]
    assert any(value.size == frozen.size and np.isin(np.abs(value), np.abs(frozen)).all() for value in held)


def test_group_norm_over_fewer_channels_is_allowed(models, tmp_path):
    source = load_source(f"{models}:grouped", input_shape=(1, 4, 4))
    export_bundle(source, tmp_path / "g", Choices(widths=[0.5]))
    assert max(result.largest() for result in verify_bundle(tmp_path / "g")) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("plain", (4,), "has one width only: expected a zoo model that narrows, or a function that takes width="),
        ("LastChannels", (1, 4, 4), "does not compute what the first channels of the wide model compute"),
        ("Deeper", (4,), "has a tensor 'more.weight' that the wide model does not have"),
        ("Renamed", (4,), "has a tensor 'tail.weight' that the wide model does not have"),
        ("wider", (4,), r"0.weight has the shape \(9, 4\), which is no corner of the wide \(8, 4\)"),
        ("Gates", (5, 4), "the gates of a recurrent layer"),
        ("grouped", (1, 4, 4), "failed"),
    ],
)
def test_models_without_a_narrow_form(name, shape, message, models, tmp_path):
    width = 0.4 if name == "grouped" else 0.5
    with pytest.raises(InputError, match=message) as caught:
        export_bundle(load_source(f"{models}:{name}", input_shape=shape), tmp_path / name, Choices(widths=[width]))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imdb_bilstm", "^imdb_bilstm at width 0.4: the gates of a recurrent layer lie behind one another"),
        ("resnet56_gn", "^resnet56_gn@0.4: 6 channels do not divide into its 8 groups"),
        ("mnist_lr", "^mnist_lr@0.4: mnist_lr has no width to reduce"),
    ],
)
def test_zoo_models_without_a_narrow_form(name, message, tmp_path):
    with pytest.raises(InputError, match=message):
        export_bundle(load_source(name), tmp_path / name, Choices(tiers={}, widths=[0.4]))


def test_a_share_of_a_narrow_model_is_a_share_of_its_channels(tmp_path):
    """Half of 200 units, and a fifth of that half."""
    manifest = export_bundle(load_source("mnist_2nn@0.5"), tmp_path / "half", Choices(tiers={}, widths=[0.2]))
    (narrow,) = (boundary for boundary in manifest.boundaries if boundary.narrow)
    assert narrow.name == "hidden1@0.2"
    assert [shapes[0] for shapes in narrow.narrow] == [(20, 784), (20, 20), (10, 20)]


@pytest.mark.parametrize("widths", [(0.0,), (1.0,), (-0.5,), (float("nan"),), (0.5, 0.5)])
def test_widths_that_make_no_sense(widths):
    with pytest.raises(InputError, match="expected different numbers between 0 and 1"):
        Choices(widths=widths)
