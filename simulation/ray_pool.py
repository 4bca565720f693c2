"""Run a pool's jobs on a Ray cluster, for simulations that outgrow one machine: the same jobs, the same results.

Workers are Ray actors. Shared arrays, filled slots and the files of jobs travel through Ray's object store; on one
machine that is shared memory, too. No disk is shared: a worker has a folder of its own, into which the files of a job
are written before it begins, and what the job changes there comes back with its answer. A folder that workers only
read, the bundle, is sent to those whose machine lacks it. Every machine of the cluster needs this project, and Python
files that the settings name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError, MissingPackage
from simulation.pool import END_LIMIT, Arrays, Json, Work, WorkerError, WorkerSpec, one_line

Files = dict[str, bytes]  # by their paths below a folder
Changes = dict[str, bytes | None]  # None: the file is gone


class RayPool:
    """Workers as Ray actors of one processor each."""

    def __init__(self, spec: WorkerSpec, workers: int, address: str | None = None) -> None:
        """`address` of a running cluster; None starts one on this machine, and ends it at the end."""
        try:
            import ray
        except ImportError:
            raise MissingPackage("ray", "ray") from None
        if workers < 1:
            raise InputError(f"workers: expected at least 1, got {workers}")
        self._ray = ray
        self._spec = spec
        self._started = not ray.is_initialized()
        if self._started:
            more: dict[str, Any] = {"address": address} if address else {"num_cpus": workers}
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **more)
        self._shared: dict[str, tuple[int, Any]] = {}  # name -> (how often it was set, where it is)
        self._folder = Path(spec.settings[spec.folder]) if spec.folder else None
        sent = {name: _read_files(Path(spec.settings[name])) for name in spec.reads}
        digests = {name: _digest(files) for name, files in sent.items()}
        places = {name: ray.put(files) for name, files in sent.items()}
        actor = ray.remote(num_cpus=1)(_Actor)
        self._actors = [actor.remote(spec, digests, places) for _ in range(workers)]

    def share(self, name: str, value: NDArray[Any]) -> None:
        spec = self._spec.shared[name]
        array = np.ascontiguousarray(np.broadcast_to(value, spec.shape), spec.dtype)
        version, _ = self._shared.get(name, (0, None))
        self._shared[name] = version + 1, self._ray.put(array)

    def map(self, jobs: Iterable[Json]) -> Iterator[tuple[Json, Arrays]]:
        for name, spec in self._spec.shared.items():
            if name not in self._shared:
                self.share(name, spec.zeros())
        waiting = iter(jobs)
        idle = deque(self._actors)
        busy: dict[Any, Any] = {}
        order: deque[tuple[Any, Json]] = deque()
        done: set[Any] = set()
        exhausted = False
        while True:
            # As many answers as workers may wait for an earlier one: what lies in the store is bounded.
            while idle and not exhausted and len(order) <= 2 * len(self._actors):
                job = next(waiting, None)
                if job is None:
                    exhausted = True
                    break
                actor = idle.popleft()
                versions = {name: version for name, (version, _) in self._shared.items()}
                files = _read_files(self._folder, job.get("files", ())) if self._folder else {}
                values = (place for _, place in self._shared.values())
                answer = actor.run.remote(json.dumps(job), files, versions, *values)
                busy[answer] = actor
                order.append((answer, job))
            if order and order[0][0] in done:
                answer, job = order.popleft()
                done.remove(answer)
                yield self._read(answer, job)
                continue
            if not order:
                return
            ready, _ = self._ray.wait(list(busy), num_returns=1)
            for answer in ready:
                idle.append(busy.pop(answer))
                done.add(answer)

    def _read(self, answer: Any, job: Json) -> tuple[Json, Arrays]:
        try:
            error, reply, slot, changes = self._ray.get(answer)
        except self._ray.exceptions.RayError as problem:
            first = str(problem).strip().splitlines()[0]
            raise WorkerError(f"a worker of the cluster is gone at {str(job)[:120]}: {first}") from None
        if error:
            raise WorkerError(f"a worker of the cluster: {error}")
        if self._folder is not None:
            _write_files(self._folder, changes)
        return json.loads(reply), slot

    def close(self) -> None:
        ended = [actor.close.remote() for actor in self._actors]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=END_LIMIT)
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        self._shared.clear()
        if self._started:
            self._ray.shutdown()
            self._started = False

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Actor:
    """A worker in a process of Ray's."""

    def __init__(self, spec: WorkerSpec, digests: Mapping[str, str], places: Mapping[str, Any]) -> None:
        """`places` has where in the object store the folders are that workers read, `digests` what they hold."""
        self._own = Path(tempfile.mkdtemp(prefix="embrace-worker-"))
        self._folder = self._own / "run"
        self._spec = spec
        self._digests = digests
        self._places = places
        self._shared: Arrays = {name: array.zeros() for name, array in spec.shared.items()}
        self._seen: dict[str, int] = {}
        self._work: Work | None = None

    def run(
        self, job: str, files: Files, versions: dict[str, int], *values: NDArray[Any]
    ) -> tuple[str, str, Arrays, Changes]:
        """Do a job. Jobs and answers are JSON, as through a pipe: what they say does not depend on the pool."""
        slot: Arrays = {name: array.zeros() for name, array in self._spec.slot.items()}
        try:
            for (name, version), value in zip(versions.items(), values, strict=True):
                if self._seen.get(name) != version:
                    self._shared[name][...] = value  # in place: the work holds views
                    self._seen[name] = version
            self._work = self._work or self._here().build_work(self._shared)
            _write_files(self._folder, files)
            reply = json.dumps(self._work(json.loads(job), slot))
            return "", reply, slot, self._changes(files)
        except Exception as error:  # whatever it is, the waiting process has to hear of it
            return one_line(error), "{}", {}, {}

    def _here(self) -> WorkerSpec:
        """Describe the same worker, with folders of this machine."""
        settings = dict(self._spec.settings)
        for name, digest in self._digests.items():
            if _digest(_read_files(Path(settings[name]))) != digest:
                import ray

                settings[name] = str(self._own / name)
                _write_files(Path(settings[name]), ray.get(self._places[name]))
        if self._spec.folder:
            self._folder.mkdir(exist_ok=True)
            settings[self._spec.folder] = str(self._folder)
        return replace(self._spec, settings=settings)

    def _changes(self, before: Files) -> Changes:
        """List what a job changed of its files, and remove them: another worker may have the same device next."""
        found = _read_files(self._folder, self._spec.keeps)
        for name in self._spec.keeps:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        changed: Changes = {path: data for path, data in found.items() if before.get(path) != data}
        return {**changed, **dict.fromkeys(before.keys() - found)}

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)


def _read_files(folder: Path, names: Iterable[str] = ("",)) -> Files:
    """Read files, and all that are in folders, below a folder; what is not there is left out."""
    found: Files = {}
    for name in names:
        paths = [folder / name] if (folder / name).is_file() else sorted((folder / name).rglob("*"))
        found |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    return found


def _write_files(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Write files below a folder, each as a whole, and remove those that are gone."""
    for name, data in files.items():
        path = folder / name
        if data is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.part")
            draft.write_bytes(data)
            draft.replace(path)


def _digest(files: Files) -> str:
    """Hash names and contents."""
    parts = (part for name, data in files.items() for part in (name.encode(), data))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
