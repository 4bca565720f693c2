"""A trained bundle as one ONNX file and as a PyTorch state dict: both compute what the bundle computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.trained_bundle import write_trained
from model_export.bundle import export_bundle
from model_export.shapes import sample_input
from model_export.source import load_source
from model_export.to_onnx import write_onnx, write_state_dict


@pytest.mark.parametrize("name", ["digits", "imdb_bilstm@0.2", "text_transformer"])
def test_both_files_give_what_the_module_gives(tmp_path: Path, name: str) -> None:
    source = load_source(name)
    manifest = export_bundle(source, tmp_path / "bundle")
    moved = np.array(map_weights(tmp_path / "bundle" / manifest.weights.name, manifest.space)) * np.float32(0.9)
    write_trained(tmp_path / "bundle", manifest, 0, moved, tmp_path / "trained")
    write_onnx(tmp_path / "trained", tmp_path / "model.onnx")
    write_state_dict(tmp_path / "trained", tmp_path / "model.pt")

    module = source.module().eval()
    known = torch.load(tmp_path / "model.pt", weights_only=True)
    module.load_state_dict(known, strict=False)
    assert {name for name, p in module.named_parameters() if p.requires_grad} <= known.keys()
    x = sample_input(manifest.input.shape, manifest.input.dtype, manifest.vocabulary, 3, 0)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    (found,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["output"], {"input": x})
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert read_manifest(tmp_path / "trained").weights.sha256 != manifest.weights.sha256
