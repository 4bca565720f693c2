"""Narrow models: the published sizes, tensors that nest in those of the wide model, and names that are refused."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch

from edge_runtime.bundle_files import read_manifest
from federation.errors import InputError
from federation.manifest import Source
from model_export.bundle import Choices, export_bundle, load_graph
from model_export.source import load_source
from model_export.verify import TOLERANCE, verify_bundle
from model_export.zoo import ZOO, zoo_model
from model_export.zoo.width import channels

NARROWING = (
    "digits",
    "mnist_2nn",
    "mnist_cnn",
    "femnist_cnn",
    "resnet8",
    "fashion_resnet8",
    "resnet20",
    "resnet20_keras",
    "vgg11",
    "vgg16",
    "imdb_bilstm",
)
NARROW = [*(f"{name}@{ratio}" for name in NARROWING for ratio in (0.2, 0.45)), "resnet8_gn@0.5", "resnet56_gn@0.5"]
RATIO = "expected a number above 0 and at most 1"


@cache
def shapes(name):
    """Of every parameter of the exported graph, by layer, name and kind, in the order of the flat vector."""
    _, layers = load_graph(load_source(name))
    return {(layer.name, p.name, p.kind): p.shape for layer in layers for p in layer.parameters}


def fits(narrow, wide):
    return len(narrow) == len(wide) and all(small <= large for small, large in zip(narrow, wide))


@pytest.mark.parametrize(
    ("name", "parameters", "activations", "capacity"),
    [("resnet20@0.45", 52_874, 3_039_552, "0.43"), ("resnet20@0.2", 10_006, 1_302_848, "0.18")],
)
def test_a_narrow_resnet20_has_the_published_numbers(name, parameters, activations, capacity, tmp_path):
    manifest = export_bundle(load_source(name), tmp_path / name, Choices(splits=("stem",)))
    counted = sum(layer.activations for layer in manifest.layers) * 32
    assert (manifest.batch, manifest.weights_from(0), counted) == (32, parameters, activations)
    assert f"{(parameters + activations) / (272_762 + 6_947_136):.2f}" == capacity


def test_channels_are_rounded_down_but_never_to_none():
    assert [channels(count, 0.45) for count in (16, 32, 64)] == [7, 14, 28]
    assert [channels(count, 0.2) for count in (16, 32, 64)] == [3, 6, 12]
    assert channels(8, 0.01) == 1
    assert all(channels(count, 1) == count for count in range(1, 100))
    assert all(channels(100, percent / 100) == percent for percent in range(1, 101))  # 0.29 * 100 < 29


@pytest.mark.parametrize("name", NARROW)
def test_narrow_tensors_fit_into_the_wide_ones(name):
    narrow, wide = shapes(name), shapes(name.partition("@")[0])
    assert list(narrow) == list(wide)
    assert not [key for key in narrow if not fits(narrow[key], wide[key])]
    assert narrow != wide


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_model_is_used_like_the_wide_one(name):
    narrow, wide = zoo_model(name), zoo_model(name.partition("@")[0])
    assert narrow.name == name
    for field in ("input_shape", "input_dtype", "vocabulary", "num_outputs", "loss", "batch", "tiers"):
        assert getattr(narrow, field) == getattr(wide, field)
    modules = {module for module, _ in narrow.build().named_modules()}
    assert {tier.boundary for tier in narrow.tiers.values()} <= modules


def test_narrower_models_fit_into_wider_ones():
    sizes = [shapes(f"digits@{ratio}") for ratio in (0.01, 0.2, 0.33, 0.45, 0.9, 1)]
    for narrow, wide in pairwise(sizes):
        assert list(narrow) == list(wide)
        assert not [key for key in narrow if not fits(narrow[key], wide[key])]


@pytest.mark.parametrize("name", [name for name, model in ZOO.items() if model.narrows])
def test_a_ratio_of_one_is_the_model_itself(name):
    torch.manual_seed(3)
    whole = zoo_model(name).build().state_dict()
    torch.manual_seed(3)
    same = zoo_model(f"{name}@1").build().state_dict()
    assert list(whole) == list(same)
    assert all(torch.equal(whole[key], same[key]) for key in whole)


DEEP = pytest.param("resnet20@0.2", marks=pytest.mark.slow)  # resnet8 has the same blocks


@pytest.mark.parametrize("name", ["resnet8@0.2", "femnist_cnn@0.2", "imdb_bilstm@0.2", DEEP])
def test_a_narrow_bundle_agrees_with_pytorch(name, tmp_path):
    export_bundle(load_source(name, seed=5), tmp_path / name)
    manifest = read_manifest(tmp_path / name)
    assert manifest.name == name
    assert manifest.source == Source("zoo", name, 5)
    assert list(manifest.tiers) == ["strong", "moderate", "weak"]
    results = verify_bundle(tmp_path / name)
    assert {result.boundary for result in results} >= {boundary.name for boundary in manifest.boundaries}
    assert not [result for result in results if result.skipped]
    assert max(result.largest() for result in results) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((f"resnet20@{ratio}", RATIO) for ratio in ("", "0", "0.0", "1.01", "-0.5", "nan", "half", "0.5@0.5", " 0.5")),
        ("resnet20@0.4x", RATIO),
        ("resnet56_gn@0.2", r"^resnet56_gn@0.2: 3 channels do not divide into its 8 groups"),
        ("mnist_lr@0.5", r"^mnist_lr@0.5: mnist_lr has no width to reduce; these have: digits, .*imdb_bilstm$"),
        ("mobilenetv2@0.5", "no width to reduce"),
        ("text_transformer@0.5", "no width to reduce"),
        ("resnet21@0.45", "no zoo model is called 'resnet21'; did you mean resnet20"),
        ("model@2.pt", "cannot tell what 'model@2.pt' is"),
    ],
)
def test_what_cannot_be_narrowed_says_why(name, message):
    with pytest.raises(InputError, match=message) as caught:
        load_source(name)
    assert "\n" not in str(caught.value)
