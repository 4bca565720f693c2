"""A new version of the weights and of the server's state: files that are copied and changed block by block.

Memory does not grow with the model: old and new are files, and only a block of each is in use.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.store.files import Files
from edge_runtime.bundle_files import map_weights, write_weights
from edge_runtime.files import publish
from federation.layout import MODEL
from federation.server_step import Change
from federation.space import Parameter, ParameterSpace, Vector
from federation.weights import header


def state_space(names: Iterable[str], size: int) -> ParameterSpace:
    """The state's vectors as one file: each as long as the model, one behind the other."""
    return ParameterSpace([[Parameter(name, "weight", (size,))] for name in names])


def first_state(files: Files, job: str, vectors: Mapping[str, Vector]) -> None:
    """The state of version 0; an algorithm without one has no file."""
    if vectors:
        space = state_space(vectors, next(iter(vectors.values())).size)
        draft = files.state(job, 0).with_suffix(".state-draft")
        write_weights(draft, space, space.flatten(vectors))
        publish(draft, files.state(job, 0))


def open_version(
    files: Files, job: str, version: int, space: ParameterSpace, names: Iterable[str]
) -> dict[str, Vector]:
    """The model and the state's vectors of a version, mapped and not yet read."""
    found = {MODEL: map_weights(files.version(job, version), space)}
    state = state_space(names, space.size)
    if state.layers:
        vector = map_weights(files.state(job, version), state)
        found |= {parameter.name: vector[state.slice_of(parameter.name)] for parameter in state}
    return found


@dataclass(frozen=True)
class OnDisk:
    """A vector in a file. Its blocks are read and not mapped: pages of a map would stay in memory."""

    path: Path
    start: int  # bytes

    def __getitem__(self, at: slice, /) -> Vector:
        return np.fromfile(self.path, "<f4", at.stop - at.start, offset=self.start + 4 * at.start)


@dataclass(frozen=True)
class BodyOnDisk:
    """The body of an update in a file. It is opened for each read: a cohort may be larger than the limit of files."""

    path: Path

    def values(self, offset: int, count: int) -> Vector:
        return np.fromfile(self.path, "<f4", count, offset=offset)


def stored_version(
    files: Files, job: str, version: int, space: ParameterSpace, names: Iterable[str]
) -> dict[str, OnDisk]:
    """The same to be read block by block."""
    open_version(files, job, version, space, names)  # which refuses what is not of this model
    places = _places(space, state_space(names, space.size))
    paths = {name: (files.version if name == MODEL else files.state)(job, version) for name in places}
    return {name: OnDisk(paths[name], start) for name, start in places.items()}


def write_version(
    files: Files, job: str, version: int, space: ParameterSpace, names: Iterable[str], changes: Iterable[Change]
) -> None:
    """The version after `version`: a copy of it with these changes. What no device trained stays bit by bit."""
    state = state_space(names, space.size)
    spaces = {files.version: space, **({files.state: state} if state.layers else {})}
    drafts, starts = {}, _places(space, state)
    with contextlib.ExitStack() as stack:
        opened = {}
        for place in spaces:
            old, new = place(job, version), place(job, version + 1)
            drafts[place] = new.with_suffix(new.suffix + "-draft")
            shutil.copyfile(old, drafts[place])
            opened[place] = stack.enter_context(drafts[place].open("r+b"))
        for name, at, values in changes:
            file = opened[files.version if name == MODEL else files.state]
            file.seek(starts[name] + 4 * at.start)
            file.write(values.astype("<f4", copy=False).data)
    for place in reversed(drafts):  # the weights last: with them the version is there
        publish(drafts[place], place(job, version + 1))


def _places(space: ParameterSpace, state: ParameterSpace) -> dict[str, int]:
    """Where each vector begins in its file, in bytes."""
    state_start = len(header(state))
    return {MODEL: len(header(space)), **{p.name: state_start + 4 * state.slice_of(p.name).start for p in state}}


def forget_versions(files: Files, job: str, before: int) -> None:
    """All older ones, also one that was left over when the process was killed."""
    for path in files.version(job, 0).parent.glob("*"):
        if path.suffix in (".safetensors", ".state") and path.stem.isdigit() and int(path.stem) < before:
            path.unlink(missing_ok=True)
