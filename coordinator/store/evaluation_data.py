"""The samples that versions are scored on: uploaded ones by their sha256, and those in a folder of the operator.

A request over the API can name nothing else of this machine, and learns nothing about other paths.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from coordinator.credentials import new_id
from coordinator.store.blobs import Blobs
from edge_runtime.sample_file import check_samples, open_samples
from federation.errors import DataError, InputError
from federation.job import ON_COORDINATOR, UPLOADED
from federation.manifest import Manifest

_FOLDER, _KIND = "data", ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_. @-]{0,119}"
_NAME = re.compile(rf"(?:{_PART}/){{0,4}}{_PART}")
_REFUSED = (
    f"evaluate.data: expected {UPLOADED}DIGEST of data that was uploaded, or {ON_COORDINATOR}NAME of a file in the "
    "operator's folder (embrace serve --evaluation-data DIR)"
)


class EvaluationData:
    """Find evaluation data by reference, and keep what is uploaded."""

    def __init__(self, blobs: Blobs, folder: Path | None = None) -> None:
        self._blobs = blobs
        self._folder = folder

    def arriving(self, digest: str) -> Path:
        """Return a new place for data that is being sent."""
        if not _DIGEST.fullmatch(digest):
            raise InputError(f"{digest[:80]!r}: expected the sha256 of the data, 64 hexadecimal digits")
        return self._blobs.draft(f"{_key(digest)}.{new_id()}", ".part")

    def commit(self, draft: Path, digest: str, found: str) -> dict[str, Any]:
        """Check what has arrived and keep it; return its description."""
        if found != digest:
            raise DataError(f"the data that came has the sha256 {found}, expected {digest}; send it again")
        check_samples(draft)
        self._blobs.commit(draft, _key(digest))
        return self._describe(digest)

    def known(self) -> list[dict[str, Any]]:
        names = sorted(key.rpartition("/")[2] for key in self._blobs.list(_FOLDER))
        digests = [name.removesuffix(_KIND) for name in names if name.endswith(_KIND)]
        return [self._describe(digest) for digest in digests if _DIGEST.fullmatch(digest)]

    def _describe(self, digest: str) -> dict[str, Any]:
        return {"sha256": digest, "bytes": self._blobs.file(_key(digest)).stat().st_size}

    def find(self, reference: str) -> Path:
        """Return the file or folder of a reference; anything that is neither kind has the same answer."""
        if _DIGEST.fullmatch(digest := reference.removeprefix(UPLOADED)) and reference.startswith(UPLOADED):
            path = self._blobs.file(_key(digest))
            if not path.is_file():
                raise InputError(f"evaluate.data: {reference} was not uploaded; send it first")
            return path
        if reference.startswith(ON_COORDINATOR) and self._folder is not None:
            return self._named(reference.removeprefix(ON_COORDINATOR), self._folder.resolve())
        raise InputError(_REFUSED)

    def _named(self, name: str, folder: Path) -> Path:
        found = (folder / name).resolve() if _NAME.fullmatch(name) else folder
        if folder not in found.parents or found.suffix.lower() == ".py" or not found.exists():
            raise InputError(f"evaluate.data: the operator's folder has no data {name[:200]!r}")
        return found

    def check(self, reference: str | None, manifest: Manifest) -> None:
        """Refuse a job whose evaluation data is not here, or was uploaded and does not fit the model."""
        if reference is not None:
            path = self.find(reference)
            if reference.startswith(UPLOADED):
                open_samples(path, manifest, "evaluate.data")

    def keys(self, reference: str | None) -> list[str]:
        """List the keys of uploaded data; what lies in the operator's folder is the operator's."""
        digest = (reference or "").removeprefix(UPLOADED)
        return [_key(digest)] if reference and reference != digest and _DIGEST.fullmatch(digest) else []

    def clean(self) -> None:
        """Remove what was on its way when the process ended."""
        self._blobs.delete(*(key for key in self._blobs.list(_FOLDER) if key.endswith(".part")))


def _key(digest: str) -> str:
    return f"{_FOLDER}/{digest}{_KIND}"
