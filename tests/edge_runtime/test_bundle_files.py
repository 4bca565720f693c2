"""The files of a bundle: what is written, mapped and read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge_runtime.bundle_files import map_weights, read_manifest, write_weights
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, dumps
from federation.space import ParameterSpace
from federation.weights import places
from tests.federation.test_manifest import manifest
from tests.federation.test_weights import GOLDEN_HEADER, HEADER_BYTES, SPACE

VECTOR = np.arange(10, dtype=np.float32) / 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    write_weights(path, SPACE, VECTOR)
    return path


def test_golden_bytes(file: Path) -> None:
    header = GOLDEN_HEADER + b" " * (HEADER_BYTES - len(GOLDEN_HEADER))
    assert file.read_bytes() == header + VECTOR.astype("<f4").tobytes()


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


def test_reading_a_directory(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json; make one with 'embrace export'"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text(dumps(manifest()))
    assert read_manifest(tmp_path) == manifest()
    (tmp_path / MANIFEST_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="cannot read"):
        read_manifest(tmp_path)
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(BundleError, match="larger than 16 MiB"):
        read_manifest(tmp_path)
