"""Versions of the weights and of the server's state: files that are copied and changed block by block.

Memory does not grow with the model: old and new are files, and only a block of each is in use.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.store.blobs import Blobs, safe
from coordinator.store.sums import write_sums
from edge_runtime.bundle_files import map_weights, write_weights
from edge_runtime.files import make_folder
from federation.layout import MODEL
from federation.round_sums import RoundSums
from federation.server_step import Change
from federation.space import Parameter, ParameterSpace, Vector
from federation.weights import header

_WEIGHTS = ".safetensors"
_STATE = ".state"
_SUMS = ".sums"  # that the version was made of
_WAITING = ".evaluated"  # to be scored
_BEST = ".best"  # the best so far
_VECTORS = {"weights": _WEIGHTS, "state": _STATE}
_NUMBERED = (_WEIGHTS, _STATE, _SUMS)  # of which only the newest stay


@dataclass(frozen=True)
class VectorReader:
    """Read blocks of a vector in a file. They are not mapped: pages of a map would stay in memory."""

    path: Path
    start: int  # bytes

    def __getitem__(self, at: slice, /) -> Vector:
        return np.fromfile(self.path, "<f4", at.stop - at.start, offset=self.start + 4 * at.start)


class Versions:
    """The versions of every job, numbered from 0. `names` are those of the state's vectors."""

    def __init__(self, blobs: Blobs, more: int = 0) -> None:
        """`more`: how many versions stay of those that are done with."""
        self._blobs = blobs
        self._more = more

    def weights(self, job: str, version: int) -> Path:
        return self._blobs.file(_key(job, version, _WEIGHTS))

    def sums(self, job: str, version: int) -> Path:
        """Return the sums that a version was made of (sums.py); they need not be there."""
        return self._blobs.file(_key(job, version, _SUMS))

    def files(self, job: str, version: int) -> dict[str, Path]:
        """Return where the weights and the state of a version are; either need not be there."""
        return {name: self._blobs.file(_key(job, version, kind)) for name, kind in _VECTORS.items()}

    def keep_sums(self, job: str, version: int, sums: RoundSums, devices: int) -> None:
        """Keep the sums that a version is made of, before it is there; `devices` have taken part in the job."""
        draft = self._blobs.draft(_key(job, version, _SUMS))
        write_sums(draft, sums, devices)
        self._blobs.commit(draft, _key(job, version, _SUMS))

    def url(self, job: str, version: int) -> str | None:
        """Sign a URL from which devices can read the weights of a version themselves; None if they have to ask here."""
        return self._blobs.download_url(_key(job, version, _WEIGHTS))

    def create(self, job: str, weights: Path, vectors: Mapping[str, Vector]) -> None:
        """Make version 0 of a job from the weights of its bundle; an algorithm without state has no file of it."""
        draft = self._blobs.draft(_key(job, 0, _WEIGHTS))
        make_folder(draft.parent)
        shutil.copyfile(weights, draft)
        self._blobs.commit(draft, _key(job, 0, _WEIGHTS))
        if vectors:
            space = state_space(vectors, next(iter(vectors.values())).size)
            draft = self._blobs.draft(_key(job, 0, _STATE))
            write_weights(draft, space, space.flatten(vectors))
            self._blobs.commit(draft, _key(job, 0, _STATE))

    def open(self, job: str, version: int, space: ParameterSpace, names: Iterable[str]) -> dict[str, Vector]:
        """Map the model and the state's vectors of a version; nothing is read before it is used."""
        found = {MODEL: map_weights(self.weights(job, version), space)}
        state = state_space(names, space.size)
        if state.layers:
            vector = map_weights(self._blobs.file(_key(job, version, _STATE)), state)
            found |= {parameter.name: vector[state.slice_of(parameter.name)] for parameter in state}
        return found

    def read(self, job: str, version: int, space: ParameterSpace, names: Iterable[str]) -> dict[str, VectorReader]:
        """Open the same to be read block by block."""
        self.open(job, version, space, names)  # which refuses what is not of this model
        places = _places(space, state_space(names, space.size))
        return {
            name: VectorReader(self._blobs.file(_key(job, version, _kind(name))), at) for name, at in places.items()
        }

    def write_next(
        self, job: str, version: int, space: ParameterSpace, names: Iterable[str], changes: Iterable[Change]
    ) -> None:
        """Write the version after `version`: a copy with these changes. What no device trained stays bit by bit."""
        state = state_space(names, space.size)
        starts = _places(space, state)
        drafts: dict[str, Path] = {}
        with contextlib.ExitStack() as stack:
            opened = {}
            for kind in (_WEIGHTS, _STATE) if state.layers else (_WEIGHTS,):
                drafts[kind] = self._blobs.draft(_key(job, version + 1, kind))
                shutil.copyfile(self._blobs.file(_key(job, version, kind)), drafts[kind])
                opened[kind] = stack.enter_context(drafts[kind].open("r+b"))
            for name, at, values in changes:
                file = opened[_kind(name)]
                file.seek(starts[name] + 4 * at.start)
                file.write(values.astype("<f4", copy=False).data)
        for kind in reversed(drafts):  # the weights last: with them the version is there
            self._blobs.commit(drafts[kind], _key(job, version + 1, kind))

    def forget(self, job: str, before: int) -> None:
        """Delete older versions, also one that was left over when the process was killed."""
        self.forget_these(job, [number for number in self.stored(job) if number < before - self._more])

    def forget_these(self, job: str, versions: Collection[int]) -> None:
        """Delete some versions; what is kept for scoring, or as the best, stays.

        With a version go the sums that lead from it to the next: they are of no use without it.
        """
        gone = {(number, kind) for number in versions for kind in _NUMBERED}
        gone |= {(number + 1, _SUMS) for number in versions}
        self._blobs.delete(*(_key(job, number, kind) for number, kind in self._list(job) if (number, kind) in gone))

    def stored(self, job: str) -> list[int]:
        """List the versions that are there, those left out that are kept for scoring or as the best alone."""
        return sorted({number for number, kind in self._list(job) if kind in _NUMBERED})

    def folder(self, job: str) -> str:
        """Return the key below which all versions of a job are."""
        return f"jobs/{safe(job)}"

    def delete(self, job: str) -> None:
        """Remove all that there is of a job."""
        self._blobs.delete(self.folder(job))

    def keep_for_scoring(self, job: str, version: int) -> Path:
        """Give the weights of a version a second key, which stays until they are scored."""
        self._blobs.link(_key(job, version, _WEIGHTS), _key(job, version, _WAITING))
        return self._blobs.file(_key(job, version, _WAITING))

    def release_scored(self, job: str, version: int) -> None:
        self._blobs.delete(_key(job, version, _WAITING))

    def keep_best(self, job: str, version: int) -> None:
        """Give the weights of a version a key under which they stay when newer versions come."""
        self._blobs.link(self._any_key(job, version), _key(job, version, _BEST))

    def forget_best(self, job: str, besides: int | None) -> None:
        """Delete what was kept as the best, but for one version."""
        old = [number for number, kind in self._list(job) if kind == _BEST and number != besides]
        self._blobs.delete(*(_key(job, number, _BEST) for number in old))

    def find(self, job: str, version: int) -> Path:
        """Return the weights of a version, under whatever key they are; they need not be there."""
        return self._blobs.file(self._any_key(job, version))

    def _any_key(self, job: str, version: int) -> str:
        keys = [_key(job, version, kind) for kind in (_WEIGHTS, _BEST, _WAITING)]
        return next((key for key in keys if self._blobs.file(key).is_file()), keys[0])

    def numbers(self, job: str) -> list[int]:
        """List the versions whose weights are there and may have to be scored."""
        return sorted({number for number, kind in self._list(job) if kind in (_WEIGHTS, _WAITING)})

    def kept(self, job: str) -> list[int]:
        """List the versions whose weights can be fetched."""
        return sorted({number for number, kind in self._list(job) if kind not in (_STATE, _SUMS)})

    def _list(self, job: str) -> list[tuple[int, str]]:
        """The number and the kind of every file of a job, drafts left out."""
        names = (key.rpartition("/")[2] for key in self._blobs.list(f"jobs/{safe(job)}/versions"))
        found = (name.partition(".") for name in names)
        return [
            (int(number), dot + kind)
            for number, dot, kind in found
            if number.isdigit() and dot + kind in (*_NUMBERED, _WAITING, _BEST)
        ]


def state_space(names: Iterable[str], size: int) -> ParameterSpace:
    """Lay the state's vectors out as one file: each as long as the model, one behind the other."""
    return ParameterSpace([[Parameter(name, "weight", (size,))] for name in names])


def _key(job: str, version: int, kind: str) -> str:
    return f"jobs/{safe(job)}/versions/{version}{kind}"


def _kind(vector: str) -> str:
    return _WEIGHTS if vector == MODEL else _STATE


def _places(space: ParameterSpace, state: ParameterSpace) -> dict[str, int]:
    """Where each vector begins in its file, in bytes."""
    state_start = len(header(state))
    return {MODEL: len(header(space)), **{p.name: state_start + 4 * state.slice_of(p.name).start for p in state}}
