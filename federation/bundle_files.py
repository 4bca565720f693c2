"""The files of a bundle and whether they are what its manifest says."""

from __future__ import annotations

import hashlib
from pathlib import Path

from federation.errors import BundleError
from federation.manifest import FileRef, Manifest

_CHUNK = 1 << 20


def file_ref(directory: Path, name: str) -> FileRef:
    """A file of a bundle as it is on disk; read piece by piece, because weights may be larger than memory."""
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
