"""Both engines: the same results in place, nothing left over from one run to the next, and errors in one line."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from edge_runtime.engine import ort_training
from edge_runtime.engine.choose import choose_engine, open_step
from edge_runtime.engine.portable import LayerForward, TrainingStep
from edge_runtime.engine.session import RuntimeSettings, is_out_of_memory
from edge_runtime.engine.trace import _read, divide
from edge_runtime.memory import current_memory
from federation.errors import BundleError, EmbraceError, InputError, MissingPackage
from tests.edge_runtime.conftest import (
    ENGINES,
    LOW_MEMORY,
    Bundle,
    answer,
    both_engines,
    boundary_names,
    export,
    relative,
    without_graphs,
)

TOLERANCE = 1e-4
DIGITS = ["conv1", "conv2", "conv3", "dense", "classifier"]


def engine_errors(bundle: Bundle, boundary: str, count: int, seed: int, weights: np.ndarray) -> dict[str, float]:
    """How far the loss, every gradient and every new statistic of one engine are from the other's."""
    x, labels = bundle.batch(boundary, count, seed)
    portable, other = bundle.step(boundary, "portable"), bundle.step(boundary, "ort-training")
    assert portable.engine != other.engine
    for step in (portable, other):
        step.parameters[:] = weights[step.suffix]
    losses = [step.run(x, labels, 7) for step in (portable, other)]
    errors = {"loss": abs(losses[0] - losses[1]) / losses[1]}
    scale = max(float(np.abs(g).max()) for g in portable.results.values())
    for name, expected in portable.results.items():
        # A gradient that is zero but for rounding (a bias in front of a normalisation) is measured by the others.
        largest = max(float(np.abs(expected).max()), 1e-3 * scale)
        errors[name] = float(np.abs(other.results[name] - expected).max()) / largest
    return errors


def compare_engines(bundle: Bundle, boundary: str, count: int) -> None:
    errors = engine_errors(bundle, boundary, count, 0, bundle.weights)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE, (worst, errors[worst])


@both_engines
@pytest.mark.parametrize("boundary", DIGITS)
def test_engines_agree_on_loss_gradients_and_new_statistics(digits, boundary):
    compare_engines(digits, boundary, 32)


@both_engines
@pytest.mark.parametrize(
    ("name", "splits"), [("mnist_2nn", []), ("femnist_cnn", ["dense", "classifier"]), ("imdb_bilstm", ["classifier"])]
)
def test_engines_agree_on_small_zoo_models(name, splits, tmp_path):
    bundle = export(tmp_path / name, name, splits=splits)
    served = [b.name for b in bundle.manifest.boundaries if b.train and b.ort_training]
    assert len(served) >= 2
    for boundary in served:
        compare_engines(bundle, boundary, 3)


def zoo() -> list[str]:
    pytest.importorskip("torch")
    from model_export.zoo import ZOO

    return list(ZOO)


@both_engines
@pytest.mark.slow
@pytest.mark.parametrize("name", zoo())
def test_engines_agree_on_every_zoo_model_that_both_can_serve(name, tmp_path):
    """In a deep network some value often lies so near the kink of its ReLU that rounding decides on which side.

    Then a gradient differs for one input and not for another, so each has to agree for one of several inputs, the later
    of them with normalised values shifted away from the kinks.
    """
    from model_export.oracle import TorchOracle

    bundle = export(tmp_path / name, name)
    oracle = TorchOracle(bundle.source, bundle.manifest, bundle.weights)
    served = [b for b in bundle.manifest.boundaries if b.train and b.ort_training]
    assert served
    for boundary in served:
        smallest: dict[str, float] = {}
        for seed in range(8):
            weights = bundle.weights if seed < 4 else oracle.calm(boundary, np.array(bundle.weights))
            for what, error in engine_errors(bundle, boundary.name, 2, seed, weights).items():
                smallest[what] = min(error, smallest.get(what, error))
            if max(smallest.values()) < TOLERANCE:
                break
        worst = max(smallest, key=smallest.__getitem__)
        assert smallest[worst] < TOLERANCE, (boundary.name, worst, smallest[worst])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_leaves_parameters_alone_and_accumulates_nothing(digits, engine):
    step = digits.step("conv1", engine)
    x, labels = digits.batch("conv1", 16)
    before, inputs = step.parameters.copy(), x.copy()
    first = step.run(x, labels)
    gradients = step.gradients.copy()
    step.gradients[:] = 1e6  # what lies there from the last step must not count
    assert step.run(x, labels) == first
    assert np.array_equal(step.gradients, gradients)
    assert np.array_equal(step.parameters, before) and np.array_equal(x, inputs)
    moved = [name for name, kind in step.kinds.items() if kind == "statistic"]
    assert moved and all(not np.array_equal(step.results[name], step.values[name]) for name in moved)


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_may_change_their_size(digits, engine):
    step = digits.step("conv2", engine)
    for number, count in enumerate((32, 7, 32, 1, 33)):
        x, labels = digits.batch("conv2", count, seed=number)
        fresh = digits.step("conv2", engine)
        assert step.run(x, labels) == fresh.run(x, labels)
        assert np.array_equal(step.gradients, fresh.gradients)
        if isinstance(step, TrainingStep):
            assert step.predictions().shape == (count, 10)
            assert np.array_equal(step.predictions(), fresh.predictions())


@pytest.mark.parametrize("engine", ENGINES)
def test_other_arrays_at_the_same_address_are_noticed(dense, engine):
    """A transpose of a square batch has the address, the shape and the type of the batch itself."""
    step = dense.step("0", engine)
    x, labels = dense.batch("0", 12)
    step.run(x, labels)
    transposed = step.run(x.T, labels)
    assert transposed == dense.step("0", engine).run(x.T.copy(), labels)
    assert step.run(x, labels) != transposed


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_is_read_where_it_lies(digits, engine):
    """New numbers in the same memory are seen without binding anything again."""
    step = digits.step("dense", engine)
    x, labels = digits.batch("dense", 8)
    first = step.run(x, labels)
    x *= 2
    labels[:] = (labels + 1) % 10
    changed = step.run(x, labels)
    assert changed != first
    assert changed == digits.step("dense", engine).run(x.copy(), labels.copy())


@pytest.mark.parametrize("engine", ENGINES)
def test_steady_steps_allocate_nothing(digits, engine):
    step = digits.step("conv3", engine)
    x, labels = digits.batch("conv3", 32)
    for number in range(5):
        step.run(x, labels, number)
    tracemalloc.start()
    try:
        step.run(x, labels)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(50):
            step.run(x, labels, number)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert x.nbytes > 16_384 and step.parameters.nbytes > 16_384  # so that a copy of either would be seen
    assert peak - before < 16_384 and after - before < 8_192


@pytest.mark.skipif(current_memory() is None, reason="needs /proc")
@pytest.mark.parametrize("engine", ENGINES)
def test_two_hundred_steps_take_no_more_memory_than_a_few(digits, engine):
    step = digits.step("conv1", engine)
    x, labels = digits.batch("conv1", 32)
    for number in range(20):
        step.run(x, labels, number)
    grown = []
    for _ in range(3):  # what leaks does so each time; threads of other tests in this process do not
        before = current_memory().anonymous
        for number in range(200):
            step.run(x, labels, number)
        grown.append(current_memory().anonymous - before)
    assert min(grown) < 200 * 4096  # not a page per step; the weights alone are ten of them


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_follows_the_seed_as_in_pytorch(dropouts, engine):
    pytest.importorskip("torch")
    from model_export.oracle import TorchOracle

    oracle = TorchOracle(dropouts.source, dropouts.manifest, dropouts.weights)
    x, labels = dropouts.batch("0", 16)
    step = dropouts.step("0", engine)
    assert step.uses_seed
    found = {}
    for seed in (3, 4, 2**31 - 1):
        loss = step.run(x, labels, seed)
        expected = oracle.step(dropouts.manifest.boundary("0"), x, labels, seed, np.array(dropouts.weights))
        assert loss == pytest.approx(expected.loss, rel=1e-5)
        for name, gradient in expected.gradients.items():
            assert relative(step.results[name], gradient) < TOLERANCE
        found[seed] = loss
        assert step.run(x, labels, seed) == loss
    assert len(set(found.values())) == 3


@both_engines
def test_engines_draw_the_same_dropout_masks_behind_a_boundary(dropouts):
    """The number of a dropout counts through the whole model: a frozen one is skipped, not lost."""
    for boundary in boundary_names(dropouts.manifest):
        compare_engines(dropouts, boundary, 16)


def test_the_engine_asked_for_or_the_portable_one(digits):
    boundary = digits.manifest.boundary("weak")
    assert choose_engine(boundary) == "portable"
    with pytest.raises(InputError, match="no engine is called 'tpu': expected auto, portable or ort-training"):
        choose_engine(boundary, "tpu")
    with pytest.raises(InputError, match="'dense' has no graph for the engine 'auto', only for none"):
        choose_engine(without_graphs(boundary))
    with pytest.raises(InputError, match="'dense' has no graph for the engine 'ort-training', only for portable"):
        choose_engine(replace(boundary, ort_training=()), "ort-training")
    with pytest.raises(InputError, match="no graph for the portable engine"):
        open_step(digits.directory, digits.manifest, without_graphs(boundary))


@both_engines
def test_onnxruntime_training_is_used_where_it_has_to_be(digits, monkeypatch):
    boundary = digits.manifest.boundary("weak")
    assert choose_engine(boundary, "ort-training") == "ort-training"
    assert choose_engine(replace(boundary, train=None)) == "ort-training"
    with pytest.raises(InputError, match="only for ort-training"):
        choose_engine(replace(boundary, train=None), "portable")
    for name in ("TrainingParameters", "CheckpointState"):  # a stock runtime has neither
        monkeypatch.delattr(ort_training.ort.capi.onnxruntime_pybind11_state, name, raising=False)
    with pytest.raises(MissingPackage, match="onnxruntime-training-cpu"):
        choose_engine(boundary, "ort-training")
    with pytest.raises(MissingPackage, match="onnxruntime-training-cpu"):
        digits.step("weak", "ort-training")


def test_profiles_and_threads_agree_on_frozen_layers(digits, resnet8):
    for bundle in (digits, resnet8):
        x = np.random.default_rng(1).random((5, *bundle.manifest.input.shape), np.float32)
        for layer in bundle.manifest.layers:
            graph = bundle.directory / layer.forward.name
            fast = LayerForward(graph)(x)
            assert fast.shape == (5, *layer.output.shape)
            assert relative(LayerForward(graph, LOW_MEMORY)(x), fast) < 1e-5
            for spinning in (False, True):
                assert relative(LayerForward(graph, RuntimeSettings(2, spinning))(x), fast) < 1e-5
            x = fast


def test_settings_are_checked():
    for threads in (0, 257):
        with pytest.raises(InputError, match=f"threads: expected a number from 1 to 256, got {threads}"):
            RuntimeSettings(threads)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("bad allocation"), True),
        (RuntimeError("BFCArena: Failed to allocate memory for requested buffer of size 1024"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("Got invalid dimensions for input: labels"), False),
        (ValueError("not enough values to unpack"), False),
    ],
)
def test_words_for_too_little_memory(error, expected):
    assert is_out_of_memory(error) is expected


STARVE = """
import resource, sys
sys.modules["torch"] = None  # onnxruntime-training would import it: a device has none
from pathlib import Path
import numpy as np
from edge_runtime.engine.choose import open_step
from federation.errors import OutOfMemory
from edge_runtime.bundle_files import read_manifest

folder, engine = Path(sys.argv[1]), sys.argv[2]
manifest = read_manifest(folder)
step = open_step(folder, manifest, manifest.boundary("conv1"), engine)
small = np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
large = np.zeros((40_000, 1, 8, 8), np.float32), np.zeros(40_000, np.int64)
step.run(*small)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (24 << 20), taken + (24 << 20)))
try:
    step.run(*large)
except OutOfMemory as error:
    print(error)
step.run(*small)  # and the step lives on
"""


@pytest.mark.skipif(current_memory() is None, reason="needs /proc")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_really_lacks_memory_says_so(digits, engine):
    assert answer(STARVE, digits.directory, engine) == "not enough memory for a training step of 40000 samples"


@pytest.mark.parametrize("damage", ["garbage", "truncated", "missing", "empty"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_corrupt_graph_is_one_line_that_names_it(digits, tmp_path, engine, damage):
    folder = tmp_path / "bundle"
    shutil.copytree(digits.directory, folder)
    boundary = digits.manifest.boundary("weak")
    for graph in [folder / boundary.train.name, *folder.glob("ort_training/*/training_model.onnx")]:
        content = {"garbage": b"\x07" * 500, "truncated": graph.read_bytes()[:-300], "empty": b""}
        graph.write_bytes(content[damage]) if damage in content else graph.unlink()
    with pytest.raises(BundleError, match=r"cannot load \S+\.onnx: ") as caught:
        open_step(folder, digits.manifest, boundary, engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_that_does_not_fit_is_one_line(digits, engine):
    step = digits.step("dense", engine)
    x, labels = digits.batch("dense", 8)
    expected = step.run(x, labels)
    for wrong in [(x[:, :16], labels), (x.astype(np.float64), labels), (x, labels.astype(np.int32)), (x, labels[:3])]:
        with pytest.raises(EmbraceError, match=f"^{engine}: a training step failed: ") as caught:
            step.run(*wrong)
        assert "\n" not in str(caught.value)
    assert step.run(x, labels) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_divides_into_forward_and_backward(digits, engine):
    x, labels = digits.batch("conv1", 32)
    division = divide(
        lambda trace: digits.step("conv1", engine, trace=trace), lambda recording: recording.run(x, labels)
    )
    assert division.forward > 0 and division.backward > 0
    assert 0 < division.forward_share < 1
    assert division.forward_share == pytest.approx(division.forward / (division.forward + division.backward))


def test_the_division_is_what_the_record_says(digits, tmp_path):
    """The record as a whole, divided by names and times of its events: the first run does not count."""
    x, labels = digits.batch("conv1", 32)
    step = digits.step("conv1", trace=tmp_path / "trace")
    for _ in range(4):
        step.run(x, labels)
    path = step.session.end_profiling()
    with open(path) as file:
        events = json.load(file)
    runs = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run")
    assert len(runs) == 4
    nodes = [e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= runs[1][0]]
    sums = {
        side: sum(e["dur"] for e in nodes if e["name"].startswith(side)) / 3e6 for side in ("forward/", "backward/")
    }
    assert len(nodes) % 3 == 0 and all(e["name"].startswith(("forward/", "backward/")) for e in nodes)
    found = _read(tmp_path / path, step.is_backward)
    assert found.forward == pytest.approx(sums["forward/"]) and found.backward == pytest.approx(sums["backward/"])


def test_what_a_record_calls_backward_depends_on_the_labels(digits):
    """Names of nodes against the graph itself: no node that the predictions are made from is called backward."""
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(str(digits.directory / digits.manifest.boundary("conv1").train.name)).graph
    made_by = {output: node for node in graph.node for output in node.output}
    needed, waiting = set(), ["predictions"]
    while waiting:
        node = made_by.get(waiting.pop())
        if node is not None and node.name not in needed:
            needed.add(node.name)
            waiting += node.input
    assert needed and not any(map(TrainingStep.is_backward, needed))
    gradients = [made_by[o.name].name for o in graph.output if o.name.endswith(".grad")]
    assert gradients and all(map(TrainingStep.is_backward, gradients))
