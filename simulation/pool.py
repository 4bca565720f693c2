"""Run jobs in worker processes over the cores: jobs go out in order, answers come back in order.

What a worker does is a function built in its own process from a name and plain settings. Numbers travel in shared
memory: arrays that all workers read (the global vector, a data set), and slots that a worker fills with what a job
gave. Through the pipes go a few lines of JSON. Results depend on jobs alone, so the number of workers changes nothing
but the time, and not more slots are filled than jobs are under way.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from federation.errors import EmbraceError, InputError

Json = dict[str, Any]  # a job or an answer
Arrays = dict[str, NDArray[Any]]
Work = Callable[[Json, Arrays], Json]  # a job and the slot to be filled -> the answer
END_LIMIT = 5.0  # seconds for a worker to end by itself
ALIGNMENT = 64  # bytes: where arrays lie may decide the last bit of what is computed from them


@dataclass(frozen=True)
class ArraySpec:
    """Type and shape of an array that processes share."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def room(self) -> int:
        """Bytes up to where the next array may begin."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def zeros(self) -> NDArray[Any]:
        """Make the array in this process's own memory, aligned as in shared memory."""
        memory = np.zeros(self.room + ALIGNMENT, np.uint8)
        array: NDArray[Any] = np.ndarray(self.shape, self.dtype, memory.data, -memory.ctypes.data % ALIGNMENT)
        return array


@dataclass(frozen=True)
class WorkerSpec:
    """What the workers are: `build` is 'module:function', called as function(settings, shared) -> Work."""

    build: str
    settings: dict[str, Any]  # plain values, unless the worker is this process
    shared: Mapping[str, ArraySpec] = field(default_factory=dict)  # read by all workers
    slot: Mapping[str, ArraySpec] = field(default_factory=dict)  # filled by one job
    preload: tuple[str, ...] = ()  # modules that processes have before they begin
    # For workers that have no disk in common with this process:
    reads: tuple[str, ...] = ()  # settings that name folders which workers only read
    folder: str = ""  # the setting that names the folder with files that jobs read and write ...
    keeps: tuple[str, ...] = ()  # ... in these folders below it; job["files"] are those that a job has to find there

    def build_work(self, shared: Arrays) -> Work:
        """Build the work in this process."""
        module, _, name = self.build.partition(":")
        work: Work = getattr(importlib.import_module(module), name)(self.settings, shared)
        return work


class Pool(Protocol):
    """Workers, wherever they run."""

    def share(self, name: str, value: NDArray[Any]) -> None:
        """Set an array that all workers read; not while jobs are under way."""

    def map(self, jobs: Iterable[Json]) -> Iterator[tuple[Json, Arrays]]:
        """Yield each job's answer and filled slot, in the jobs' order. A slot is good until the next is asked for."""

    def close(self) -> None:
        """End the workers and give everything back."""


class WorkerError(EmbraceError):
    """A worker failed or is gone; the message says at what."""


class LocalPool:
    """Workers as processes of this machine, each with one thread."""

    def __init__(self, spec: WorkerSpec, workers: int) -> None:
        if not 1 <= workers <= 1024:
            raise InputError(f"workers: expected a number from 1 to 1024, got {workers}")
        self._stack = contextlib.ExitStack()
        self._under_way: dict[_WorkerProcess, tuple[int, int]] = {}  # worker -> (number of its job, slot)
        try:
            self._shared = self._stack.enter_context(_Block(spec.shared))
            # One slot more than workers is being read here while all of them are at work.
            self._slots = [self._stack.enter_context(_Block(spec.slot)) for _ in range(workers + 1)]
            blocks = [self._shared.name, *(slot.name for slot in self._slots)]
            self._workers = [
                self._stack.enter_context(_WorkerProcess(spec, blocks, number)) for number in range(workers)
            ]
        except BaseException:
            self._stack.close()
            raise

    def share(self, name: str, value: NDArray[Any]) -> None:
        self._shared.arrays[name][...] = value

    def map(self, jobs: Iterable[Json]) -> Iterator[tuple[Json, Arrays]]:
        if self._under_way:
            raise WorkerError("an earlier map of this pool was given up with jobs under way; make a new pool")
        waiting = iter(enumerate(jobs))
        free, idle = deque(range(len(self._slots))), deque(self._workers)
        done: dict[int, tuple[Json, int]] = {}
        busy = self._under_way
        following, exhausted = 0, False
        while True:
            while idle and free and not exhausted:
                item = next(waiting, None)
                if item is None:
                    exhausted = True
                    break
                worker, slot = idle.popleft(), free.popleft()
                worker.send({"job": item[1], "slot": slot})
                busy[worker] = item[0], slot
            if following in done:
                answer, slot = done.pop(following)
                following += 1
                yield answer, self._slots[slot].arrays
                free.append(slot)
                continue
            if not busy:
                return
            for worker in self._ready(busy):
                number, slot = busy.pop(worker)
                done[number] = worker.receive(), slot
                idle.append(worker)

    def _ready(self, busy: Mapping[_WorkerProcess, Any]) -> list[_WorkerProcess]:
        """Wait for answers; a process that ended counts as an answer, and its answer is an error."""
        watched: dict[Any, _WorkerProcess] = {}
        for worker in busy:
            watched |= {worker.pipe: worker, worker.process.sentinel: worker}
        return list(dict.fromkeys(watched[found] for found in wait(list(watched))))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InlinePool:
    """The one worker is this process: for many short runs, of which each has a core of its own."""

    def __init__(self, spec: WorkerSpec, workers: int) -> None:
        self._shared = {name: array.zeros() for name, array in spec.shared.items()}
        self._slot = {name: array.zeros() for name, array in spec.slot.items()}
        self._work = spec.build_work(self._shared)

    def share(self, name: str, value: NDArray[Any]) -> None:
        self._shared[name][...] = value

    def map(self, jobs: Iterable[Json]) -> Iterator[tuple[Json, Arrays]]:
        for job in jobs:
            yield self._work(json.loads(json.dumps(job)), self._slot), self._slot  # as through a pipe

    def close(self) -> None:
        self._shared = {}
        self._slot = {}


class _Block:
    """Named arrays in one piece of shared memory; the process that made it removes it."""

    def __init__(self, specs: Mapping[str, ArraySpec], name: str | None = None) -> None:
        size = sum(spec.room for spec in specs.values())
        self._mine = name is None
        self._memory = SharedMemory(name, create=self._mine, size=max(1, size))
        self.name = self._memory.name
        self.arrays: Arrays = {}
        start = 0
        for key, spec in specs.items():
            self.arrays[key] = np.ndarray(spec.shape, spec.dtype, self._memory.buf, start)
            start += spec.room

    def __enter__(self) -> _Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.arrays.clear()
        if self._mine:
            self._memory.unlink()
        with contextlib.suppress(BufferError):  # a view is still in use: the memory goes with it
            self._memory.close()


class _WorkerProcess:
    """One worker, seen from the process that started it."""

    def __init__(self, spec: WorkerSpec, blocks: list[str], number: int) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # Loaded once, shared by all.
            own = spec.build.partition(":")[0]
            context.set_forkserver_preload(["simulation.ignore_interrupts", own, *spec.preload])
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, spec, blocks), daemon=True)
        with _hidden_main():
            self.process.start()
        theirs.close()
        self._task: Json | None = None

    def send(self, message: Json) -> None:
        """Hand out a job."""
        self._task = message["job"]
        try:
            self.pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._gone() from None

    def receive(self) -> Json:
        """Read the answer, or raise the error that stands in its place."""
        try:
            answer: Json = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None
        if "error" in answer:
            raise WorkerError(f"worker {self.number}: {answer['error']}")
        done: Json = answer["done"]
        return done

    def _gone(self) -> WorkerError:
        self.process.join(END_LIMIT)
        code = self.process.exitcode
        how = f"ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        hint = " (out of memory?)" if code == -9 else ""
        return WorkerError(f"worker {self.number} {how}{hint} at {json.dumps(self._task)[:120]}")

    def __enter__(self) -> _WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()  # which tells it to end
        self.process.join(0 if sys.exc_info()[0] else END_LIMIT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Start a process that does not run the user's script again: workers are built by name and need nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(pipe: Connection, spec: WorkerSpec, blocks: list[str]) -> None:
    """Live as a worker: build, then job after job until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ignore_interrupts.py, where workers are not forked
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.ExitStack() as stack, contextlib.suppress(EOFError, ConnectionError):
        try:
            shared = stack.enter_context(_Block(spec.shared, blocks[0])).arrays
            slots = [stack.enter_context(_Block(spec.slot, name)).arrays for name in blocks[1:]]
        except FileNotFoundError:  # the pool was closed while this process was starting
            return
        work: Work | None = None
        while True:
            message = json.loads(pipe.recv_bytes())
            answer: Json
            try:
                work = work or spec.build_work(shared)
                answer = {"done": work(message["job"], slots[message["slot"]])}
            except Exception as error:  # whatever it is, the waiting process has to hear of it
                answer = {"error": one_line(error)}
            pipe.send_bytes(json.dumps(answer).encode())


def one_line(error: Exception) -> str:
    """Describe an error for the process that waits: an own one by its message, others by their type, too."""
    kind = "" if isinstance(error, EmbraceError) else f"{type(error).__name__}: "
    return kind + (str(error).splitlines() or [""])[0]
