"""The bundles that jobs train: sent file by file, checked as a whole, and never changed afterwards."""

from __future__ import annotations

from pathlib import Path

from coordinator.errors import NotFound
from coordinator.store.blobs import Blobs, safe
from edge_runtime.bundle_files import check_bundle, file_ref, read_manifest
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, FileRef, Manifest

_FOLDER = "bundles"


class Bundles:
    """Bundles by the sha256 of their manifest."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._graphs: dict[str, Path] = {}
        self._manifests: dict[str, Manifest] = {}

    def directory(self, digest: str) -> Path:
        return self._blobs.file(_key(digest))

    def manifest(self, digest: str) -> Manifest:
        if digest not in self._manifests:
            self._manifests[digest] = read_manifest(self.directory(digest))
        return self._manifests[digest]

    def checked(self, digest: str) -> Manifest:
        """Read the manifest and check every file of a bundle."""
        manifest = read_manifest(self.directory(digest))
        check_bundle(self.directory(digest), manifest)
        return manifest

    def file(self, digest: str, name: str) -> Path:
        return self.directory(digest) / name

    def graph(self, sha256: str) -> Path:
        """Find a graph of any bundle."""
        if sha256 not in self._graphs:
            for directory in map(self._blobs.file, self._blobs.list(_FOLDER)):
                if (directory / MANIFEST_NAME).is_file() and not directory.name.endswith(".draft"):
                    manifest = read_manifest(directory)
                    known = [file for file in manifest.files() if file != manifest.weights]
                    self._graphs |= {file.sha256: directory / file.name for file in known}
        if sha256 not in self._graphs:
            raise NotFound(f"there is no graph {sha256!r}")
        return self._graphs[sha256]

    def draft_file(self, digest: str, name: str) -> Path:
        """Return where to write a file of a bundle that is being sent."""
        path = self._blobs.draft(_key(digest)) / FileRef(name, "0" * 64, 0).name  # which refuses ways out of it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BundleError(f"{name!r}: there is a file where it needs a folder") from None
        if path.is_dir():
            raise BundleError(f"{name!r} is a folder already")
        return path

    def complete(self, digest: str) -> None:
        """Check the files that were sent and give the bundle its key."""
        draft = self._blobs.draft(_key(digest))
        if self.directory(digest).is_dir():
            self._blobs.delete(f"{_key(digest)}.draft")
            return
        manifest = read_manifest(draft)
        if file_ref(draft, MANIFEST_NAME).sha256 != digest:
            raise BundleError(f"the manifest that came does not have the sha256 {digest}")
        check_bundle(draft, manifest)
        self._blobs.commit(draft, _key(digest))


def _key(digest: str) -> str:
    return f"{_FOLDER}/{safe(digest)}"
