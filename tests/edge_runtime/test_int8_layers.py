"""Frozen layers in 8 bits: close to PyTorch's float32, the same each time, and float32 where bytes would not do."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edge_runtime import int8_layers  # noqa: E402
from edge_runtime.bundle_files import write_weights  # noqa: E402
from edge_runtime.engine.portable import LayerForward  # noqa: E402
from edge_runtime.engine.session import RuntimeSettings  # noqa: E402
from edge_runtime.evaluate import Evaluator  # noqa: E402
from edge_runtime.forward import ForwardPlan, store_activations  # noqa: E402
from edge_runtime.frozen_statistics import FrozenStatistics  # noqa: E402
from edge_runtime.int8_graph import LARGEST_WEIGHT, Int8Graph, Range  # noqa: E402
from edge_runtime.int8_layers import SAMPLES, open_int8  # noqa: E402
from edge_runtime.layers import BundleSource  # noqa: E402
from edge_runtime.timing import Stopwatch  # noqa: E402
from edge_runtime.trainer import Received, Trainer  # noqa: E402
from federation.coverage import STATISTICS, coverage  # noqa: E402
from federation.errors import InputError, NonFiniteLoss  # noqa: E402
from federation.messages import Task  # noqa: E402
from federation.space import ParameterSpace  # noqa: E402
from federation.weights import places  # noqa: E402
from tests.edge_runtime.conftest import LOW_MEMORY, Bundle  # noqa: E402
from tests.stock_python import ROOT, STOCK_PYTHON, needs_stock_python  # noqa: E402

INT8 = RuntimeSettings(frozen="int8")
Rng = np.random.Generator


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """Every test hears what is told once."""
    int8_layers._tell.cache_clear()
    yield


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """L2, relative."""
    assert found.shape == expected.shape and found.dtype == np.float32
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def opened(graphs: Sequence[Path], x: np.ndarray, batch: int = 32) -> LayerForward | None:
    return open_int8(graphs, "all", RuntimeSettings(), lambda a, b: x[a:b], len(x), batch)


def images_like(shape: Sequence[int], count: int) -> np.ndarray:
    """Patterns of different contrast and brightness, sorted by both: what the first samples are is not what follows."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((count, *shape)).cumsum(axis=-1) / 3
    return np.float32(x * np.linspace(0.3, 1.5, count).reshape(-1, *(1 for _ in shape)))


def written(name: str, folder: Path, x: np.ndarray) -> tuple[list[Path], np.ndarray]:
    """The layers of a model but the last, and what PyTorch gives to the last."""
    torch = pytest.importorskip("torch")
    from model_export.bundle import load_graph
    from model_export.graph import serialise
    from model_export.source import load_source, with_shapes
    from model_export.training import inference_graph

    source = with_shapes(load_source(name, **({"input_shape": x.shape[1:]} if ":" in name else {})))
    graph, layers = load_graph(source)
    space = ParameterSpace([layer.parameters for layer in layers])
    module, inputs, seen = source.module(), torch.from_numpy(x), []
    with torch.no_grad():
        list(module.children())[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0].numpy()))
        module.eval()(inputs)
    state = {key: value.numpy() for key, value in module.state_dict().items()}
    write_weights(folder / "weights.safetensors", space, space.flatten(state))
    paths = [folder / f"{number}.onnx" for number in range(len(layers) - 1)]
    for path, layer in zip(paths, layers):
        path.write_bytes(serialise(inference_graph(graph, layer, places(space))))
    return paths, seen[0]


# Relative errors of whole networks with random weights, which pass noise on; trained ones are at 2 to 5 %.
MOST = {"resnet20": 0.06, "femnist_cnn": 0.05, "mobilenetv2": 0.2, "dense": 0.12}
SHAPES = {
    "resnet20": (3, 32, 32),
    "femnist_cnn": (1, 28, 28),
    "mobilenetv2": (3, 32, 32),
    "dense": (12,),
}
BYTES = {"QuantizeLinear", "QLinearConv", "QLinearAdd", "QLinearGlobalAveragePool", "DequantizeLinear", "Flatten"}
OPERATORS = {
    "resnet20": BYTES,
    "mobilenetv2": BYTES,
    "femnist_cnn": {"QuantizeLinear", "QLinearConv", "MaxPool", "Flatten", "MatMulIntegerToFloat", "Relu"},
    "dense": {"QuantizeLinear", "MatMulIntegerToFloat", "Tanh"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_close_to_those_of_pytorch(name, models, tmp_path, monkeypatch):
    x = images_like(SHAPES[name], 48)
    graphs, expected = written(f"{models}:dense" if name == "dense" else name, tmp_path, x)
    made: list[bytes] = []

    def write(graph: Int8Graph, ranges: Mapping[str, Range]) -> list[bytes]:
        made.append(b"".join(write_pieces(graph, ranges)))
        return made[-1:]

    write_pieces = Int8Graph.write
    monkeypatch.setattr(Int8Graph, "write", write)
    found = opened(graphs, x)
    assert found is not None
    output = found(x)
    assert 1e-4 < error_of(output, expected) < MOST[name]
    graph = onnx.load_from_string(made[0]).graph
    assert {node.op_type for node in graph.node} == OPERATORS[name]
    weights = [numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith(":w")]
    # 2 · 255 · 64 < 2 ** 15: where the processor adds pairs of products in 16 bits, the sum is right, too.
    assert max(int(abs(w.astype(int)).max()) for w in weights) == LARGEST_WEIGHT == 64
    again = opened(graphs, x)
    assert again is not None and np.array_equal(again(x), output)
    assert np.array_equal(np.concatenate([found(x[:7]), found(x[7:])]), output), "sums of integers have no order"
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix == ".onnx") == sorted(g.name for g in graphs)


STOCK = """
import sys
import numpy as np
from pathlib import Path
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.int8_layers import open_int8
*graphs, data, out = map(Path, sys.argv[1:])
x = np.load(data)
np.save(out, open_int8(graphs, "all", RuntimeSettings(), lambda a, b: x[a:b], len(x), 32)(x))
"""


@needs_stock_python
def test_the_newest_stock_runtime_gives_the_same(tmp_path):
    x = images_like(SHAPES["femnist_cnn"], 64)
    graphs, expected = written("femnist_cnn", tmp_path, x)
    np.save(tmp_path / "x.npy", x)
    told = [STOCK_PYTHON, "-c", STOCK, *graphs, tmp_path / "x.npy", tmp_path / "y.npy"]
    subprocess.run(list(map(str, told)), check=True, cwd=ROOT, timeout=120)
    found, here = np.load(tmp_path / "y.npy"), opened(graphs, x)
    assert here is not None
    assert error_of(found, expected) < 0.05 and error_of(found, here(x)) < 0.005


# --- single graphs ---


def value(name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def graph_of(folder: Path, nodes, shape, output, dtype: int = TensorProto.FLOAT, **constants: np.ndarray) -> Path:
    """A layer by itself, with its weights inside."""
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(
        nodes, "layer", [value("input", ["N", *shape], dtype)], [value("output", ["N", *output])], tensors
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])
    (folder / "layer.onnx").write_bytes(model.SerializeToString())
    return folder / "layer.onnx"


def node(operator: str, inputs: str, output: str, **attributes):
    return helper.make_node(operator, inputs.split(), [output], **attributes)


SCALES = [1.0, 1e-30, 1e30]


@pytest.mark.parametrize("largest", SCALES)
@pytest.mark.parametrize("transposed", [0, 1])
def test_a_product_is_off_by_no_more_than_rounding_allows(tmp_path, largest, transposed):
    """Of a sum of x·w, each x is off by half a step and each w, too."""
    rng = np.random.default_rng(0)
    x = (largest * rng.standard_normal((40, 30))).astype(np.float32)
    w, b = rng.standard_normal((30, 9)).astype(np.float32), rng.standard_normal(9).astype(np.float32)
    w[:, 3] = 0
    gemm = node("Gemm", "input w b", "output", transB=transposed)
    found = opened([graph_of(tmp_path, [gemm], [30], [9], w=w.T.copy() if transposed else w, b=b)], x)
    assert found is not None
    seen = np.concatenate([x[start : start + 4] for start in np.linspace(0, 36, 4).astype(int)])
    steps_x, steps_w = (seen.max() - seen.min()) / 255, abs(w).max(axis=0) / 64
    near = np.clip(x, seen.min(), seen.max()).astype(np.float64)
    allowed = 0.51 * (abs(near).sum(1, keepdims=True) * steps_w + abs(w).sum(0) * steps_x) + 30 * steps_x * steps_w
    off = abs(found(x).astype(np.float64) - (near @ w.astype(np.float64) + b))
    assert (off <= allowed + 1e-5 * abs(b)).all()


def conv_case(folder: Path, rng: Rng, *, gain=None, bias=None, variance=None, relu: Sequence = (), **more) -> Path:
    """conv 3 -> 8, batch norm, and what follows."""
    ones = np.ones(8, np.float32)
    constants = {
        "w": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "gain": ones if gain is None else gain,
        "bias": rng.standard_normal(8).astype(np.float32) if bias is None else bias,
        "mean": rng.standard_normal(8).astype(np.float32),
        "variance": 4 * ones if variance is None else variance,
        **more,
    }
    last = "n" if relu else "output"
    nodes = [
        node("Conv", "input w", "c", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c gain bias mean variance", last),
    ]
    return graph_of(folder, [*nodes, *relu], [3, 6, 6], [8, 6, 6], **constants)


def zeros(*numbers: int) -> np.ndarray:
    found = np.ones(8, np.float32)
    found[list(numbers)] = 0
    return found


SIX, NONE, MINUS = np.float32(6), np.float32(0), np.float32(-1)
CASES: dict[str, Callable[[Path, Rng], Path]] = {
    "plain": conv_case,
    "relu": lambda f, r: conv_case(f, r, relu=[node("Relu", "n", "output")]),
    "clip": lambda f, r: conv_case(f, r, relu=[node("Clip", "n low high", "output")], low=NONE, high=SIX),
    "other clip": lambda f, r: conv_case(f, r, relu=[node("Clip", "n low high", "output")], low=MINUS, high=SIX),
    "used twice": lambda f, r: conv_case(
        f, r, relu=[node("Relu", "n", "r"), node("Sigmoid", "n", "s"), node("Mul", "r s", "output")]
    ),
    "dead channels": lambda f, r: conv_case(f, r, gain=zeros(1, 5)),
    "large bias": lambda f, r: conv_case(f, r, gain=zeros(2) * 1e-12, bias=np.float32(3e4) * zeros(1)),
    "no variance": lambda f, r: conv_case(f, r, variance=zeros(0, 4)),
    "nothing": lambda f, r: conv_case(f, r, gain=0 * zeros(), bias=0 * zeros(), relu=[node("Relu", "n", "output")]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_convolution_with_all_that_goes_into_it(case, tmp_path):
    rng = np.random.default_rng(1)
    graph = CASES[case](tmp_path, rng)
    x = rng.standard_normal((SAMPLES, 3, 6, 6)).astype(np.float32)  # all of which are measured
    found, expected = opened([graph], x), LayerForward(graph)(x)
    assert found is not None
    assert abs(found(x) - expected).max() <= 0.04 * abs(expected).max()


@pytest.mark.parametrize("constant", [0.0, 1.0, -3.0])
def test_inputs_that_are_all_the_same(tmp_path, constant):
    graph = conv_case(tmp_path, np.random.default_rng(2))
    x = np.full((8, 3, 6, 6), constant, np.float32)
    found, expected = opened([graph], x), LayerForward(graph)(x)
    assert found is not None and abs(found(x) - expected).max() <= 0.04 * abs(expected).max()


def test_a_sample_that_is_not_finite_stays_so_and_spoils_no_other(tmp_path):
    graph = conv_case(tmp_path, np.random.default_rng(2))
    x = np.random.default_rng(3).standard_normal((64, 3, 6, 6)).astype(np.float32)
    found = opened([graph], x)
    assert found is not None
    whole, broken = found(x), x.copy()
    broken[5, 0, 0, 0], broken[9, 1, 2, 3] = np.nan, np.inf
    output = found(broken)
    assert np.isnan(output[[5, 9]]).all()
    rest = np.delete(np.arange(64), [5, 9])
    assert np.array_equal(output[rest], whole[rest])


LSTM = helper.make_node("LSTM", ["input", "w", "r"], ["", "output"], hidden_size=2)
BRANCH = helper.make_graph([node("Relu", "input", "y")], "branch", [], [value("y", ["N", 3])])
IF = helper.make_node("If", ["c"], ["output"], then_branch=BRANCH, else_branch=BRANCH)
GATHER = node("Gather", "w input", "output")
F32 = np.float32
STAY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "lstm": (
        lambda f: graph_of(f, [LSTM], [4, 3], [4, 2], w=np.ones((1, 8, 3), F32), r=np.ones((1, 8, 2), F32)),
        "no convolution and no matrix product",
    ),
    "embedding": (
        lambda f: graph_of(f, [GATHER], [4], [4, 3], TensorProto.INT64, w=np.ones((5, 3), F32)),
        "no convolution and no matrix product",
    ),
    "branches": (lambda f: graph_of(f, [IF], [3], [3], c=np.array(True)), "graphs inside of nodes"),
    "scaled product": (
        lambda f: graph_of(f, [node("Gemm", "input w", "output", alpha=2.0)], [3], [3], w=np.ones((3, 3), F32)),
        "no convolution and no matrix product",
    ),
    "weights": (
        lambda f: conv_case(f, np.random.default_rng(0), gain=np.float32("nan") * zeros()),
        "weights in them are not finite|values in them are not finite",
    ),
    "variance": (
        lambda f: conv_case(f, np.random.default_rng(0), variance=-zeros()),
        "weights in them are not finite|values in them are not finite",
    ),
}


@pytest.mark.parametrize("case", STAY)
def test_what_has_to_stay_float_does_and_is_told_once(case, tmp_path, caplog):
    graph = STAY[case][0](tmp_path)
    kind = onnx.load(graph).graph.input[0]
    shape = [d.dim_value for d in kind.type.tensor_type.shape.dim][1:]
    x = np.ones((8, *shape), np.int64 if case == "embedding" else np.float32)
    with caplog.at_level(logging.INFO, "embrace.agent"):
        assert opened([graph], x) is None
        assert opened([graph], x) is None
    (line,) = caplog.messages
    assert re.fullmatch(rf"frozen layers all stay float32: .*({STAY[case][1]}).*", line), line


def test_data_that_is_not_finite_leaves_layers_as_they_are(tmp_path, caplog):
    graph = conv_case(tmp_path, np.random.default_rng(2))
    x = np.full((8, 3, 6, 6), np.inf, np.float32)
    with caplog.at_level(logging.INFO, "embrace.agent"):
        assert opened([graph], x) is None
    assert caplog.messages == ["frozen layers all stay float32: values in them are not finite"]


# --- in the multi-step forward pass, and in training ---


def stored(bundle: Bundle, stop: int, x: np.ndarray, plan: ForwardPlan, **more) -> np.ndarray:
    source, settings = BundleSource(bundle.directory, bundle.manifest), more.pop("settings", RuntimeSettings())
    store = store_activations(source, range(stop), lambda a, b: x[a:b], len(x), plan, settings, Stopwatch(), **more)
    return store.rows(0, len(x))


@pytest.mark.parametrize("memory", [None, 10_000])
@pytest.mark.parametrize("settings", [RuntimeSettings(), LOW_MEMORY], ids=["fast", "low_memory"])
def test_groups_of_layers_take_bytes_one_after_the_other(digits, images, memory, settings):
    x = images[0][:60]
    plain = stored(digits, 4, x, ForwardPlan(8, memory), settings=settings)
    found = stored(digits, 4, x, ForwardPlan(8, memory, computed_in="int8"), settings=settings)
    assert 1e-4 < error_of(found, plain) < 0.05


def test_little_memory_keeps_layers_float(digits, images, caplog):
    x = images[0][:20]
    with caplog.at_level(logging.INFO, "embrace.agent"):
        found = stored(digits, 2, x, ForwardPlan(8, 1, computed_in="int8"), settings=LOW_MEMORY)
    assert np.array_equal(found, stored(digits, 2, x, ForwardPlan(8, 1), settings=LOW_MEMORY))
    assert caplog.messages == [
        f"frozen layers {name} stay float32: there is too little memory to write them in 8 bits"
        for name in ("conv1", "conv2")
    ]


def test_measured_statistics_keep_layers_float(resnet8, caplog):
    manifest = resnet8.manifest
    x = images_like(manifest.input.shape, 8)
    covered = coverage(manifest, "layer3" + STATISTICS)
    layers = covered.boundary.layer
    with caplog.at_level(logging.INFO, "embrace.agent"):
        found, plain = (
            stored(resnet8, layers, x, ForwardPlan(8, computed_in=kind), statistics=FrozenStatistics(manifest, covered))
            for kind in ("int8", "float32")
        )
    assert np.array_equal(found, plain)
    assert caplog.messages[0].endswith("stay float32: what enters their batch norms is measured")


def test_training_gets_bytes_and_evaluation_does_not(digits, samples):
    weak, source = digits.manifest.boundary("weak"), BundleSource(digits.directory, digits.manifest)
    task = Task(boundary=weak.name, steps=30, batch=20, rate=0.05)
    outcomes = {}
    for settings in (RuntimeSettings(), INT8):
        trainer = Trainer(digits.directory, source, samples, settings=settings)
        outcomes[settings.frozen] = trainer.run(task, Received(digits.suffix("weak")))
        trainer.close()
    exact, found = outcomes["float32"], outcomes["int8"]
    assert not np.array_equal(found.parameters, exact.parameters)
    assert abs(found.report.last_loss - exact.report.last_loss) < 0.1 * exact.report.last_loss
    scores = [
        Evaluator(digits.directory, source, weak.layer, samples, settings=settings, plan=ForwardPlan()).score(
            np.array(found.parameters)
        )
        for settings in (RuntimeSettings(), INT8)
    ]
    assert scores[0] == scores[1]


def test_data_that_is_not_finite_is_the_same_error_as_in_float32(digits, samples, images, monkeypatch):
    weak, source = digits.manifest.boundary("weak"), BundleSource(digits.directory, digits.manifest)
    x = images[0][:200].copy()
    x[77] = np.nan
    monkeypatch.setattr(samples, "_x", x, raising=False)
    monkeypatch.setattr(type(samples), "batch", lambda self, numbers: (x[numbers], self.labels[numbers]))
    for settings in (RuntimeSettings(), INT8):
        trainer = Trainer(digits.directory, source, samples, settings=settings)
        with pytest.raises(NonFiniteLoss, match="the loss is nan"):
            trainer.run(Task(boundary=weak.name, steps=20, batch=20, rate=0.05), Received(digits.suffix("weak")))
        trainer.close()


def test_other_types_are_refused():
    with pytest.raises(InputError, match="frozen: expected float32 or int8, got 'int4'"):
        RuntimeSettings(frozen="int4")  # type: ignore[arg-type]
