"""Weights that other exporters write as nodes, and files that PyTorch differentiates operator by operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from model_export.bundle import export_bundle
from model_export.constant_weights import lift_constant_weights
from model_export.errors import ExportError
from model_export.onnx_oracle import OnnxOracle
from model_export.source import load_source
from model_export.verify import TOLERANCE, verify_bundle

rng = np.random.default_rng(0)


def write(path: Path, text: str, **held: np.ndarray) -> str:
    """A file from the text form of ONNX, with initialisers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in held.items())
    onnx.save(model, path)
    return str(path)


def weights_of(path: str) -> set[str]:
    return set(load_source(path).capture().trainable)


def as_constants(path: str, *names: str) -> str:
    """The same file with some initialisers as Constant nodes, as PaddlePaddle's exporter writes all of them."""
    model = onnx.load(path)
    for item in [item for item in model.graph.initializer if item.name in names]:
        model.graph.initializer.remove(item)
        node = onnx.helper.make_node("Constant", [], [item.name], value=item)
        model.graph.node.insert(0, node)
    onnx.save(model, path)
    return path


NORMALISED = """g (float[N, 3, 6, 6] x) => (float[N, C] y) {
    a = Conv <kernel_shape=[3, 3]> (x, kernel, bias)
    b = BatchNormalization (a, scale, shift, mean, variance)
    c = Relu (b)
    d = GlobalAveragePool (c)
    e = Flatten (d)
    y = Gemm <transB=1> (e, dense, last)
}"""
VECTORS = {
    "bias": rng.standard_normal(4).astype(np.float32),
    "scale": np.ones(4, np.float32),
    "shift": rng.standard_normal(4).astype(np.float32),
    "mean": np.zeros(4, np.float32),
    "variance": np.ones(4, np.float32),
}


def test_batch_norm_whose_vectors_are_constant_nodes(tmp_path: Path) -> None:
    held = {
        "kernel": rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "dense": rng.standard_normal((5, 4)).astype(np.float32),
        "last": np.zeros(5, np.float32),
    }
    path = as_constants(write(tmp_path / "m.onnx", NORMALISED, **held, **VECTORS), "kernel", *VECTORS)
    manifest = export_bundle(load_source(path), tmp_path / "bundle")
    kinds = {p.name: p.kind for p in manifest.space}
    assert kinds["bias"] == kinds["scale"] == kinds["kernel"] == "weight"
    assert kinds["mean"] == kinds["variance"] == "statistic"
    results = verify_bundle(tmp_path / "bundle")
    assert len(results) == 3
    assert max(result.largest() for result in results) < TOLERANCE


def test_weights_that_a_file_fills_converts_or_dequantises(tmp_path: Path) -> None:
    text = """g (float[N, 4] x) => (float[N, 3] y) {
        filled = ConstantOfShape <value = float[1] {0.5}> (shape)
        a = MatMul (x, filled)
        converted = Cast <to=1> (half)
        b = MatMul (a, converted)
        real = DequantizeLinear (stored, step)
        turned = Transpose <perm=[1, 0]> (real)
        y = MatMul (b, turned)
    }"""
    path = write(
        tmp_path / "m.onnx",
        text,
        shape=np.array([4, 5]),
        half=rng.standard_normal((5, 4)).astype(np.float16),
        stored=rng.integers(-100, 100, (3, 4)).astype(np.int8),
        step=np.array(0.02, np.float32),
    )
    assert weights_of(path) == {"filled", "converted", "turned"}
    export_bundle(load_source(path), tmp_path / "bundle")
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) < TOLERANCE


def test_a_view_of_a_tied_weight_stays_a_view(tmp_path: Path) -> None:
    text = (
        "g (float[N, 4] x) => (float[N, 4] y) { a = MatMul (x, w) t = Transpose <perm=[1, 0]> (w) y = MatMul (a, t) }"
    )
    assert weights_of(write(tmp_path / "m.onnx", text, w=np.ones((4, 6), np.float32))) == {"w"}


def test_a_file_cannot_ask_for_endless_memory(tmp_path: Path) -> None:
    text = "g (float[N, 4] x) => (float[N, K] y) { w = ConstantOfShape (shape) y = MatMul (x, w) }"
    path = write(tmp_path / "m.onnx", text, shape=np.array([4, 1 << 40]))
    with pytest.raises(ExportError, match="more than a bundle may hold"):
        lift_constant_weights(onnx.load(path))


def test_gradients_of_a_file_come_from_autograd_also_in_float64(tmp_path: Path) -> None:
    """HardSigmoid has no gradient in onnxruntime-training: without PyTorch only slopes of the loss would be left."""
    text = """g (float[N, 6] x) => (float[N, 3] y) {
        a = MatMul (x, first)
        b = HardSigmoid (a)
        c = Dropout (b)
        y = MatMul (c, second)
    }"""
    held = {"first": rng.standard_normal((6, 5)), "second": rng.standard_normal((5, 3))}
    path = write(tmp_path / "m.onnx", text, **{name: value.astype(np.float32) for name, value in held.items()})
    source = load_source(path)
    manifest = export_bundle(source, tmp_path / "bundle")
    oracle = OnnxOracle(source, manifest)
    vector = np.concatenate([held["first"].ravel(), held["second"].ravel()]).astype(np.float32)
    x, labels = source.sample(4), rng.integers(0, 3, 4)
    steps = [step(manifest.whole, x, labels, 5, vector) for step in (oracle.step, oracle.precise_step)]
    assert steps[0] is not None and steps[1] is not None
    assert steps[1].gradients["first"].dtype == np.float64
    np.testing.assert_allclose(steps[0].gradients["first"], steps[1].gradients["first"], atol=1e-6)
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) < TOLERANCE
