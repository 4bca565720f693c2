"""Read, write and check the files of a bundle: the manifest, the weights, and the graphs by their digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from edge_runtime.files import flush, map_part
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileRef, Manifest, loads
from federation.space import ParameterSpace, Vector
from federation.weights import header

_CHUNK = 1 << 20


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a bundle directory."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise BundleError(f"{directory} is not a bundle: it has no {MANIFEST_NAME}; make one with 'embrace export'")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path} is larger than {MAX_MANIFEST_BYTES >> 20} MiB; this is no manifest of ours")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {path}: {error}") from None
    try:
        return loads(text)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None


def own_tokenizer(directory: Path, manifest: Manifest) -> Path | None:
    """Return the tokenizer that a bundle carries, if it has one."""
    return directory / manifest.tokenizer.name if manifest.tokenizer is not None else None


def file_ref(directory: Path, name: str) -> FileRef:
    """Describe a file as it is on disk; it is read in chunks, because weights may be larger than memory."""
    digest, size = hashlib.sha256(), 0
    with (directory / name).open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRef(name, digest.hexdigest(), size)


def check_bundle(directory: Path, manifest: Manifest) -> None:
    """Refuse a bundle with a file that is missing or has other bytes than the manifest says."""
    for expected in manifest.files():
        path = directory / expected.name
        try:
            same = path.stat().st_size == expected.bytes and file_ref(directory, expected.name) == expected
        except OSError:
            same = False
        if not same:
            raise BundleError(f"{path} is missing or differs from the manifest's sha256; export again")


def write_weights(path: Path, space: ParameterSpace, vector: Vector) -> None:
    """Write a weights file and flush it to the disk."""
    if vector.shape != (space.size,) or vector.dtype != np.float32:
        raise BundleError(f"expected {space.size} float32 weights, got {vector.dtype} {vector.shape}")
    with path.open("wb") as file:
        file.write(header(space))
        file.write(np.ascontiguousarray(vector, "<f4").data)
        flush(file)


def map_weights(path: Path, space: ParameterSpace) -> Vector:
    """Map the flat vector read-only: nothing is read before it is used."""
    expected = header(space)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(expected)) == expected and size == len(expected) + 4 * space.size:
                return map_part(file, len(expected), space.size)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None
    raise BundleError(f"{path} does not hold the weights that the manifest describes")


def read_range(path: Path, space: ParameterSpace, where: slice) -> Vector:
    """Read some elements of a weights file, of which others may be missing."""
    return np.fromfile(path, "<f4", where.stop - where.start, offset=len(header(space)) + 4 * where.start)
