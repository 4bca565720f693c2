"""What a boundary costs on this device: memory, time of each part. Measured in a fresh process, started from here.

    python -m edge_runtime.measure < case.json > measurement.json

Random inputs serve: neither memory nor time depends on the values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.activations import ActivationStore, StoredType
from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.engine.choose import EngineName, open_step
from edge_runtime.engine.portable import LayerForward
from edge_runtime.engine.session import FrozenType, Profile, RuntimeSettings, give_back_memory
from edge_runtime.engine.trace import divide
from edge_runtime.forward import open_layers
from edge_runtime.int8_layers import open_int8
from edge_runtime.memory import PeakMeter, current_memory
from federation.axes.local import LocalRule, LocalStep, Momentum, Start, WeightDecay, runs
from federation.errors import EmbraceError, OutOfMemory
from federation.manifest import Boundary, Manifest, TensorSpec
from federation.narrow import take_corners
from federation.space import Vector

TIMEOUT = 3600
RULES: tuple[LocalRule, ...] = (WeightDecay(1e-4), Momentum(0.9))
RATE = 1e-3
ANY_WEIGHT = 0.01
# SIGABRT: memory ran out where the runtime does not catch it. On Windows STATUS_NO_MEMORY, and what abort() ends with.
_KILLED = (-6, -9, 134, 137, 0xC0000017, 0xC0000409)


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    bundle: str
    boundary: str
    engine: EngineName = "portable"
    batch: int = 32
    threads: int = 1
    profile: Profile = "fast"
    warm_up: int = 2
    iterations: int = 3
    whole_round: bool = False  # the frozen layers and the stored activations, too
    stored_as: StoredType = "float32"
    frozen: FrozenType = "float32"  # what the frozen layers are computed in
    divide: bool = True  # find out how a step divides into forward and backward
    weights: bool = True  # those of the bundle; False: only the training graph is here, and any number serves


@dataclass(frozen=True)
class Measurement:
    """Seconds of every counted iteration, and peak bytes on top of the idle process."""

    idle: dict[str, int]  # what the process had before: resident, anonymous, file_backed
    memory: dict[str, int]  # anonymous, file_backed, total
    load: float  # opening the sessions
    forward_compute: list[float] = field(default_factory=list)  # the frozen layers
    activation_io: list[float] = field(default_factory=list)  # writing, and reading again
    training: list[float] = field(default_factory=list)  # forward and backward of the trained part
    optimiser: list[float] = field(default_factory=list)
    forward_share: float | None = None  # of `training`


def measure(case: Case, place: Path | None = None) -> Measurement:
    """Measure in a process of its own; OutOfMemory if that process did not survive."""
    there = replace(case, bundle=str(Path(case.bundle).resolve()))  # the process runs in another directory
    what = f"a trial step from {case.boundary!r}"
    # onnxruntime-training loads PyTorch where that is installed: two seconds and 200 MB that a device does not have.
    found = in_fresh_process("edge_runtime.measure", asdict(there), what, hide=("torch",), place=place)
    return Measurement(**found)


def in_fresh_process(
    module: str, request: dict[str, Any], what: str, *, hide: Sequence[str] = (), place: Path | None = None
) -> dict[str, Any]:
    """Run a module as a program, with a request as JSON on its standard input; return its answer.

    Packages to `hide` are not found there. Temporary files of the process go with a folder of ours in `place`, even if
    it is killed. It ends when we are interrupted.
    """
    hiding = f"sys.modules.update(dict.fromkeys({tuple(hide)!r}))"
    program = f"import runpy, sys; {hiding}; runpy.run_module({module!r}, run_name='__main__')"
    with tempfile.TemporaryDirectory(prefix="embrace-", dir=place) as folder:
        try:
            answer = subprocess.run(
                [sys.executable, "-c", program],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, "TMPDIR": folder},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EmbraceError(f"{what} took more than {TIMEOUT // 60} minutes; use a smaller batch") from None
    if answer.returncode in _KILLED:
        raise OutOfMemory(f"{what} was ended by the system")
    if answer.returncode:
        last = answer.stderr.strip().splitlines()[-1:] or ["no message"]
        if answer.returncode == OUT_OF_MEMORY_EXIT:
            raise OutOfMemory(last[0])
        raise EmbraceError(f"{what} failed: {last[0]}")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


OUT_OF_MEMORY_EXIT = 12


def answer_request(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer such a request: read it from standard input, write the answer to standard output."""
    try:
        json.dump(work(json.load(sys.stdin)), sys.stdout)
    except (OutOfMemory, MemoryError) as error:
        sys.exit(_fail(str(error) or "not enough memory", OUT_OF_MEMORY_EXIT))
    except EmbraceError as error:
        sys.exit(_fail(str(error), error.exit_code))


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def measure_here(case: Case) -> Measurement:
    """Measure in this process. Order as in a round: frozen layers, their discarding, training."""
    directory = Path(case.bundle)
    manifest = read_manifest(directory)
    boundary = manifest.boundary(case.boundary)
    settings = RuntimeSettings(case.threads, profile=case.profile)
    entry = manifest.entry(boundary)
    frozen = manifest.frozen(boundary) if case.whole_round else ()
    _warm_runtime(case, directory, manifest, settings)
    idle = current_memory()
    forward: list[float] = []
    io: list[float] = []
    load = 0.0
    count = case.warm_up + case.iterations
    with PeakMeter() as meter:
        if frozen:
            # Beside the bundle, because temporary files may lie in memory. Every batch has its own rows, as in a round:
            # rows written and read for the first time cost more than those that a cache still holds.
            store = ActivationStore(count * case.batch, entry, stored_as=case.stored_as, folder=directory.parent)
            order = np.random.default_rng(0).permutation(count * case.batch).reshape(count, case.batch)
            first = random_inputs(manifest.input, case.batch, manifest.vocabulary)
            began = time.perf_counter()
            sessions = _open_frozen([directory / layer.forward.name for layer in frozen], case.frozen, settings, first)
            load += time.perf_counter() - began
            for _ in range(count):
                began = time.perf_counter()
                output = reduce(lambda value, session: session(value), sessions, first)
                forward.append(time.perf_counter() - began)
            first = output
            del sessions, output
            forward = forward[case.warm_up :]
            io = [_timed(partial(store.write, number * case.batch, first)) for number in range(count)]
            del first
        began = time.perf_counter()
        step = open_step(directory, manifest, boundary, case.engine, settings)
        load += time.perf_counter() - began
        x = random_inputs(entry, case.batch, manifest.vocabulary)
        labels = random_labels_of(manifest, case.batch)
        received = _weights(directory, manifest, boundary) if case.weights else None
        step.parameters[:] = ANY_WEIGHT if received is None else received
        start = Start(
            step.parameters, case.iterations, RATE, received=step.parameters if received is None else received
        )
        local = LocalStep(RULES, start, *runs(boundary.space(manifest), boundary.layer))
        training: list[float] = []
        optimiser: list[float] = []
        for number in range(count):
            if frozen:
                io[number] += _timed(partial(store.read, order[number], x))
            training.append(_timed(partial(step.run, x, labels, number)))
            optimiser.append(_timed(lambda: local.step(step.gradients, RATE)))
    share = None
    if case.divide:
        del step, local, start
        share = divide(
            lambda trace: open_step(directory, manifest, boundary, case.engine, settings, trace=trace),
            lambda recording: recording.run(x, labels),
        ).forward_share
    return Measurement(
        idle={"resident": idle.resident, "anonymous": idle.anonymous, "file_backed": idle.file_backed} if idle else {},
        memory=asdict(meter.peak) if meter.peak else {},
        load=load,
        forward_compute=forward,
        activation_io=io[case.warm_up :],
        training=training[case.warm_up :],
        optimiser=optimiser[case.warm_up :],
        forward_share=share,
    )


def _open_frozen(
    graphs: Sequence[Path], frozen: FrozenType, settings: RuntimeSettings, first: np.ndarray[Any, Any]
) -> list[LayerForward]:
    """Open the frozen layers as one graph; in 8 bits, if that is wanted and possible, by ranges of the first batch."""
    if frozen == "int8":
        found = open_int8(graphs, "all", settings, lambda start, stop: first[start:stop], len(first), len(first))
        if found is not None:
            return [found]
    return open_layers(graphs, settings)


def _weights(directory: Path, manifest: Manifest, boundary: Boundary) -> Vector:
    """Return the weights that a device receives which trains from a boundary."""
    everything = map_weights(directory / manifest.weights.name, manifest.space)
    if boundary.narrow is not None:
        return take_corners(manifest.space, everything, boundary.space(manifest))
    return everything[manifest.space.suffix(boundary.layer)]


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _warm_runtime(case: Case, directory: Path, manifest: Manifest, settings: RuntimeSettings) -> None:
    """Get the runtime ready: what it needs itself counts as idle. By the last layer on one sample, if that is here."""
    last = manifest.layers[-1]
    if case.weights:
        LayerForward(directory / last.forward.name, settings)(random_inputs(last.input, 1, manifest.vocabulary))
    else:
        give_back_memory()  # as an agent does before its tasks


def random_inputs(spec: TensorSpec, count: int, vocabulary: int | None) -> np.ndarray[Any, Any]:
    """Draw numbers of a tensor's type and shape: small ones, or token ids."""
    rng = np.random.default_rng(0)
    if spec.dtype == "float32":
        return rng.random((count, *spec.shape), np.float32)
    return rng.integers(0, vocabulary or 2, (count, *spec.shape)).astype(spec.dtype)


def random_labels_of(manifest: Manifest, count: int) -> np.ndarray[Any, Any]:
    """Draw labels that the model's loss accepts."""
    shape = (count, *manifest.labels.shape)
    most = manifest.label_count or 2
    return np.random.default_rng(0).integers(0, most, shape).astype(manifest.labels.dtype)


if __name__ == "__main__":
    answer_request(lambda request: asdict(measure_here(Case(**request))))
