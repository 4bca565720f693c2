"""The files of onnxruntime-training: what is in them, and how they are written and run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from federation.errors import MissingPackage
from federation.manifest import Loss
from model_export.errors import ExportError
from model_export.ort_artifacts import ArtifactStep, write_artifacts
from model_export.ort_runner import training_module

try:
    API = training_module("api")
except MissingPackage as missing:
    pytest.skip(str(missing), allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
CROSS_ENTROPY, MSE = Loss("cross_entropy"), Loss("mse")
FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
TRAINABLE = ["filter", "scale", "shift", "dense", "bias"]
STATISTICS = ["mean", "variance"]
X, LABELS = np.linspace(-1, 1, 3 * 2 * 25, dtype=np.float32).reshape(3, 2, 5, 5), np.array([0, 2, 1])


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"filter": (32, 2, 3, 3), "scale": (32,), "shift": (32,), "dense": (3, 32), "bias": (3,)}
    shapes |= {"mean": (32,), "variance": (32,)}
    return {name: rng.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()}


def forward() -> onnx.ModelProto:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
    net (float[N,2,5,5] x) => (float[N,3] y)
    { c = Conv <kernel_shape = [3, 3]> (x, filter)
      n = BatchNormalization (c, scale, shift, mean, variance)
      r = Relu (n)
      g = GlobalAveragePool (r)
      f = Flatten (g)
      y = Gemm <transB = 1> (f, dense, bias) }""")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values().items())
    return model


def write(directory: Path, model: onnx.ModelProto | None = None, nominal: bool = False) -> list[Path]:
    directory.mkdir(exist_ok=True)
    return write_artifacts(model or forward(), TRAINABLE, STATISTICS, CROSS_ENTROPY, directory, nominal=nominal)


def run(directory: Path) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    given = values()
    statistics = {name: given.pop(name) for name in STATISTICS}
    return ArtifactStep(directory).loss_and_gradients(given, statistics, X, LABELS)


def digests(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}


def test_the_four_files_are_written(tmp_path: Path) -> None:
    assert write(tmp_path) == [tmp_path / name for name in FILES]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_bytes_are_reproducible_and_the_argument_untouched(tmp_path: Path) -> None:
    model = forward()
    before = model.SerializeToString(deterministic=True)
    write(tmp_path / "first", model)
    write(tmp_path / "second", model)
    assert model.SerializeToString(deterministic=True) == before
    (tmp_path / "forward.onnx").write_bytes(before)
    (tmp_path / "third").mkdir()
    program = (
        "import onnx, pathlib; from model_export.ort_artifacts import Loss, write_artifacts;"
        f"write_artifacts(onnx.load({str(tmp_path / 'forward.onnx')!r}), {TRAINABLE}, {STATISTICS},"
        f"Loss('cross_entropy'), pathlib.Path({str(tmp_path / 'third')!r}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    assert digests(tmp_path / "first") == digests(tmp_path / "second") == digests(tmp_path / "third")


def test_a_newer_ir_version_is_lowered(tmp_path: Path) -> None:
    """What onnx 1.18 and later write, onnxruntime 1.19.2 refuses to load."""
    model = forward()
    model.ir_version = 11
    write(tmp_path, model)
    assert all(onnx.load(tmp_path / name).ir_version <= 10 for name in FILES[:3])


def test_a_nominal_checkpoint_holds_no_weights(tmp_path: Path) -> None:
    full, nominal = tmp_path / "full", tmp_path / "nominal"
    write(full)
    write(nominal, nominal=True)
    assert (nominal / "checkpoint").stat().st_size < 1000 < (full / "checkpoint").stat().st_size
    found, expected = run(nominal), run(full)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1]["filter"], expected[1]["filter"])
    np.testing.assert_array_equal(found[2]["variance"], expected[2]["variance"])


def test_the_flat_buffer_has_the_order_given(tmp_path: Path) -> None:
    names = [*TRAINABLE[::-1], *STATISTICS[::-1]]
    write_artifacts(forward(), names[:5], names[5:], CROSS_ENTROPY, tmp_path)
    state = API.CheckpointState.load_checkpoint(str(tmp_path / "checkpoint"))
    module = API.Module(str(tmp_path / FILES[0]), state)
    expected = np.concatenate([values()[name].ravel() for name in names])
    np.testing.assert_array_equal(module.get_contiguous_parameters(trainable_only=False).numpy(), expected)


def test_gradients_are_those_of_the_last_step(tmp_path: Path) -> None:
    write(tmp_path)
    step = ArtifactStep(tmp_path, threads=2)
    given, statistics = values(), {name: values()[name] for name in STATISTICS}
    loss, gradients, new = step.loss_and_gradients(given, statistics, X, LABELS)
    kept, moved = gradients["dense"].copy(), new["mean"].copy()
    assert step.step(-X, LABELS) != pytest.approx(loss)
    np.testing.assert_array_equal(gradients["dense"], kept)  # what was returned is not overwritten
    np.testing.assert_array_equal(new["mean"], moved)
    again = step.loss_and_gradients(given, statistics, X, LABELS)
    assert again[0] == loss
    np.testing.assert_array_equal(again[1]["dense"], kept)


def test_a_seed_is_passed_where_the_graph_asks(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
    net (float[N,2] input, int64 seed) => (float[N,2] y)
    { factor = Cast <to = 1> (seed)
      product = Mul (input, w)
      y = Mul (product, factor) }""")
    w = np.ones(2, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    write_artifacts(model, ["w"], [], MSE, tmp_path)
    step, x = ArtifactStep(tmp_path), np.ones((1, 2), np.float32)
    losses = [step.loss_and_gradients({"w": w}, {}, x, 0 * x, seed)[0] for seed in (1, 3)]
    assert losses == [1.0, 9.0]


def test_writing_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    arguments = (CROSS_ENTROPY, tmp_path)
    with pytest.raises(ExportError, match="its statistics"):
        write_artifacts(forward(), TRAINABLE, ["mean"], *arguments)
    with pytest.raises(ExportError, match=r"not float32 initialisers.*absent"):
        write_artifacts(forward(), [*TRAINABLE, "absent"], STATISTICS, *arguments)
    spare = forward()
    spare.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "spare"))
    with pytest.raises(ExportError, match=r"no node.*spare"):
        write_artifacts(spare, [*TRAINABLE, "spare"], STATISTICS, *arguments)
    unable = forward()
    unable.graph.node[2].op_type = "Atan"
    with pytest.raises(ExportError, match="operator Atan"):
        write_artifacts(unable, TRAINABLE, STATISTICS, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    """The package copies one flat buffer and would not notice."""
    write(tmp_path)
    given = {**values(), "dense": values()["dense"].T}
    with pytest.raises(ExportError, match="'dense'"):
        ArtifactStep(tmp_path).loss_and_gradients(given, {}, X, LABELS)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"embrace-fl\[ort-training\]"):
        write(tmp_path)
    with pytest.raises(MissingPackage, match=r"embrace-fl\[ort-training\]"):
        ArtifactStep(tmp_path)
