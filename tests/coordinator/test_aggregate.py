"""The server's step on files, against numpy."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate import BodyOnDisk, first_state, forget_versions, open_version, stored_version, write_version
from coordinator.store.files import Files
from edge_runtime.bundle_files import map_weights, write_weights
from federation import server_step as stepping
from federation.accumulate import Accumulator
from federation.axes.serve import Average, RoundFacts
from federation.errors import BundleError
from federation.layout import MODEL, layers_layout
from federation.region import Run, of_layers, whole
from federation.robust import robust_moves
from federation.server_step import Change, mean_moves, server_step
from federation.space import Parameter, ParameterSpace, Vector
from federation.wire import Limits, UpdateDecoder, encode_layers

SPACE = ParameterSpace([[Parameter("a", "weight", (7,))], [], [Parameter("b", "weight", (4, 5))]])
FACTS = RoundFacts(0.1)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """With a job and its version 0."""
    files = Files(tmp_path)
    path = files.version("job", 0)
    path.parent.mkdir(parents=True)
    write_weights(path, SPACE, np.random.default_rng(0).normal(size=SPACE.size).astype(np.float32))
    return files


def weights(files: Files, version: int) -> Vector:
    return np.array(map_weights(files.version("job", version), SPACE))


def step(files: Files, total: Accumulator, rate: float) -> None:
    """Version 1: the mean, `rate` times."""
    before = stored_version(files, "job", 0, SPACE, ())
    changes = server_step(Average(rate), mean_moves(total, SPACE), before, FACTS)
    write_version(files, "job", 0, SPACE, (), changes)


def names(files: Files) -> list[str]:
    return sorted(path.name for path in files.version("job", 0).parent.iterdir())


@pytest.mark.parametrize("block", [1, 3, 1 << 18])
def test_a_step_block_by_block_is_the_step(files: Files, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(stepping, "BLOCK", block)
    total = Accumulator(SPACE, max_value=8, max_weight=8)
    rows = np.random.default_rng(1).normal(size=(2, SPACE.size)).astype(np.float32)
    for weight, row in zip((1.0, 3.0), rows):
        blocks = [(Run(0, 1, SPACE.size, SPACE.size), row)]
        total.fold(whole(SPACE), blocks, weight, [0.0] * 3, largest=float(np.abs(row).max()))
    step(files, total, 0.5)
    before = weights(files, 0).astype(np.float64)
    expected = before + 0.5 * (rows[0].astype(np.float64) + 3 * rows[1].astype(np.float64)) / 4
    np.testing.assert_array_max_ulp(weights(files, 1), expected.astype(np.float32), maxulp=1)
    assert names(files) == ["0.safetensors", "1.safetensors"]


def test_layers_without_weight_do_not_appear(files: Files) -> None:
    total = Accumulator(SPACE, max_value=8, max_weight=8)
    last = of_layers(SPACE, [2])
    total.fold(last, [(Run(7, 1, 20, 20), np.ones(20, np.float32))], 1.0, [0, 0, 20.0], largest=1)
    assert [move.at for move in mean_moves(total, SPACE)] == [slice(7, 27)]
    step(files, total, 1.0)
    assert weights(files, 1)[:7].tobytes() == weights(files, 0)[:7].tobytes()


def test_a_step_that_breaks_off_leaves_no_version_and_the_old_one_whole(files: Files) -> None:
    new, bytes_before = files.version("job", 1), files.version("job", 0).read_bytes()
    ones = np.ones(3, np.float32)

    def changes() -> Iterator[Change]:
        yield MODEL, slice(0, 3), ones
        raise OSError("no space")

    with pytest.raises(OSError):
        write_version(files, "job", 0, SPACE, (), changes())
    assert not new.exists() and files.version("job", 0).read_bytes() == bytes_before
    write_version(files, "job", 0, SPACE, (), [(MODEL, slice(1, 4), ones)])  # over what the draft left behind
    expected = weights(files, 0)
    expected[1:4] = 1
    np.testing.assert_array_equal(weights(files, 1), expected)


def test_a_version_of_another_model_is_refused(files: Files) -> None:
    other = ParameterSpace([[Parameter("c", "weight", (27,))]])
    write_weights(files.version("job", 0), other, np.zeros(27, np.float32))
    with pytest.raises(BundleError):
        step(files, Accumulator(SPACE, max_value=8, max_weight=8), 1.0)
    assert not files.version("job", 1).exists()


def test_the_state_is_beside_the_weights_and_goes_with_them(files: Files) -> None:
    vectors = {"first": np.full(27, 0.5, np.float32), "second": np.arange(27, dtype=np.float32)}
    first_state(files, "job", vectors)
    changes = [("second", slice(3, 5), np.full(2, -1, np.float32)), (MODEL, slice(26, 27), np.zeros(1, np.float32))]
    write_version(files, "job", 0, SPACE, vectors, changes)
    old, new = (open_version(files, "job", version, SPACE, vectors) for version in (0, 1))
    for name, vector in vectors.items():
        np.testing.assert_array_equal(old[name], vector)
    np.testing.assert_array_equal(new["first"], vectors["first"])
    assert new["second"].tolist() == [0, 1, 2, -1, -1, *range(5, 27)]
    np.testing.assert_array_equal(new[MODEL], [*old[MODEL][:26], 0])
    for name, vector in stored_version(files, "job", 1, SPACE, vectors).items():
        np.testing.assert_array_equal(np.concatenate([vector[slice(0, 4)], vector[slice(4, 27)]]), new[name])
    assert names(files) == ["0.safetensors", "0.state", "1.safetensors", "1.state"]
    forget_versions(files, "job", before=1)
    assert names(files) == ["1.safetensors", "1.state"]


def test_an_algorithm_without_state_has_no_file(files: Files) -> None:
    first_state(files, "job", {})
    assert names(files) == ["0.safetensors"] and list(open_version(files, "job", 0, SPACE, ())) == [MODEL]


def test_a_cohort_may_be_larger_than_the_number_of_files_that_may_be_open(tmp_path: Path) -> None:
    updates = []
    for number in range(301):
        decoder, path = UpdateDecoder(layers_layout(SPACE, 0), Limits()), tmp_path / f"{number}.body"
        path.write_bytes(b"".join(map(bytes, encode_layers(SPACE, 0, np.full(27, number, np.float32)))))
        decoder.feed(path.read_bytes())
        updates.append((decoder.finish().model, BodyOnDisk(path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        assert all((move.values == 150).all() for move in robust_moves(updates, "median", 0.1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
