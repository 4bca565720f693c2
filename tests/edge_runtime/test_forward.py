"""The multi-step forward pass: what it stores is what PyTorch computes, and the whole model is never loaded."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime import forward
from edge_runtime.engine import portable
from edge_runtime.engine.portable import LayerForward
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.forward import ForwardPlan, groups, store_activations
from edge_runtime.layers import BundleSource, TrainedSource
from edge_runtime.timing import Stopwatch
from federation.errors import BundleError, DiskFull, EmbraceError, OutOfMemory
from federation.manifest import Manifest
from tests import tiny_bundle
from tests.edge_runtime.conftest import LOW_MEMORY, Bundle, RecordingSource, relative
from tests.tiny_bundle import weight

ONE_BY_ONE = 1  # byte: no two layers fit together


def made_of(sizes: list[int]) -> Manifest:
    """A manifest of layers with so many weights each."""
    return tiny_bundle.manifest([tiny_bundle.layer(str(i), weight(f"p{i}", n)) for i, n in enumerate(sizes)])


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    memory=st.one_of(st.none(), st.integers(0, 1000)),
    profile=st.sampled_from(["fast", "low_memory"]),
    data=st.data(),
)
def test_groups_follow_the_memory(sizes, memory, profile, data):
    start = data.draw(st.integers(0, len(sizes) - 1))
    stop = data.draw(st.integers(start + 1, len(sizes)))
    found = groups(made_of(sizes), start, stop, memory, profile)
    assert [layer for part in found for layer in part] == list(range(start, stop))
    each = 8 if profile == "fast" else 4  # bytes per weight
    cost = [each * sum(sizes[layer] for layer in part) for part in found]
    assert all(len(part) == 1 or memory is None or taken <= memory for part, taken in zip(found, cost))
    for part, taken, following in zip(found, cost, found[1:]):  # and no group is smaller than it has to be
        assert part and memory is not None and taken + each * sizes[following[0]] > memory


def frozen(
    bundle: Bundle, stop: int, x: np.ndarray, plan: ForwardPlan, settings: RuntimeSettings | None = None, source=None
):
    source = source or BundleSource(bundle.directory, bundle.manifest)
    return store_activations(
        source, range(stop), lambda a, b: x[a:b], len(x), plan, settings or RuntimeSettings(), Stopwatch()
    )


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stored_activations_are_those_of_pytorch_in_evaluation_mode(digits, images, stop):
    torch = pytest.importorskip("torch")
    x = images[0][:50]
    with torch.no_grad():
        expected = digits.module()[:stop].eval()(torch.from_numpy(x)).numpy()
    store = frozen(digits, stop, x, ForwardPlan())
    assert store.row_dtype == np.float32 and len(store) == 50
    assert relative(store.rows(0, 50), expected.reshape(store.rows(0, 50).shape)) < 1e-5  # it may be flattened


def test_it_does_not_matter_how_layers_are_run(digits, images, tmp_path):
    x = images[0][:50]
    usual = frozen(digits, 4, x, ForwardPlan()).rows(0, 50)
    for batch in (1, 7, 50, 64):
        for memory in (None, ONE_BY_ONE, 8 * 1000):
            for settings in (RuntimeSettings(), LOW_MEMORY):
                for folder in (None, tmp_path):
                    store = frozen(digits, 4, x, ForwardPlan(batch, memory, folder=folder), settings)
                    assert relative(store.rows(0, 50), usual) < 1e-5, (batch, memory, settings, folder)
                    store.close()
    halves = frozen(digits, 4, x, ForwardPlan(7, ONE_BY_ONE, "float16")).rows(0, 50)
    assert 0 < relative(halves, usual) < 2e-3  # one rounding for each of the four layers


def test_layers_are_not_joined_where_the_graph_cannot_be_written(digits, images, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    opened: list[Path] = []
    monkeypatch.setattr(forward, "LayerForward", lambda graph, settings: opened.append(graph) or LayerForward(graph))
    expected = frozen(digits, 3, images[0][:8], ForwardPlan()).rows(0, 8)
    monkeypatch.setattr(portable.tempfile, "mkstemp", refuse)
    found = frozen(digits, 3, images[0][:8], ForwardPlan()).rows(0, 8)
    assert relative(found, expected) < 1e-6
    assert not opened[0].exists(), "the joined graph stayed in the bundle"
    assert opened[1:] == [digits.directory / layer.forward.name for layer in digits.manifest.layers[:3]]


@pytest.mark.parametrize(("memory", "profile"), [(8 * 10**6, "fast"), (ONE_BY_ONE, "low_memory"), (None, "low_memory")])
def test_few_weights_are_packed_also_where_memory_is_short(digits, images, monkeypatch, memory, profile):
    opened: list[str] = []
    monkeypatch.setattr(
        forward, "LayerForward", lambda graph, settings: opened.append(settings.profile) or LayerForward(graph)
    )
    frozen(digits, 3, images[0][:8], ForwardPlan(8, memory), LOW_MEMORY)
    assert set(opened) == {profile}


class CountedLayer(LayerForward):
    """A layer that is known as long as anybody holds it."""

    alive: ClassVar[weakref.WeakSet[LayerForward]] = weakref.WeakSet()

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.alive.add(self)


@dataclass
class WatchedSource(RecordingSource):
    """Counts the sessions that are alive when a layer is given back."""

    alive: list[int] = field(default_factory=list)

    def release(self, layer: int) -> None:
        super().release(layer)
        self.alive.append(len(CountedLayer.alive))


@pytest.mark.parametrize(("memory", "expected"), [(None, [5]), (ONE_BY_ONE, [1] * 5), (8 * 1500, [2, 1, 1, 1])])
def test_no_more_than_one_group_is_loaded_and_one_fetched(digits, images, memory, expected, monkeypatch):
    monkeypatch.setattr(forward, "LayerForward", CountedLayer)
    source, sizes = WatchedSource(digits), []
    parts = groups(digits.manifest, 0, 5, memory, "fast")
    assert [len(part) for part in parts] == expected
    store_activations(
        source,
        range(5),
        lambda a, b: images[0][a:b],
        10,
        ForwardPlan(4, memory),
        RuntimeSettings(),
        Stopwatch(),
        lambda name, done, total: sizes.append(len(CountedLayer.alive)),
    )
    assert sizes == [1 for _ in expected for _ in range(3)]  # three batches for each group, whose layers are one graph
    assert source.alive == [0] * 5, "a session outlived its group"
    assert source.fetched == [layer for what, layer in source.events if what == "release"] == [0, 1, 2, 3, 4]
    group_of = {layer: number for number, part in enumerate(parts) for layer in part}
    held: set[int] = set()
    for what, layer in source.events:
        held = held | {layer} if what == "fetch" else held - {layer}
        assert len({group_of[layer] for layer in held}) <= 2


@dataclass
class MeetingSource(RecordingSource):
    """Fetching a layer waits until the one before it is being computed, which waits for the fetching."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        if layer:
            self.meeting.wait(timeout=60)
        return super().fetch(layer, measuring=measuring)


def test_the_next_layer_is_fetched_while_this_one_is_computed(digits, images):
    source = MeetingSource(digits)
    names = [layer.name for layer in digits.manifest.layers]

    def computing(name: str, done: int, total: int) -> None:
        if names.index(name) < 3:
            source.meeting.wait(timeout=60)

    watch = Stopwatch()
    store_activations(
        source,
        range(4),
        lambda a, b: images[0][a:b],
        10,
        ForwardPlan(10, ONE_BY_ONE),
        RuntimeSettings(),
        watch,
        computing,
    )
    assert source.fetched == [0, 1, 2, 3]
    assert watch.hidden_download > 0


def test_progress_goes_up_to_the_end(digits, images):
    seen = []
    store_activations(
        BundleSource(digits.directory, digits.manifest),
        range(4),
        lambda a, b: images[0][a:b],
        10,
        ForwardPlan(4, ONE_BY_ONE),
        RuntimeSettings(),
        Stopwatch(),
        lambda *progress: seen.append(progress),
    )
    done = [part for _, part, _ in seen]
    assert done == sorted(done) and done[-1] == 40 and {total for *_, total in seen} == {40}


def check_nothing_is_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]
    if sys.platform.startswith("linux"):
        assert str(folder) not in Path("/proc/self/maps").read_text()


@dataclass
class FailingSource(RecordingSource):
    """Cannot give the layer after the second."""

    error: Exception = field(default_factory=lambda: BundleError("gone"))

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        if layer == 2:
            raise self.error
        return super().fetch(layer, measuring=measuring)


def test_a_layer_that_cannot_be_fetched_ends_it_and_leaves_nothing(digits, images, tmp_path):
    with pytest.raises(BundleError, match="gone") as caught:
        frozen(digits, 5, images[0][:20], ForwardPlan(8, ONE_BY_ONE, folder=tmp_path), source=FailingSource(digits))
    check_nothing_is_left(tmp_path)  # though the traceback still holds every local variable
    assert caught.value.__traceback__ is not None


def test_a_layer_that_cannot_be_loaded_ends_it_and_leaves_nothing(digits, images, tmp_path):
    class Broken(RecordingSource):
        def fetch(self, layer: int, *, measuring: bool = False) -> Path:
            if layer < 2:
                return super().fetch(layer, measuring=measuring)
            (tmp_path / "broken.onnx").write_bytes(b"no graph")
            return tmp_path / "broken.onnx"

    folder = tmp_path / "store"
    with pytest.raises(BundleError, match=r"cannot load broken\.onnx"):
        frozen(digits, 5, images[0][:20], ForwardPlan(8, ONE_BY_ONE, folder=folder), source=Broken(digits))
    check_nothing_is_left(folder)


def test_a_layer_that_fails_is_named_and_leaves_nothing(digits, images, tmp_path):
    with pytest.raises(EmbraceError, match=r"^layer 'conv1' failed: ") as caught:
        frozen(digits, 5, images[0][:20, :, :, 0], ForwardPlan(8, ONE_BY_ONE, folder=tmp_path))
    assert "\n" not in str(caught.value)
    check_nothing_is_left(tmp_path)


def test_inputs_that_fail_in_a_later_batch_leave_nothing(digits, images, tmp_path):
    def inputs(start: int, stop: int) -> np.ndarray:
        if start:
            raise OSError("the data went away")
        return images[0][start:stop]

    source = BundleSource(digits.directory, digits.manifest)
    with pytest.raises(OSError, match="the data went away"):
        store_activations(source, range(2), inputs, 20, ForwardPlan(8, folder=tmp_path), RuntimeSettings(), Stopwatch())
    check_nothing_is_left(tmp_path)


def test_too_little_room_for_a_later_layer_leaves_nothing(digits, images, tmp_path):
    """conv1 makes 512 numbers of a sample, conv2 256: the limit is found with the first."""
    x = images[0][:20]
    store = frozen(digits, 3, x, ForwardPlan(8, ONE_BY_ONE, folder=tmp_path, store_limit=20 * 512 * 4))
    assert store.nbytes == 20 * 128 * 4
    store.close()
    with pytest.raises(DiskFull, match="20 activations of 8×8×8 take 40,960 bytes, the limit is 40,959"):
        frozen(digits, 3, x, ForwardPlan(8, ONE_BY_ONE, folder=tmp_path, store_limit=20 * 512 * 4 - 1))
    with pytest.raises(OutOfMemory, match="the limit is 40,959"):
        frozen(digits, 3, x, ForwardPlan(8, ONE_BY_ONE, store_limit=20 * 512 * 4 - 1))
    check_nothing_is_left(tmp_path)


def test_a_bundle_that_lacks_a_file_is_named(digits, tmp_path):
    source = BundleSource(tmp_path, digits.manifest)
    with pytest.raises(BundleError, match=r"forward\.00-conv1\.onnx is missing or not \d+ bytes long"):
        source.fetch(0)


def test_trained_layers_run_with_other_weights(digits, images, tmp_path):
    """Only the trained layers' bytes are in the file; their outputs are those of PyTorch with these weights."""
    torch = pytest.importorskip("torch")
    manifest, first = digits.manifest, 3
    weights = digits.suffix("dense") * np.float32(1.5) + np.float32(0.01)
    module = digits.module()
    state = module.state_dict()
    for name, value in manifest.space.views(weights, start=manifest.space.suffix(first).start).items():
        state[name].copy_(torch.from_numpy(value))
    x = np.random.default_rng(0).random((6, *manifest.layers[first].input.shape), np.float32)
    with torch.no_grad():
        expected = module[first:].eval()(torch.from_numpy(x)).numpy()
    source = TrainedSource(digits.directory, manifest, first, weights, tmp_path)
    for layer in range(first, len(manifest.layers)):
        x = LayerForward(source.fetch(layer))(x)
        source.release(layer)
    assert relative(x, expected) < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == [manifest.weights.name]
