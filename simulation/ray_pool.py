"""Run a pool's jobs on a Ray cluster, for simulations that outgrow one machine: the same jobs, the same results.

Workers are Ray actors. Shared arrays and filled slots travel through Ray's object store; on one machine that is shared
memory, too. Every machine of the cluster needs this project, and files that the settings name.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import InputError, MissingPackage
from simulation.pool import Arrays, Json, Work, WorkerError, WorkerSpec, one_line


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
        actor = ray.remote(num_cpus=1)(_Actor)
        self._actors = [actor.remote(spec) for _ in range(workers)]

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
                answer = actor.run.remote(json.dumps(job), versions, *(place for _, place in self._shared.values()))
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
            error, reply, slot = self._ray.get(answer)
        except self._ray.exceptions.RayError as problem:
            first = str(problem).strip().splitlines()[0]
            raise WorkerError(f"a worker of the cluster is gone at {str(job)[:120]}: {first}") from None
        if error:
            raise WorkerError(f"a worker of the cluster: {error}")
        return json.loads(reply), slot

    def close(self) -> None:
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

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._shared: Arrays = {name: array.zeros() for name, array in spec.shared.items()}
        self._seen: dict[str, int] = {}
        self._work: Work | None = None

    def run(self, job: str, versions: dict[str, int], *values: NDArray[Any]) -> tuple[str, str, Arrays]:
        """Do a job. Jobs and answers are JSON, as through a pipe: what they say does not depend on the pool."""
        slot: Arrays = {name: array.zeros() for name, array in self._spec.slot.items()}
        try:
            for (name, version), value in zip(versions.items(), values, strict=True):
                if self._seen.get(name) != version:
                    self._shared[name][...] = value  # in place: the work holds views
                    self._seen[name] = version
            self._work = self._work or self._spec.build_work(self._shared)
            return "", json.dumps(self._work(json.loads(job), slot)), slot
        except Exception as error:  # whatever it is, the waiting process has to hear of it
            return one_line(error), "{}", {}
