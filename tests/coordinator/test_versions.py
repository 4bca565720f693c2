"""The server's step on files, against numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.versions import Versions
from edge_runtime.bundle_files import map_weights, write_weights
from federation import server_step as stepping
from federation.accumulate import Accumulator
from federation.axes.serve import Average, RoundFacts
from federation.errors import BundleError
from federation.layout import MODEL
from federation.region import Span, of_layers, whole
from federation.server_step import Change, mean_moves, server_step
from federation.space import Parameter, ParameterSpace, Vector

SPACE = ParameterSpace([[Parameter("a", "weight", (7,))], [], [Parameter("b", "weight", (4, 5))]])
FACTS = RoundFacts(0.1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The weights of a bundle."""
    path = tmp_path / "weights"
    write_weights(path, SPACE, np.random.default_rng(0).normal(size=SPACE.size).astype(np.float32))
    return path


@pytest.fixture
def versions(tmp_path: Path, source: Path) -> Versions:
    """With a job and its version 0."""
    versions = Versions(DirectoryBlobs(tmp_path))
    versions.create("job", source, {})
    return versions


def weights(versions: Versions, version: int) -> Vector:
    return np.array(map_weights(versions.weights("job", version), SPACE))


def step(versions: Versions, total: Accumulator, rate: float) -> None:
    """Version 1: the mean, `rate` times."""
    before = versions.read("job", 0, SPACE, ())
    changes = server_step(Average(rate), mean_moves(total, SPACE), before, FACTS)
    versions.write_next("job", 0, SPACE, (), changes)


def names(versions: Versions) -> list[str]:
    return sorted(path.name for path in versions.weights("job", 0).parent.iterdir())


@pytest.mark.parametrize("block", [1, 3, 1 << 18])
def test_a_step_block_by_block_is_the_step(versions: Versions, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(stepping, "BLOCK", block)
    total = Accumulator(SPACE, max_value=8, max_weight=8)
    rows = np.random.default_rng(1).normal(size=(2, SPACE.size)).astype(np.float32)
    for weight, row in zip((1.0, 3.0), rows):
        blocks = [(Span(0, 1, SPACE.size, SPACE.size), row)]
        total.fold(whole(SPACE), blocks, weight, {}, largest=float(np.abs(row).max()))
    step(versions, total, 0.5)
    before = weights(versions, 0).astype(np.float64)
    expected = before + 0.5 * (rows[0].astype(np.float64) + 3 * rows[1].astype(np.float64)) / 4
    np.testing.assert_array_max_ulp(weights(versions, 1), expected.astype(np.float32), maxulp=1)
    assert names(versions) == ["0.safetensors", "1.safetensors"]


def test_layers_without_weight_do_not_appear(versions: Versions) -> None:
    total = Accumulator(SPACE, max_value=8, max_weight=8)
    last = of_layers(SPACE, [2])
    total.fold(last, [(Span(7, 1, 20, 20), np.ones(20, np.float32))], 1.0, {}, largest=1)
    assert [move.at for move in mean_moves(total, SPACE)] == [slice(7, 27)]
    step(versions, total, 1.0)
    assert weights(versions, 1)[:7].tobytes() == weights(versions, 0)[:7].tobytes()


def test_a_step_that_breaks_off_leaves_no_version_and_the_old_one_whole(versions: Versions) -> None:
    new, bytes_before = versions.weights("job", 1), versions.weights("job", 0).read_bytes()
    ones = np.ones(3, np.float32)

    def changes() -> Iterator[Change]:
        yield MODEL, slice(0, 3), ones
        raise OSError("no space")

    with pytest.raises(OSError):
        versions.write_next("job", 0, SPACE, (), changes())
    assert not new.exists() and versions.weights("job", 0).read_bytes() == bytes_before
    versions.write_next("job", 0, SPACE, (), [(MODEL, slice(1, 4), ones)])  # over what the draft left behind
    expected = weights(versions, 0)
    expected[1:4] = 1
    np.testing.assert_array_equal(weights(versions, 1), expected)


def test_a_version_of_another_model_is_refused(versions: Versions) -> None:
    other = ParameterSpace([[Parameter("c", "weight", (27,))]])
    write_weights(versions.weights("job", 0), other, np.zeros(27, np.float32))
    with pytest.raises(BundleError):
        step(versions, Accumulator(SPACE, max_value=8, max_weight=8), 1.0)
    assert not versions.weights("job", 1).exists()


def test_the_state_is_beside_the_weights_and_goes_with_them(tmp_path: Path, source: Path) -> None:
    versions = Versions(DirectoryBlobs(tmp_path))
    vectors = {"first": np.full(27, 0.5, np.float32), "second": np.arange(27, dtype=np.float32)}
    versions.create("job", source, vectors)
    changes = [("second", slice(3, 5), np.full(2, -1, np.float32)), (MODEL, slice(26, 27), np.zeros(1, np.float32))]
    versions.write_next("job", 0, SPACE, vectors, changes)
    old, new = (versions.open("job", version, SPACE, vectors) for version in (0, 1))
    for name, vector in vectors.items():
        np.testing.assert_array_equal(old[name], vector)
    np.testing.assert_array_equal(new["first"], vectors["first"])
    assert new["second"].tolist() == [0, 1, 2, -1, -1, *range(5, 27)]
    np.testing.assert_array_equal(new[MODEL], [*old[MODEL][:26], 0])
    for name, vector in versions.read("job", 1, SPACE, vectors).items():
        np.testing.assert_array_equal(np.concatenate([vector[slice(0, 4)], vector[slice(4, 27)]]), new[name])
    assert names(versions) == ["0.safetensors", "0.state", "1.safetensors", "1.state"]
    versions.forget("job", before=1)
    assert names(versions) == ["1.safetensors", "1.state"]


def test_what_waits_for_a_score_stays(versions: Versions) -> None:
    versions.write_next("job", 0, SPACE, (), [])
    kept = versions.keep_for_scoring("job", 0)
    assert versions.keep_for_scoring("job", 0) == kept  # asked for again after a restart
    versions.forget("job", before=1)
    versions.weights("job", 2).with_suffix(".draft").write_bytes(b"")
    assert kept.name == "0.evaluated" and versions.numbers("job") == [0, 1] and versions.numbers("other") == []
    versions.release_scored("job", 0)
    assert names(versions) == ["1.safetensors", "2.draft"]


def test_an_algorithm_without_state_has_no_file(versions: Versions) -> None:
    assert names(versions) == ["0.safetensors"] and list(versions.open("job", 0, SPACE, ())) == [MODEL]
