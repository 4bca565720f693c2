"""Trial steps: what training from a boundary takes in this very process, found by a copy of it that ends afterwards.

The copy (fork) shares every page with this process until one of them writes to it. So a trial takes what training will
take and no second interpreter beside it: this process and its copy together stay within the budget, but for the few
pages of this process that the copy changes. The copy is ended when it passes the budget, which is looked at every
millisecond; behind that lies a hard limit of the system (RLIMIT_DATA). Where there is no fork, or the copy gives no
sign of life (another thread may have held a lock), a fresh process is measured instead, an interpreter more.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edge_runtime.engine.choose import EngineName, choose_engine, open_step
from edge_runtime.engine.session import RUNTIME, RuntimeSettings
from edge_runtime.engine.trace import divide
from edge_runtime.files import replacing
from edge_runtime.measure import (
    ANY_WEIGHT,
    OUT_OF_MEMORY_EXIT,
    RATE,
    RULES,
    Case,
    measure,
    random_inputs,
    random_labels_of,
)
from edge_runtime.memory import Memory, PeakMeter, anonymous_memory, current_memory
from federation.axes.local import LocalStep, Start, runs
from federation.capacity import FLOAT_BYTES, MeasuredNeed, predicted_peak
from federation.errors import EmbraceError, OutOfMemory
from federation.manifest import Boundary, Manifest

STEPS = 2  # the first makes its memory, the second shows what stays
LONGEST = 3600.0  # seconds of a trial
SILENCE = 30.0  # seconds without any work by the copy after which it is given up
LONGEST_DIVIDED = 5.0  # seconds of a step that is repeated to learn how it divides into forward and backward
MOST_REMEMBERED = 256
_LOOK = 0.001
_DIE_WITH_PARENT = 1  # of prctl(2)

# A dictionary that the copy hands over; the last one counts.
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Trial:
    """What a trial step from a boundary took."""

    anonymous: int
    forward_share: float | None
    step_seconds: float
    graph: str = ""  # sha256
    batch: int = 0

    @property
    def need(self) -> MeasuredNeed:
        """Return it as the coordinator is told."""
        return MeasuredNeed(self.graph, self.batch, max(1, self.anonymous))


@dataclass(frozen=True)
class Conditions:
    """What a trial depends on beside the graph."""

    directory: Path
    manifest: Manifest
    batch: int
    engine: str = "auto"
    settings: RuntimeSettings = field(default_factory=RuntimeSettings)
    vectors: int = 0  # as long as the parameters, that a task has beside them, their gradients and a momentum
    limit: int | None = None  # bytes that the whole process may have
    idle: Memory | None = None  # what it had before it ran any graph; None: it has run some, so a copy tells nothing


class Trials:
    """Makes trial steps, each once for a graph, a batch size and a runtime; results are kept in a file."""

    def __init__(self, conditions: Conditions, work: Path, progress: Callable[[str], None] = lambda name: None) -> None:
        self.conditions = conditions
        self.file = trials_file(work)
        self.progress = progress

    def __call__(self, boundary: Boundary) -> Trial:
        """Return what a step from a boundary takes; OutOfMemory if it passes the limit."""
        told = self.conditions
        engine = choose_engine(boundary, told.engine)
        graph = graph_of(boundary, engine)
        key = f"{graph} batch={told.batch} vectors={told.vectors} {_runtime(told.settings)}"
        known = _read(self.file)
        if key not in known:
            self.progress(boundary.name)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            made = replace(attempt(told, boundary, engine, self.file.parent), graph=graph, batch=told.batch)
            known = {**_read(self.file), key: made}
            _write(self.file, dict(list(known.items())[-MOST_REMEMBERED:]))
        return known[key]


def graph_of(boundary: Boundary, engine: EngineName) -> str:
    """Return the sha256 of the training graph that an engine runs, as DeviceProfile knows it."""
    if engine == "portable" and boundary.train is not None:
        return boundary.train.sha256
    return boundary.ort_training[-1].sha256


def known_needs(work: Path, settings: RuntimeSettings, most: int) -> tuple[MeasuredNeed, ...]:
    """Return what earlier trials on this device took with this runtime: the newest of them."""
    found = [trial.need for key, trial in _read(trials_file(work)).items() if key.endswith(_runtime(settings))]
    return tuple(dict.fromkeys(reversed(found)))[:most]


def trials_file(work: Path) -> Path:
    return work / "trials" / "measured.json"


def _runtime(settings: RuntimeSettings) -> str:
    return f"threads={settings.threads} {RUNTIME}"


def attempt(told: Conditions, boundary: Boundary, engine: EngineName, place: Path | None = None) -> Trial:
    """Make a trial step, in a copy of this process where that can be; `place` is for its temporary files."""
    idle = told.idle
    if idle is not None and hasattr(os, "fork") and sys.platform == "linux":
        what = f"a trial step from {boundary.name!r}"
        with contextlib.suppress(_NoSign):
            found = _in_copy(lambda tell: _steps(told, boundary, engine, idle, tell), told.limit, what, place)
            return Trial(found["anonymous"], found.get("forward_share"), found["step_seconds"])
    case = Case(str(told.directory), boundary.name, engine, told.batch, told.settings.threads, iterations=STEPS)
    case = replace(case, weights=False)  # they come with the task
    measured = measure(case, place)
    more = FLOAT_BYTES * told.vectors * told.manifest.weights_of(boundary)
    anonymous = measured.memory.get("anonymous", predicted_peak(told.manifest, boundary, told.batch))
    return Trial(anonymous + more, measured.forward_share, min(measured.training))


def _steps(told: Conditions, boundary: Boundary, engine: EngineName, idle: Memory, tell: Tell) -> None:
    """Train as a task does, on numbers that mean nothing: neither memory nor time depends on them."""
    manifest, seconds = told.manifest, []
    entry = manifest.entry(boundary)
    x = random_inputs(entry, told.batch, manifest.vocabulary)
    labels = random_labels_of(manifest, told.batch)
    with PeakMeter(idle) as meter:
        step = open_step(told.directory, manifest, boundary, engine, told.settings)
        step.parameters.fill(ANY_WEIGHT)
        start = Start(step.parameters, STEPS, RATE, received=step.parameters)
        local = LocalStep(RULES, start, *runs(boundary.space(manifest), boundary.layer))
        for number in range(STEPS):
            began = time.perf_counter()
            step.run(x, labels, number)
            seconds.append(time.perf_counter() - began)
            local.step(step.gradients, RATE)
        vectors = [np.ones_like(step.parameters) for _ in range(told.vectors)]
    assert meter.peak is not None
    found: dict[str, Any] = {"anonymous": meter.peak.anonymous, "step_seconds": min(seconds)}
    tell(found)
    if found["step_seconds"] < LONGEST_DIVIDED:
        del step, local, start, vectors
        share = divide(
            lambda trace: open_step(told.directory, manifest, boundary, engine, told.settings, trace=trace),
            lambda recording: recording.run(x, labels),
        ).forward_share
        tell({**found, "forward_share": share})


class _NoSign(Exception):
    """The copy has stopped working without an answer."""


def _in_copy(work: Callable[[Tell], None], limit: int | None, what: str, place: Path | None) -> dict[str, Any]:
    """Run something in a copy of this process and return what it told last."""
    with tempfile.TemporaryDirectory(prefix="embrace-", dir=place) as folder:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that are not copied: see above
            copy = os.fork()
        if copy == 0:
            os.close(reading)
            _be_the_copy(work, writing, limit, folder)
        os.close(writing)
        try:
            text = _read_all(reading, copy)
        except BaseException:
            os.kill(copy, signal.SIGKILL)
            raise
        finally:
            os.close(reading)
            _, status = os.waitpid(copy, 0)
    lines = [json.loads(line) for line in text.splitlines()]
    told: dict[str, Any] = lines[-1] if lines else {}
    if "anonymous" in told:  # whatever became of it afterwards
        return told
    code = os.waitstatus_to_exitcode(status)
    if code == OUT_OF_MEMORY_EXIT or code < 0:
        raise OutOfMemory(f"{what} took more than the memory that is allowed")
    raise EmbraceError(f"{what} failed: {told.get('error', 'no message')}")


def _read_all(descriptor: int, copy: int) -> bytes:
    """Read what the copy writes until it ends; give it up when it does not work any more."""
    found, worked, began = b"", 0.0, time.monotonic()
    last = began
    while True:
        ready, _, _ = select.select([descriptor], [], [], 1.0)
        if ready:
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return found
            found += chunk
        now, busy = time.monotonic(), _processor_ticks(copy)
        if busy > worked:
            worked, last = busy, now
        if now - last > SILENCE or now - began > LONGEST:
            raise _NoSign


def _processor_ticks(pid: int) -> float:
    """Read what the copy's first thread has worked, in ticks; the one that watches the limit never rests."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        after_name = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(int(after_name[11]) + int(after_name[12]))
    return 0.0


def _be_the_copy(work: Callable[[Tell], None], writing: int, limit: int | None, folder: str) -> NoReturn:
    """Do the work and end, without anything that belongs to the original: no handlers, no output, no clean-up."""
    code = 1

    def tell(found: Mapping[str, Any]) -> None:
        os.write(writing, json.dumps(found).encode() + b"\n")

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        gc.disable()  # a collection would write to every page of the heap
        tempfile.tempdir = folder
        if limit is not None:
            _bound(limit)
        work(tell)
        code = 0
    except (OutOfMemory, MemoryError):
        code = OUT_OF_MEMORY_EXIT
    except BaseException as error:
        tell({"error": f"{str(error) or type(error).__name__}".splitlines()[0]})
    finally:
        os._exit(code)


def _bound(limit: int) -> None:
    """End this process when it has more than `limit` bytes; what it reserves and does not touch counts half."""
    import resource

    now = current_memory()
    assert now is not None
    reserved = _reserved() + 2 * max(0, limit - now.anonymous) + (64 << 20)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    most = reserved if most == resource.RLIM_INFINITY else min(reserved, most)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def look() -> None:
        while anonymous_memory() <= limit:
            time.sleep(_LOOK)
        os._exit(OUT_OF_MEMORY_EXIT)

    threading.Thread(target=look, name="limit", daemon=True).start()


def _reserved() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _read(file: Path) -> dict[str, Trial]:
    """Read the trials of before; a file that cannot be read is as good as none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(key): Trial(**value) for key, value in json.loads(file.read_text()).items()}
    return {}


def _write(file: Path, trials: Mapping[str, Trial]) -> None:
    with contextlib.suppress(OSError):  # remembering is a convenience
        text = json.dumps({key: asdict(value) for key, value in trials.items()}, indent=1)
        with replacing(file, durable=False, draft=file.with_suffix(f".{os.getpid()}.new")) as draft:
            draft.write(text.encode())
