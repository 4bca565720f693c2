"""`embrace export`: bundles from all kinds of sources, and one clear line for whatever cannot become one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.bundle_files import read_manifest
from federation.errors import MissingPackage
from model_export.ort_runner import training_module
from model_export.zoo import PRETRAINED, ZOO

Embrace = Callable[..., Any]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def dense_onnx(path: Path, width: int | str = 4) -> Path:
    """A forward graph from elsewhere: one dense layer and a ReLU, another dense layer."""
    import numpy as np

    rng = np.random.default_rng(0)
    weights = {"w1": (4, 5), "b1": (5,), "w2": (5, 3)}
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], "first"),
            helper.make_node("Relu", ["h"], ["r"], "relu"),
            helper.make_node("MatMul", ["r", "w2"], ["y"], "second"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_help_shows_an_example(embrace: Embrace) -> None:
    answer = embrace("export", "--help")
    assert answer.code == 0
    assert "embrace export resnet20 --out" in answer.out


def test_the_zoo(embrace: Embrace) -> None:
    listed = embrace("export", "--list", "--json").json
    assert [row["name"] for row in listed] == [*ZOO, *PRETRAINED]
    assert next(row for row in listed if row["name"] == "resnet20")["parameters"] == 272_762
    table = embrace("export", "--list").out
    assert all(name in table for name in ZOO)


def test_no_model_at_all(embrace: Embrace) -> None:
    answer = embrace("export")
    assert answer.code == 2
    assert "say which model" in answer.error


def test_a_zoo_model(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("export", "digits", "--out", tmp_path / "new" / "digits", "--json")
    assert (answer.code, answer.err) == (0, "")
    facts = answer.json
    assert facts["tiers"] == {"strong": "conv1", "moderate": "conv3", "weak": "dense"}
    assert [b["name"] for b in facts["boundaries"]] == ["conv1", "conv2", "conv3", "dense", "classifier"]
    assert facts["boundaries"][0]["capacity"] == 1.0
    assert all(b["engines"] == ["portable"] for b in facts["boundaries"])
    assert facts["bytes"] == sum(
        len(v) for k, v in contents(tmp_path / "new" / "digits").items() if k != "manifest.json"
    )


def test_the_summary_says_where_and_what_next(
    embrace: Embrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = embrace("export", "mnist_lr")
    assert answer.code == 0
    assert (tmp_path / "mnist_lr" / "manifest.json").is_file()
    assert "mnist_lr: 1 layer, batch 32, loss cross_entropy" in answer.out
    assert "note: the model is one layer" in answer.out
    assert "next: embrace inspect mnist_lr" in answer.out


def test_an_export_is_reproducible(embrace: Embrace, tmp_path: Path, digits: Path) -> None:
    assert embrace("export", "digits", "--out", tmp_path / "again").code == 0
    first, second = contents(digits), contents(tmp_path / "again")
    assert list(first) == list(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_the_seed_decides_the_weights_and_nothing_else(embrace: Embrace, tmp_path: Path, digits: Path) -> None:
    assert embrace("export", "digits", "--out", tmp_path / "other", "--seed", 1).code == 0
    first, second = contents(digits), contents(tmp_path / "other")
    assert [name for name in first if first[name] != second[name]] == ["manifest.json", "weights.safetensors"]


def test_the_weights_are_the_modules_own(digits: Path) -> None:
    """Statistics too: capturing runs the model in training mode, which moves them."""
    import torch
    from safetensors.numpy import load_file

    torch.manual_seed(0)
    module = ZOO["digits"].build()
    state = {name: value.numpy() for name, value in module.state_dict().items() if not name.endswith("tracked")}
    found = load_file(digits / "weights.safetensors")
    assert set(found) == set(state)
    assert [name for name in state if not (state[name] == found[name]).all()] == []


def test_a_users_model(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    answer = embrace(
        "export", f"{models}:good", "--input", "4", "--out", tmp_path / "b", "--json", "--loss", "mse", "--batch", 8
    )
    assert answer.code == 0
    assert (answer.json["name"], answer.json["loss"], answer.json["batch"]) == ("models.good", "mse", 8)
    assert [b["name"] for b in answer.json["boundaries"]] == ["0", "2"]


def test_tokens(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    options = ("--input", "6", "--dtype", "int64", "--vocabulary", 50, "--label-smoothing", 0.1, "--ignore-index", 2)
    assert embrace("export", f"{models}:Bag", *options, "--out", tmp_path / "b").code == 0
    manifest = read_manifest(tmp_path / "b")
    assert (manifest.input.dtype, manifest.vocabulary) == ("int64", 50)
    assert (manifest.loss.label_smoothing, manifest.loss.ignore_index) == (0.1, 2)


def test_an_onnx_file(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("export", dense_onnx(tmp_path / "dense.onnx"), "--out", tmp_path / "b", "--json")
    assert answer.code == 0
    assert (answer.json["name"], answer.json["layers"]) == ("dense", 2)
    assert embrace("verify", tmp_path / "b").code == 0


def test_splits(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("export", "digits", "--out", tmp_path / "b", "--split", "conv3,classifier", "--json")
    assert [b["name"] for b in answer.json["boundaries"]] == ["conv1", "conv3", "classifier"]
    assert answer.json["tiers"] == {"strong": "conv1"}


def test_tiers_by_capacity(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("export", "digits", "--out", tmp_path / "b", "--tiers", "weak=0.1, middle=0.5", "--json")
    assert answer.json["tiers"] == {"strong": "conv1", "weak": "dense", "middle": "conv3"}
    assert all(b["capacity"] <= 0.5 for b in answer.json["boundaries"][1:])


def test_both_engines(embrace: Embrace, tmp_path: Path) -> None:
    try:
        training_module("api")
    except MissingPackage:
        pytest.skip("needs onnxruntime-training")
    engines = "portable,ort-training"
    answer = embrace("export", "digits", "--out", tmp_path / "b", "--engine", engines, "--split", "dense", "--json")
    assert answer.code == 0
    assert [b["engines"] for b in answer.json["boundaries"]] == [["portable", "ort-training"]] * 2


@pytest.mark.parametrize(("model", "layers"), [("TwoWays", 4), ("Tied", 3)])
def test_a_model_whose_parts_hang_together_has_boundaries(
    embrace: Embrace, models: Path, tmp_path: Path, model: str, layers: int
) -> None:
    answer = embrace("export", f"{models}:{model}", "--input", "4", "--out", tmp_path / "b", "--json")
    assert answer.code == 0 and answer.json["layers"] == layers
    assert embrace("verify", tmp_path / "b").code == 0


def test_a_model_that_cannot_be_split_is_one_layer_and_says_so(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    answer = embrace("export", f"{models}:lonely", "--input", "4", "--out", tmp_path / "b")
    assert answer.code == 0
    assert "1 layer," in answer.out
    assert (
        "note: the model is one layer: nothing that a device could store separates two groups of weights" in answer.out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet21",), "no zoo model is called 'resnet21'; did you mean resnet20"),
        (("model.pt",), "cannot tell what 'model.pt' is: expected a zoo name"),
        (("nowhere.py:f", "--input", "4"), "no such file: nowhere.py"),
        (("nowhere.onnx",), "no such file: nowhere.onnx"),
        (("digits", "--input", "1,8,8"), "--input is fixed for zoo models; digits takes (1, 8, 8) float32"),
        (("digits", "--input", "1,x"), "--input 1,x: expected positive numbers separated by commas"),
        (("digits", "--dtype", "float16"), "--dtype float16: expected float32 or int64"),
        (("digits", "--loss", "hinge"), "loss: expected cross_entropy, bce_with_logits, mse"),
        (("digits", "--label-smoothing", "1"), "label_smoothing must lie in [0, 1)"),
        (("digits", "--engine", "cuda"), "unknown engine 'cuda'; expected portable or ort-training"),
        (("digits", "--tiers", "weak"), "--tiers weak: expected NAME=CAPACITY"),
        (("digits", "--tiers", "weak=2"), "tier 'weak': a capacity lies between 0 and 1, got 2.0"),
        (
            ("digits", "--tiers", "weak=0.0001"),
            "tier weak=0.0001: no boundary is that small; the last layer alone needs",
        ),
        (
            ("digits", "--split", "conv9"),
            "no layer starts with a module named 'conv9'; boundaries of this model: conv1,",
        ),
        (("digits", "--split", "dense@4"), "no recurrent layer from 'dense' on"),
        (("digits", "--split", "dense@x"), "split 'dense@x': expected a boundary name, or name@steps"),
    ],
)
def test_wrong_requests(embrace: Embrace, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    answer = embrace("export", *arguments, "--out", tmp_path / "b")
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("good", (), "say what the model takes, without the batch: --input 3,32,32"),
        ("fails", ("--input", "4"), "the factory fails in {file} failed: RuntimeError: no weights today"),
        ("number", ("--input", "4"), "the factory number in {file} must return a torch.nn.Module, it returned int"),
        ("absent", ("--input", "4"), "{file} has no callable named 'absent'; it has: Arc, Bag, Nothing,"),
        ("good", ("--input", "5"), "the model does not accept an input of shape (2, 5) and type float32: "),
        ("Pair", ("--input", "4"), "the model returns tuple with: 0 (2, 4), 1 (2, 4); say which one with --output"),
        ("Nothing", ("--input", "4"), "the model has no trainable parameters"),
    ],
)
def test_models_that_are_none(
    embrace: Embrace, models: Path, tmp_path: Path, factory: str, options: tuple[str, ...], message: str
) -> None:
    answer = embrace("export", f"{models}:{factory}", *options, "--out", tmp_path / "b")
    assert answer.code == 2
    assert message.format(file=models) in answer.error
    assert not (tmp_path / "b").exists()


def test_an_operator_without_a_rule_is_named_with_its_node_module_and_file(
    embrace: Embrace, models: Path, tmp_path: Path
) -> None:
    answer = embrace("export", f"{models}:Summed", "--input", "4", "--out", tmp_path / "b")
    assert answer.code == 2
    assert "no gradient rule for operator Atan" in answer.error
    assert "node '/inner/inner.1/Atan'" in answer.error
    assert "module 'inner.1'" in answer.error
    assert "model_export/autodiff/rules/" in answer.error


def test_a_file_that_python_cannot_import(embrace: Embrace, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module_anywhere\n")
    answer = embrace("export", f"{file}:f", "--input", "4", "--out", tmp_path / "b")
    assert answer.code == 2
    assert "broken.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module" in answer.error


def test_an_unreadable_onnx_file(embrace: Embrace, tmp_path: Path) -> None:
    file = tmp_path / "broken.onnx"
    file.write_bytes(b"this is no protobuf")
    answer = embrace("export", file, "--out", tmp_path / "b")
    assert answer.code == 2
    assert "broken.onnx is not a readable ONNX model" in answer.error


def test_an_onnx_file_with_an_open_input_size(embrace: Embrace, tmp_path: Path) -> None:
    file = dense_onnx(tmp_path / "open.onnx", "width")
    answer = embrace("export", file, "--out", tmp_path / "b")
    assert answer.code == 2
    assert "leaves its input size open; say it without the batch" in answer.error
    assert embrace("export", file, "--input", "4", "--out", tmp_path / "b").code == 0


def test_targets(embrace: Embrace, tmp_path: Path) -> None:
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    file.write_text("keep")
    empty.mkdir()
    answer = embrace("export", "mnist_lr", "--out", full)
    assert answer.code == 2
    assert f"{full} exists and is not empty; choose another --out or remove it" in answer.error
    assert "is a file; --out takes a directory" in embrace("export", "mnist_lr", "--out", file).error
    assert contents(full) == {"mine.txt": b"keep"}
    assert embrace("export", "mnist_lr", "--out", empty).code == 0


def test_narrow_models_beside_the_boundaries(embrace: Embrace, tmp_path: Path) -> None:
    target = tmp_path / "digits"
    answer = embrace("export", "digits", "--split", "dense", "--widths", "0.2, 0.5", "--out", target, "--json")
    assert (answer.code, answer.err) == (0, "")
    assert [(b["name"], b["width"]) for b in answer.json["boundaries"]] == [
        ("conv1", None),
        ("dense", None),
        ("conv1@0.5", 0.5),
        ("conv1@0.2", 0.2),
    ]
    shown = embrace("inspect", target, "--json").json["boundaries"]
    # 4, 8, 16 channels and 16 units: kernels, batch norm, dense layers
    assert shown[2]["parameters"] == 36 + 8 + 288 + 16 + 1152 + 32 + 16 * 64 + 16 + 160 + 10
    assert shown[2]["statistics"] == 2 * (4 + 8 + 16)
    assert shown[2]["activations"] == 32 * (4 * 64 + 8 * 64 + 16 * 16 + 16 + 10)
    assert "conv1@0.2" in embrace("inspect", target).out
    verified = embrace("verify", target, "--json").json
    assert verified["passed"] and "conv1@0.2" in {result["boundary"] for result in verified["results"]}


def test_a_plan_for_memory(embrace: Embrace, tmp_path: Path) -> None:
    target = tmp_path / "digits"
    answer = embrace("export", "digits", "--split", "dense", "--memory-plan", "small", "--out", target, "--json")
    assert answer.json["memory_plan"] == "small"
    assert "memory plan: small" in embrace("inspect", target).out
    answer = embrace("export", "digits", "--memory-plan", "tiny", "--out", tmp_path / "d")
    assert answer.code == 2 and "--memory-plan tiny: expected fast, balanced, small" in answer.error


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ("half", "--widths half: expected numbers between 0 and 1"),
        ("1", "expected different numbers between 0 and 1"),
        ("0.5,0.5", "expected different numbers between 0 and 1"),
    ],
)
def test_widths_that_are_none(embrace: Embrace, tmp_path: Path, widths: str, words: str) -> None:
    answer = embrace("export", "digits", "--widths", widths, "--out", tmp_path / "d")
    assert answer.code == 2 and words in answer.error


def test_a_model_with_one_width(embrace: Embrace, tmp_path: Path, models: Path) -> None:
    answer = embrace("export", f"{models}:good", "--input", "4", "--widths", "0.5", "--out", tmp_path / "d")
    assert answer.code == 2 and "has one width only" in answer.error
    answer = embrace("export", dense_onnx(tmp_path / "m.onnx"), "--widths", "0.5", "--out", tmp_path / "d")
    assert answer.code == 2 and "has one width only" in answer.error
