"""`embrace verify`: passes on what is right, and says what is wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

Embrace = Callable[..., Any]
BOUNDARIES = ["(forward)", "conv1", "conv2", "conv3", "dense", "classifier"]


def replace_file(bundle: Path, name: str, data: bytes) -> None:
    """Change a file and the manifest with it, as somebody would who means it."""
    text = (bundle / "manifest.json").read_text()
    old = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    manifest = json.loads(text.replace(old, hashlib.sha256(data).hexdigest()))
    for entry in [b["train"] for b in manifest["boundaries"]] + [layer["forward"] for layer in manifest["layers"]]:
        if entry["name"] == name:
            entry["bytes"] = len(data)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (bundle / name).write_bytes(data)


def test_a_good_bundle(embrace: Embrace, digits: Path) -> None:
    answer = embrace("verify", digits, "--json")
    assert (answer.code, answer.err) == (0, "")
    facts = answer.json
    assert [row["boundary"] for row in facts["results"]] == BOUNDARIES
    assert set(facts["results"][0]["errors"]) == {"layers"}
    assert set(facts["results"][1]["errors"]) == {"loss", "gradients", "statistics"}
    assert set(facts["results"][4]["errors"]) == {"loss", "gradients"}
    assert facts["passed"] is True
    assert 0 < facts["largest"] < 1e-4


def test_the_table_ends_with_a_verdict(embrace: Embrace, digits: Path) -> None:
    answer = embrace("verify", digits)
    assert answer.code == 0
    assert all(name in answer.out for name in BOUNDARIES)
    assert answer.out.splitlines()[-1].startswith("PASS: largest relative error ")


def test_above_tolerance(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    assert embrace("export", f"{models}:good", "--input", "4", "--out", tmp_path / "b").code == 0
    answer = embrace("verify", tmp_path / "b", "--tolerance", 1e-12)
    assert answer.code == 1
    assert "FAIL" in answer.out.splitlines()[-1]
    assert "more than the tolerance 1e-12" in answer.error


def test_a_wrong_gradient_is_named(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    """The gradient of the last bias, negated: the boundary, the engine and the tensor are in the message."""
    bundle, name = tmp_path / "b", "train.01-2.onnx"
    assert embrace("export", f"{models}:good", "--input", "4", "--out", bundle).code == 0
    model = onnx.load(bundle / name)
    for node in model.graph.node:
        node.output[:] = ["right" if output == "2.bias.grad" else output for output in node.output]
        node.input[:] = ["right" if output == "2.bias.grad" else output for output in node.input]
    model.graph.node.append(onnx.helper.make_node("Neg", ["right"], ["2.bias.grad"]))
    replace_file(bundle, name, model.SerializeToString())
    answer = embrace("verify", bundle, "--json")
    assert answer.code == 1
    assert answer.json["passed"] is False
    assert "boundary 2, engine portable: 2.bias is off by" in answer.error


@pytest.mark.parametrize("file", ["train.03-dense.onnx", "forward.01-conv2.onnx", "weights.safetensors"])
def test_a_tampered_file_is_named(embrace: Embrace, copied: Path, file: str) -> None:
    data = bytearray((copied / file).read_bytes())
    data[-1] ^= 1
    (copied / file).write_bytes(bytes(data))
    answer = embrace("verify", copied)
    assert answer.code == 2
    assert f"{copied / file} is missing or differs from the manifest's sha256; export again" in answer.error


def test_a_missing_file_is_named(embrace: Embrace, copied: Path) -> None:
    (copied / "forward.01-conv2.onnx").unlink()
    answer = embrace("verify", copied)
    assert answer.code == 2
    assert "forward.01-conv2.onnx is missing" in answer.error


def test_a_graph_that_no_runtime_loads(embrace: Embrace, copied: Path) -> None:
    replace_file(copied, "train.03-dense.onnx", b"not a graph")
    answer = embrace("verify", copied)
    assert answer.code == 2
    assert "cannot load train.03-dense.onnx" in answer.error


def test_no_bundle(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("verify", tmp_path / "nowhere")
    assert answer.code == 2
    assert "is not a bundle: it has no manifest.json" in answer.error


def test_a_source_that_moved(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    assert embrace("export", f"{models}:good", "--input", "4", "--out", bundle).code == 0
    moved = models.rename(tmp_path / "moved.py")
    gone = embrace("verify", bundle)
    assert gone.code == 2
    assert f"the source {models} is not here; say where it is now with --source" in gone.error
    assert embrace("verify", bundle, "--source", f"{moved}:good").code == 0
    other = embrace("verify", bundle, "--source", f"{moved}:other")
    assert other.code == 1
    assert "is off by" in other.error
