"""The bundles that jobs train: sent file by file, checked as a whole, and never changed afterwards."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from coordinator.errors import NotFound
from coordinator.store.blobs import Blobs, safe
from edge_runtime.bundle_files import check_bundle, file_ref, read_manifest
from federation.errors import BundleError
from federation.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileRef, Manifest
from federation.signature import MAX_SIGNATURE_BYTES, SIGNATURE_NAME, signer_of

_FOLDER = "bundles"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Bundles:
    """Bundles by the sha256 of their manifest."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._graphs: dict[str, Path] = {}
        self._manifests: dict[str, Manifest] = {}

    def key(self, digest: str) -> str:
        return _key(digest)

    def forget(self, digest: str) -> None:
        """Forget what is known of a bundle that was removed."""
        self._manifests.pop(digest, None)
        self._graphs = {}

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

    def known(self) -> dict[str, Manifest]:
        """List the complete bundles by the sha256 of their manifest; those of another program's form are left out."""
        found = {}
        for digest in (key.rpartition("/")[2] for key in self._blobs.list(_FOLDER)):
            if _DIGEST.fullmatch(digest):
                with suppress(BundleError):
                    found[digest] = self.manifest(digest)
        return found

    def graph(self, sha256: str) -> Path:
        """Find a graph of any bundle."""
        if sha256 not in self._graphs:
            for key in self._blobs.list(_FOLDER):
                directory = self._blobs.file(key) if not key.endswith(".draft") else Path()
                if (directory / MANIFEST_NAME).is_file():
                    manifest = read_manifest(directory)
                    known = [file for file in manifest.files() if file != manifest.weights]
                    self._graphs |= {file.sha256: directory / file.name for file in known}
        if sha256 not in self._graphs:
            raise NotFound(f"there is no graph {sha256!r}")
        return self._graphs[sha256]

    def draft_file(self, digest: str, name: str) -> tuple[Path, int]:
        """Return where to write a file of a bundle that is being sent, and the most bytes that it can have.

        The manifest comes first: a bundle holds the files that it names, a signature, and no others.
        """
        draft = self._blobs.draft(_key(digest))
        if name == SIGNATURE_NAME:
            most = MAX_SIGNATURE_BYTES
        else:
            most = MAX_MANIFEST_BYTES if name == MANIFEST_NAME else self._named(digest, name).bytes
        path = draft / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, most

    def _named(self, digest: str, name: str) -> FileRef:
        if digest not in self._manifests:
            try:
                self._manifests[digest] = self._draft_manifest(digest)
            except BundleError:
                message = f"{name[:200]!r}: send {MANIFEST_NAME} first, it says which files belong to a bundle"
                raise BundleError(message) from None
        found = next((file for file in self._manifests[digest].files() if file.name == name), None)
        if found is None:
            raise BundleError(f"{name[:200]!r} is no file of this bundle: its manifest does not name it")
        return found

    def arrived(self, digest: str, name: str) -> None:
        """Look at a file that was sent: a manifest or a signature that is not the bundle's goes at once."""
        if name == MANIFEST_NAME:
            try:
                self._manifests[digest] = self._draft_manifest(digest)
            except BundleError:
                self._blobs.delete(f"{_draft(digest)}/{name}")
                raise
        elif name == SIGNATURE_NAME:
            sent = self._blobs.draft(_key(digest)) / name
            try:
                signer_of(sent.read_bytes(), digest)
            except BundleError:
                sent.unlink()
                raise
        self._blobs.share(f"{_draft(digest)}/{name}")

    def _draft_manifest(self, digest: str) -> Manifest:
        draft = self._blobs.gather(_draft(digest))
        manifest = read_manifest(draft)
        if file_ref(draft, MANIFEST_NAME).sha256 != digest:
            raise BundleError(f"the manifest that came does not have the sha256 {digest}")
        return manifest

    def complete(self, digest: str) -> None:
        """Check the files that were sent and give the bundle its key."""
        draft = self._blobs.gather(_draft(digest))
        if self.directory(digest).is_dir():
            if (draft / SIGNATURE_NAME).is_file():  # it may come later than the bundle, and from another key
                self._blobs.commit(draft / SIGNATURE_NAME, f"{_key(digest)}/{SIGNATURE_NAME}")
            self._blobs.delete(_draft(digest))
            return
        manifest = self._draft_manifest(digest)
        check_bundle(draft, manifest)
        named = {draft / name for name in (MANIFEST_NAME, SIGNATURE_NAME, *(file.name for file in manifest.files()))}
        for path in [path for path in draft.rglob("*") if path.is_file() and path not in named]:
            path.unlink()  # left by an earlier program, which took any file
        self._blobs.commit(draft, _key(digest))
        self._blobs.delete(_draft(digest))


def _draft(digest: str) -> str:
    return f"{_key(digest)}.draft"


def _key(digest: str) -> str:
    return f"{_FOLDER}/{safe(digest)}"
