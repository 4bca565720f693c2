"""The manifest: JSON there and back, and an answer that names the field for everything that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from federation.errors import BundleError, FieldError, InputError
from federation.manifest import (
    Boundary,
    FileRef,
    Layer,
    Loss,
    Manifest,
    Source,
    TensorSpec,
    dumps,
    loads,
)
from federation.preprocessing import Preprocessing
from federation.space import Parameter

SHA = "0123456789abcdef" * 4


def ref(name: str) -> FileRef:
    return FileRef(name, SHA, 100)


def layer(name: str, *parameters: Parameter) -> Layer:
    spec = TensorSpec("float32", (4,))
    return Layer(name, spec, spec, parameters, activations=4, macs=16, dropouts=0, forward=ref(f"forward.{name}.onnx"))


def manifest() -> Manifest:
    return Manifest(
        version=1,
        name="tiny",
        source=Source("zoo", "tiny", 3),
        opset=18,
        loss=Loss("cross_entropy", 0.1, -1),
        input=TensorSpec("float32", (4,)),
        labels=TensorSpec("int64", ()),
        output=TensorSpec("float32", (4,)),
        vocabulary=None,
        batch=32,
        uses_seed=False,
        layers=(
            layer("one", Parameter("one.w", "weight", (4, 4)), Parameter("one.mean", "statistic", (4,))),
            layer("two", Parameter("two.w", "weight", (4, 2))),
        ),
        boundaries=(
            Boundary("one", 0, None, 8, ref("train.00-one.onnx"), (ref("ort_training/00-one/checkpoint"),)),
            Boundary("two@5", 1, 5, 4, None, ()),
        ),
        tiers={"strong": "one", "weak": "two@5"},
        weights=ref("weights.safetensors"),
        notes=("something",),
    )


def test_there_and_back() -> None:
    assert loads(dumps(manifest())) == manifest()


def test_names_of_classes_and_the_scaling_of_inputs_travel() -> None:
    plain = manifest()
    assert '"classes"' not in dumps(plain) and '"preprocessing"' not in dumps(plain), "older bundles keep their bytes"
    scaling = Preprocessing(1 / 255, (0.5,), (0.25, 0.25, 0.5, 1.0))
    named = replace(plain, classes=("ant", "bee", "cat", "dog"), preprocessing=scaling)
    assert loads(dumps(named)) == named


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ("cat", "dog")}, "classes: 2 names, the model 'tiny' has 4 classes"),
        ({"classes": ("a", "b", "b", "c")}, "one is there twice"),
        ({"classes": ("a", "b", "c\x1b[2J", "d")}, "got 'c\\x1b[2J'"),
        ({"classes": ("a", "b", " ", "d")}, "got ' '"),
        ({"classes": ("a", "b"), "loss": Loss("mse")}, "has labels that are no classes"),
        ({"preprocessing": Preprocessing(mean=(1.0, 2.0))}, "preprocessing.mean: expected one number or 4"),
        (
            {"preprocessing": Preprocessing(std=(1.0,)), "input": TensorSpec("int64", (4,))},
            "preprocessing: the model takes int64, which is not scaled",
        ),
    ],
)
def test_names_and_scaling_that_do_not_fit_the_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=re.escape(message)):
        replace(manifest(), **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 0.0}, "scale: expected a number above 0"),
        ({"std": (1.0, 0.0)}, "std: expected numbers above 0"),
        ({"mean": (float("nan"),)}, "mean: expected finite numbers"),
    ],
)
def test_scaling_that_is_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=re.escape(message)):
        Preprocessing(**given)


def test_the_same_manifest_has_the_same_bytes() -> None:
    text = dumps(manifest())
    assert dumps(loads(text)) == text


def test_counts() -> None:
    it = manifest()
    assert [it.weights_from(i) for i in range(3)] == [24, 8, 0]
    assert [it.statistics_from(i) for i in range(3)] == [4, 0, 0]
    assert it.space.size == 28
    assert [f.name for f in it.files()] == [
        "weights.safetensors",
        "forward.one.onnx",
        "forward.two.onnx",
        "train.00-one.onnx",
        "ort_training/00-one/checkpoint",
    ]


def test_a_boundary_is_found_by_name_and_by_tier() -> None:
    it = manifest()
    assert it.boundary("two@5") is it.boundary("weak")
    with pytest.raises(
        BundleError, match="no boundary or tier named 'three'; this bundle has: strong, weak, one, two@5"
    ):
        it.boundary("three")


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(name=7), r"manifest\.name: expected str, got '7'"),
        (lambda d: d.update(opset="18"), r"manifest\.opset: expected int"),
        (lambda d: d.update(opset=True), r"manifest\.opset: expected int"),
        (lambda d: d.update(batch=2**70), r"manifest\.batch: expected an integer below 2\^62"),
        (lambda d: d.update(uses_seed=0), r"manifest\.uses_seed: expected true or false"),
        (lambda d: d.update(vocabulary="many"), r"manifest\.vocabulary: expected int"),
        (lambda d: d.update(layers={}), r"manifest\.layers: expected a list"),
        (lambda d: d.update(layers=[]), r"at least one layer"),
        (lambda d: d.update(tiers=[]), r"manifest\.tiers: expected an object"),
        (lambda d: d["tiers"].update(weak=1), r"manifest\.tiers\.weak: expected str"),
        (lambda d: d["tiers"].update(weak="three"), r"tier 'weak' names boundary 'three', which does not exist"),
        (lambda d: d.update(notes=[1]), r"manifest\.notes\[0\]: expected str"),
        (lambda d: d.pop("weights"), r"manifest\.weights: required, and not given"),
        (lambda d: d.update(extra=1), r"manifest\.extra: no such key; expected batch, .*, weights$"),
        (lambda d: d["source"].update(kind="web"), r"manifest\.source\.kind: expected 'zoo' or 'torch' or 'onnx'"),
        (lambda d: d["loss"].update(name="hinge"), r"manifest\.loss\.name: expected 'cross_entropy' or"),
        (lambda d: d["loss"].update(label_smoothing="a"), r"manifest\.loss\.label_smoothing: expected a number"),
        (lambda d: d["loss"].update(label_smoothing=1), r"label_smoothing must lie in \[0, 1\)"),
        (lambda d: d["loss"].update(name="huber", label_smoothing=0.1), "label_smoothing is for cross_entropy and bce"),
        (lambda d: d["loss"].update(name="mse", classes_last=True), "classes_last is for cross_entropy and focal"),
        (lambda d: d["loss"].update(name="cosine", label_smoothing=0, ignore_index=1), "compares whole vectors"),
        (lambda d: d["loss"].update(name="huber", label_smoothing=0, delta=0), "delta is a positive number of"),
        (
            lambda d: d["loss"].update(name="focal", label_smoothing=0, gamma=0.5),
            "of the loss focal, at least 1",
        ),
        (lambda d: d["loss"].update(gamma=2), "gamma is for the loss focal"),
        (lambda d: d["input"].update(shape=4), r"manifest\.input\.shape: expected a list"),
        (lambda d: d["input"].update(shape=[4.0]), r"manifest\.input\.shape\[0\]: expected int"),
        (lambda d: d["layers"][1].update(macs=None), r"manifest\.layers\[1\]\.macs: expected int"),
        (
            lambda d: d["layers"][0]["parameters"][1].update(kind="buffer"),
            r"manifest\.layers\[0\]\.parameters\[1\]\.kind: expected 'weight' or 'statistic'",
        ),
        (lambda d: d["boundaries"][1].update(layer=2), r"boundary 'two@5' starts at layer 2, which does not exist"),
        (lambda d: d["boundaries"][1].update(name="one"), r"two boundaries have the same name"),
        (lambda d: d["boundaries"][0].update(train=[]), r"manifest\.boundaries\[0\]\.train: expected an object"),
        (lambda d: d["weights"].update(sha256="abc"), r"'weights.safetensors': sha256 must be 64 hexadecimal digits"),
    ],
)
def test_a_malformed_field_names_itself(change: Change, message: str) -> None:
    data = json.loads(dumps(manifest()))
    change(data)
    with pytest.raises(BundleError, match=message):
        loads(json.dumps(data))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../b", ".hidden", "a/.b", "a//b", "a/b/c/d", "a\\b", "", "a b", "x" * 121]
)
def test_no_file_outside_the_bundle_can_be_named(name: str) -> None:
    with pytest.raises(BundleError, match="is not allowed"):
        ref(name)


def test_a_parameter_of_two_layers_is_refused() -> None:
    it = manifest()
    twice = replace(it, layers=(it.layers[0], it.layers[0]))
    with pytest.raises(InputError, match="appears twice"):
        _ = twice.space


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "version None"), ("7", "version None")])
def test_what_is_no_manifest_at_all(text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        loads(text)


def test_a_newer_version_says_so() -> None:
    data = json.loads(dumps(manifest())) | {"version": 2, "new_field": 1}
    with pytest.raises(BundleError, match="manifest version 2 is not supported; this program reads version 1"):
        loads(json.dumps(data))


NARROW = Boundary("one@0.5", 0, None, 4, ref("train.00-one@0.5.onnx"), (), 0.5, (((2, 3), (2,)), ((3, 2),)))


def with_narrow(boundary: Boundary = NARROW) -> Manifest:
    return replace(manifest(), boundaries=(*manifest().boundaries, boundary))


def test_a_narrow_boundary_has_a_space_of_its_own() -> None:
    it = with_narrow()
    assert loads(dumps(it)) == it
    narrow = it.boundary("one@0.5")
    assert [(p.name, p.kind, p.shape) for p in narrow.space(it)] == [
        ("one.w", "weight", (2, 3)),
        ("one.mean", "statistic", (2,)),
        ("two.w", "weight", (3, 2)),
    ]
    assert all(boundary.space(it) == it.space for boundary in manifest().boundaries)
    assert [boundary.whole for boundary in it.boundaries] == [True, False, False]
    assert (it.weights_of(narrow), it.statistics_of(narrow)) == (12, 2)


def test_a_manifest_that_uses_no_widths_does_not_mention_them() -> None:
    data = json.loads(dumps(with_narrow()))
    assert ["width" in boundary for boundary in data["boundaries"]] == [False, False, True]
    assert ["narrow" in boundary for boundary in data["boundaries"]] == [False, False, True]
    assert data["boundaries"][2]["narrow"] == [[[2, 3], [2]], [[3, 2]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": None}, "expected narrow shapes and a width between 0 and 1"),
        ({"narrow": None}, "expected narrow shapes and a width between 0 and 1"),
        ({"width": 1.0, "name": "one@1"}, "expected narrow shapes and a width between 0 and 1"),
        ({"width": 0.25}, r"expected the name 'one@0\.25'"),
        ({"layer": 1}, "starts at layer 0"),
        ({"last_steps": 3}, "has no last_steps"),
        ({"narrow": (((2, 3), (2,)),)}, "expected narrow shapes for 2 layers, got 1"),
        ({"narrow": (((2, 3),), ((3, 2),))}, "layer 0 has 2 parameters, got 1 narrow shapes"),
        ({"narrow": (((2, 5), (2,)), ((3, 2),))}, r"one\.w: \(2, 5\) is no corner of \(4, 4\)"),
        ({"narrow": (((2, 3, 1), (2,)), ((3, 2),))}, r"one\.w: \(2, 3, 1\) is no corner"),
        ({"narrow": (((0, 3), (2,)), ((3, 2),))}, r"one\.w: \(0, 3\) is no corner"),
        ({"narrow": (((-2, 3), (2,)), ((3, 2),))}, "is no corner"),
    ],
)
def test_narrow_boundaries_that_contradict_themselves(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        with_narrow(replace(NARROW, **change))


def test_only_outputs_and_inputs_can_be_fewer() -> None:
    kernel = replace(manifest().layers[0], parameters=(Parameter("k", "weight", (8, 4, 3, 3)),))
    it = replace(manifest(), layers=(kernel, manifest().layers[1]))
    for shape, good in (((4, 2, 3, 3), True), ((8, 4, 3, 3), True), ((4, 2, 1, 3), False), ((4, 2, 3, 1), False)):
        boundary = replace(NARROW, narrow=((shape,), ((3, 2),)))
        if good:
            assert replace(it, boundaries=(*it.boundaries, boundary)).weights_of(boundary) > 0
        else:
            with pytest.raises(BundleError, match="is no corner"):
                replace(it, boundaries=(*it.boundaries, boundary))
