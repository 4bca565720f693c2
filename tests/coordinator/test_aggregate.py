"""The server's step on files, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator import aggregate
from coordinator.aggregate import means, write_version
from federation.accumulate import Accumulator
from federation.errors import BundleError
from federation.space import Parameter, ParameterSpace
from federation.weights import map_weights, write_weights

SPACE = ParameterSpace([[Parameter("a", "weight", (7,))], [], [Parameter("b", "weight", (4, 5))]])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "0.safetensors"
    write_weights(path, SPACE, np.random.default_rng(0).normal(size=SPACE.size).astype(np.float32))
    return path


@pytest.mark.parametrize("block", [1, 3, 1 << 18])
def test_a_step_block_by_block_is_the_step(old: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(aggregate, "BLOCK", block)
    total = Accumulator(SPACE, max_value=8, max_weight=8)
    rows = np.random.default_rng(1).normal(size=(2, SPACE.size)).astype(np.float32)
    for weight, row in zip((1.0, 3.0), rows):
        total.fold(0, [(slice(0, SPACE.size), row)], weight, [0.0] * 3, largest=float(np.abs(row).max()))
    new = old.with_name("1.safetensors")
    write_version(old, new, SPACE, means(total, SPACE), 0.5)
    before = np.array(map_weights(old, SPACE), np.float64)
    expected = before + 0.5 * (rows[0].astype(np.float64) + 3 * rows[1].astype(np.float64)) / 4
    np.testing.assert_array_max_ulp(np.array(map_weights(new, SPACE)), expected.astype(np.float32), maxulp=1)
    assert sorted(path.name for path in old.parent.iterdir()) == ["0.safetensors", "1.safetensors"]


def test_layers_without_weight_do_not_appear(old: Path) -> None:
    total = Accumulator(SPACE, max_value=8, max_weight=8)
    total.fold(2, [(slice(7, 27), np.ones(20, np.float32))], 1.0, [20.0], largest=1)
    assert [at for at, _ in means(total, SPACE)] == [slice(7, 27)]
    new = old.with_name("1.safetensors")
    write_version(old, new, SPACE, means(total, SPACE), 1.0)
    assert map_weights(new, SPACE)[:7].tobytes() == map_weights(old, SPACE)[:7].tobytes()


def test_a_step_that_breaks_off_leaves_no_version_and_the_old_one_whole(old: Path) -> None:
    new, bytes_before = old.with_name("1.safetensors"), old.read_bytes()

    def moves():
        yield slice(0, 3), np.ones(3)
        raise OSError("no space")

    with pytest.raises(OSError):
        write_version(old, new, SPACE, moves(), 1.0)
    assert not new.exists() and old.read_bytes() == bytes_before
    write_version(old, new, SPACE, [(slice(0, 3), np.ones(3))], 1.0)  # what the draft left behind is overwritten
    expected = np.array(map_weights(old, SPACE))
    expected[:3] += 1
    np.testing.assert_array_equal(np.array(map_weights(new, SPACE)), expected)


def test_a_version_of_another_model_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "0.safetensors"
    write_weights(other, ParameterSpace([[Parameter("c", "weight", (27,))]]), np.zeros(27, np.float32))
    with pytest.raises(BundleError):
        write_version(other, tmp_path / "1.safetensors", SPACE, [], 1.0)
    assert not (tmp_path / "1.safetensors").exists()
