"""A bundle with other weights: what comes out of training on a device."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import file_ref
from edge_runtime.files import disk_errors, flush, link_file
from federation.errors import InputError
from federation.manifest import MANIFEST_NAME, Manifest, dumps
from federation.space import Vector
from federation.weights import header


def check_target(out: Path) -> None:
    """Refuse to write over something before the work is done, not after."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; choose another --out or remove it")


def write_trained(directory: Path, manifest: Manifest, first_layer: int, trained: Vector, out: Path) -> Manifest:
    """Copy a bundle with new weights from one layer on; it appears under its name only when it is complete."""
    check_target(out)
    no_room = f"no room for the trained bundle in {out.parent}"
    with disk_errors(no_room=no_room, otherwise=f"cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            draft = Path(folder) / "bundle"
            draft.mkdir()
            for kept in manifest.files():
                if kept != manifest.weights:
                    link_file(directory / kept.name, draft / kept.name)
            weights = draft / manifest.weights.name
            shutil.copyfile(directory / manifest.weights.name, weights)
            with weights.open("r+b") as file:
                file.seek(len(header(manifest.space)) + 4 * manifest.space.suffix(first_layer).start)
                file.write(np.ascontiguousarray(trained, "<f4").data)
                flush(file)
            new = replace(manifest, weights=file_ref(draft, manifest.weights.name))
            (draft / MANIFEST_NAME).write_bytes(dumps(new).encode())
            if out.exists():
                out.rmdir()
            draft.rename(out)
    return new
