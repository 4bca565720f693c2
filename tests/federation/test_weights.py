"""The weights file: its bytes, and that other readers understand them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from federation.errors import BundleError
from federation.space import Parameter, ParameterSpace
from federation.weights import ALIGNMENT, header, map_weights, places, write_weights

SPACE = ParameterSpace(
    [
        [Parameter("b", "weight", (2, 2)), Parameter("b.mean", "statistic", (2,))],
        [Parameter("a", "weight", (3,)), Parameter("s", "weight", ())],
    ]
)
VECTOR = np.arange(10, dtype=np.float32) / 8

GOLDEN_HEADER = (
    b"\xf8\x00\x00\x00\x00\x00\x00\x00"
    b'{"b":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"b.mean":{"dtype":"F32","shape":[2],"data_offsets":[16,24]},'
    b'"a":{"dtype":"F32","shape":[3],"data_offsets":[24,36]},'
    b'"s":{"dtype":"F32","shape":[],"data_offsets":[36,40]}}'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    write_weights(path, SPACE, VECTOR)
    return path


def test_golden_bytes(file: Path) -> None:
    data = file.read_bytes()
    assert data.startswith(GOLDEN_HEADER)
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % ALIGNMENT == 0
    assert data[len(GOLDEN_HEADER) : 8 + length].strip(b" ") == b""
    assert data[8 + length :] == VECTOR.astype("<f4").tobytes()


def test_any_safetensors_reader_opens_it(file: Path) -> None:
    tensors = load_file(file)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {p.name: p.shape for p in SPACE}
    assert np.array_equal(SPACE.flatten(tensors), VECTOR)


def test_places_are_offsets_into_the_file(file: Path) -> None:
    data = file.read_bytes()
    for name, (offset, length) in places(SPACE).items():
        assert data[offset : offset + length] == VECTOR[SPACE.slice_of(name)].tobytes()


def test_mapping_gives_the_vector_back_read_only(file: Path) -> None:
    vector = map_weights(file, SPACE)
    assert np.array_equal(vector, VECTOR)
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 1


def test_a_space_without_parameters(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_weights(path, ParameterSpace([]), np.zeros(0, np.float32))
    assert map_weights(path, ParameterSpace([])).size == 0


@pytest.mark.parametrize("vector", [np.zeros(10), np.zeros(9, np.float32)])
def test_writing_refuses_another_vector(tmp_path: Path, vector: np.ndarray) -> None:
    with pytest.raises(BundleError, match="expected 10 float32 weights"):
        write_weights(tmp_path / "w", SPACE, vector)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot read .*nothing\.safetensors"):
        map_weights(tmp_path / "nothing.safetensors", SPACE)


@pytest.mark.parametrize("damage", ["cut", "longer", "other names", "empty"])
def test_a_file_that_is_not_what_the_manifest_describes(file: Path, damage: str) -> None:
    data = file.read_bytes()
    damaged = {
        "cut": data[:-1],
        "longer": data + b"\0",
        "other names": data.replace(b'"b.mean"', b'"b.meen"'),
        "empty": b"",
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(BundleError, match="does not hold the weights"):
        map_weights(file, SPACE)


def test_the_header_is_json() -> None:
    text = header(SPACE)[8:]
    assert list(json.loads(text)) == ["b", "b.mean", "a", "s"]
