"""A bundle that lies elsewhere: what is fetched, where it lies, and that it goes again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.bundle_files import write_weights
from edge_runtime.remote import RemoteBundle, RemoteSource
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, WEIGHTS_NAME
from federation.messages import TaskOffer
from federation.weights import header
from tests.coordinator.harness import write_bundle

OFFER = TaskOffer("job-0-0-1", "job", "bundle", 4, 0.0, {})
WIDTH = 40_000  # layers of 320 kB


class Elsewhere:
    """The coordinator's files, without a network; counts what is asked for."""

    def __init__(self, directory: Path) -> None:
        self.digest, self.manifest_ = write_bundle(directory, WIDTH)
        self.directory, self.asked, self.tampered, self.short = directory, [], False, 0
        self.vector = np.random.default_rng(4).normal(size=self.manifest_.space.size).astype(np.float32)
        write_weights(directory / "4", self.manifest_.space, self.vector)

    def manifest(self, bundle: str) -> bytes:
        return (self.directory / MANIFEST_NAME).read_bytes()

    def save_graph(self, sha256: str, path: Path, size: int) -> None:
        self.asked.append(sha256)
        if self.tampered:
            raise BundleError(f"the graph that came does not have the sha256 {sha256}")
        name = next(file.name for file in self.manifest_.files() if file.sha256 == sha256)
        path.write_bytes((self.directory / name).read_bytes())

    def weights(self, job: str, version: int, start: int, stop: int, storage: str | None = None) -> Iterator[bytes]:
        self.asked.append((version, start, stop))
        data = (self.directory / str(version)).read_bytes()[start : stop - self.short]
        for at in range(0, len(data), 10_000):
            yield data[at : at + 10_000]


@pytest.fixture(autouse=True)
def placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are a few bytes here; tests/edge_runtime/test_graph_check.py has real ones."""
    for check in ("check_forward_graph", "check_training_graph"):
        monkeypatch.setattr(f"edge_runtime.remote.{check}", lambda *_, **__: None)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path / "elsewhere")


def remote(elsewhere: Elsewhere, tmp_path: Path) -> RemoteBundle:
    return RemoteBundle(elsewhere, elsewhere.digest, tmp_path / "cache", tmp_path / "work")  # type: ignore[arg-type]


def read(bundle: RemoteBundle, where: slice) -> np.ndarray:
    data = (bundle.directory / WEIGHTS_NAME).read_bytes()[bundle.data_start + 4 * where.start :]
    return np.frombuffer(data[: 4 * (where.stop - where.start)], "<f4")


def test_only_the_layers_in_use_take_room(elsewhere: Elsewhere, tmp_path: Path) -> None:
    bundle = remote(elsewhere, tmp_path)
    space, start = bundle.space, len(header(bundle.space))
    trained = bundle.weights(OFFER, bundle.space.suffix(2))
    np.testing.assert_array_equal(trained, elsewhere.vector[space.suffix(2)])
    head = space.suffix(2)
    assert elsewhere.asked == [(4, start + 4 * head.start, start + 4 * head.stop)]
    path = bundle.directory / WEIGHTS_NAME
    first = os.stat(path).st_blocks
    if first * 512 > 4 * space.size:
        pytest.skip("this file system has no holes")
    assert first * 512 < 4 * (head.stop - head.start) + 3 * 4096

    source = RemoteSource(bundle, OFFER)
    assert (source.lineage, source.version) == ("job", "job/4")
    graph = source.fetch(0)
    assert graph.read_bytes() == (elsewhere.directory / "stem.onnx").read_bytes()
    stem = space.layer(0)
    np.testing.assert_array_equal(read(bundle, stem), elsewhere.vector[stem])
    assert os.stat(path).st_blocks > first
    source.release(0)
    assert os.stat(path).st_blocks <= first + 2 * 8  # the ends of the layer share a block with their neighbours
    assert (read(bundle, stem) == 0).all()
    np.testing.assert_array_equal(trained, elsewhere.vector[head])  # which is still there
    assert bundle.received == 4 * (head.stop - head.start + stem.stop - stem.start)


def test_the_weights_of_a_group_are_one_request(elsewhere: Elsewhere, tmp_path: Path) -> None:
    bundle = remote(elsewhere, tmp_path)
    source, space, start = RemoteSource(bundle, OFFER), bundle.space, len(header(bundle.space))
    layers = range(len(space.layers))
    source.fetch_weights(layers)
    for layer in layers:
        source.fetch(layer)
    weights = [asked for asked in elsewhere.asked if isinstance(asked, tuple)]
    assert weights == [(4, start, start + 4 * space.size)]
    assert np.array_equal(read(bundle, slice(0, space.size)), elsewhere.vector)


def test_a_release_leaves_the_neighbours_alone(elsewhere: Elsewhere, tmp_path: Path) -> None:
    bundle = remote(elsewhere, tmp_path)
    source = RemoteSource(bundle, OFFER)
    for layer in range(3):
        source.fetch(layer)
    source.release(1)  # twenty bytes in the middle of a page
    space = bundle.space
    for layer in (0, 2):
        np.testing.assert_array_equal(read(bundle, space.layer(layer)), elsewhere.vector[space.layer(layer)])


def test_a_borrowed_weight_comes_with_the_layer_and_only_once(elsewhere: Elsewhere, tmp_path: Path) -> None:
    bundle = remote(elsewhere, tmp_path)
    stem, space = bundle.manifest.layers[0], bundle.space
    bundle.manifest = replace(
        bundle.manifest, layers=(replace(stem, borrowed=("head.w",)), *bundle.manifest.layers[1:])
    )
    source = RemoteSource(bundle, OFFER)
    source.fetch(0)
    shared = space.slice_of("head.w")
    np.testing.assert_array_equal(read(bundle, shared), elsewhere.vector[shared])
    source.release(0)
    np.testing.assert_array_equal(bundle.weights(OFFER, space.suffix(2)), elsewhere.vector[space.suffix(2)])
    sizes = [stop - start for _, start, stop in (asked for asked in elsewhere.asked if isinstance(asked, tuple))]
    assert sum(sizes) == 4 * (space.layer(0).stop + space.suffix(2).stop - space.suffix(2).start)


def test_an_answer_that_is_too_short_is_no_layer(elsewhere: Elsewhere, tmp_path: Path) -> None:
    bundle = remote(elsewhere, tmp_path)
    elsewhere.short = 8
    with pytest.raises(BundleError, match="bytes of weights"):
        bundle.weights(OFFER, bundle.space.suffix(2))


def test_graphs_travel_once(elsewhere: Elsewhere, tmp_path: Path) -> None:
    boundary = elsewhere.manifest_.boundary("weak")
    assert boundary.train is not None
    for _ in range(2):  # also after the agent was started again
        bundle = remote(elsewhere, tmp_path)
        for _ in range(2):
            bundle.training_files(boundary, "portable")
    assert elsewhere.asked == [boundary.train.sha256]
    expected = (elsewhere.directory / boundary.train.name).read_bytes()
    assert (bundle.directory / boundary.train.name).read_bytes() == expected


def test_a_graph_that_was_changed_on_the_device_is_fetched_again(elsewhere: Elsewhere, tmp_path: Path) -> None:
    train = elsewhere.manifest_.boundary("weak").train
    assert train is not None
    path = remote(elsewhere, tmp_path).file(train)
    path.write_bytes(b"evil")  # the same file as in the cache, by another name
    again = remote(elsewhere, tmp_path).file(train)
    assert hashlib.sha256(again.read_bytes()).hexdigest() == train.sha256 and len(elsewhere.asked) == 2


def test_a_graph_that_was_changed_on_the_way_is_an_error(elsewhere: Elsewhere, tmp_path: Path) -> None:
    elsewhere.tampered = True
    bundle = remote(elsewhere, tmp_path)
    with pytest.raises(BundleError, match="sha256"):
        bundle.training_files(elsewhere.manifest_.boundary("weak"), "portable")
    assert not (bundle.directory / "train.head.onnx").exists()
