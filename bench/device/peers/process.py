"""Engines of others, each in an environment and a process of its own: made on demand, left out where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.places import default_work
from federation.errors import EmbraceError
from federation.manifest import Boundary, Loss, Manifest

PACKAGES: dict[str, tuple[str, ...]] = {
    "jax": ("jax", "onnx"),
    "mnn": ("MNN==3.1.0", "numpy", "onnx"),  # later wheels lack gradients (see mnn_step)
}
SECONDS = 900  # for an installation, for compiling a step, and for every step
ERRORS = "stderr.txt"
TAIL = 4096  # bytes of what a process wrote to stderr that are read for its last line
SCRIPTS = Path(__file__).parent  # NAME_step.py


def environment(name: str) -> Path:
    """Return the interpreter of a peer's environment, made with pip if it is not there yet."""
    folder = default_work() / "peers" / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], f"no environment for {name} can be made")
        _run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]], f"{name} cannot be installed")
        ready.touch()
    return python


def _run(command: list[str], problem: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbraceError(f"{problem}: {error}") from None
    if done.returncode:
        raise EmbraceError(f"{problem}: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")


class PeerStep:
    """A step in another process; close it to end the process.

    However the process ends, and if it gives no answer, an EmbraceError says so.
    """

    def __init__(self, name: str, directory: Path, manifest: Manifest, boundary: Boundary, threads: int) -> None:
        problem = _cannot(manifest, boundary)
        if problem:
            raise EmbraceError(problem)
        self._name = name
        self._python = environment(name)
        self._graphs = [str((directory / layer.forward.name).resolve()) for layer in manifest.layers[boundary.layer :]]
        self._threads = threads
        self._environment = os.environ.copy()
        self._environment.pop("PYTHONPATH", None)  # its packages are others
        if threads == 1:
            flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
            self._environment |= {"XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._overdue = False

    def start(self, x: NDArray[Any], labels: NDArray[Any]) -> float:
        """Start the process with a batch; return its loss."""
        self._folder = tempfile.TemporaryDirectory(prefix="embrace-peer-")
        inputs, targets, file = (self._file(name) for name in ("x.npy", "y.npy", "request.json"))
        np.save(inputs, x)
        np.save(targets, labels)
        batch = {"input": str(inputs), "labels": str(targets)}
        file.write_text(json.dumps({"graphs": self._graphs, "threads": self._threads, **batch}))
        try:
            with self._file(ERRORS).open("wb") as errors:  # a file, because a full pipe would block the process
                self._process = subprocess.Popen(
                    [str(self._python), str(SCRIPTS / f"{self._name}_step.py"), str(file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                    env=self._environment,
                )
        except OSError as error:
            raise EmbraceError(f"its process cannot be started: {error}") from None
        return float(self._read()["loss"])

    def __call__(self) -> float:
        """Run one step; return its milliseconds."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # it has ended: then there is nothing to read, which says why
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        return float(self._read()["wall" if self._threads > 1 else "cpu"])

    def _read(self) -> dict[str, Any]:
        """Read an answer; the process is ended if that takes too long."""
        assert self._process is not None and self._process.stdout is not None
        limit = threading.Timer(SECONDS, self._end_overdue)
        limit.start()
        try:  # libraries print, too, and what ends without a new line was not printed to its end
            lines = (line for line in self._process.stdout if line.startswith("{") and line.endswith("\n"))
            line = next(lines, "")
            if not line:
                raise EmbraceError(self._why_ended(self._process.wait()))
        finally:
            limit.cancel()
            limit.join()  # its end would be counted with the step that follows
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end_overdue(self) -> None:
        assert self._process is not None
        self._overdue = True
        self._process.kill()

    def _why_ended(self, code: int) -> str:
        if self._overdue:
            return f"its process gave no answer within {SECONDS} seconds"
        if code < 0:
            return f"its process was ended by signal {-code}"
        with self._file(ERRORS).open("rb") as errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - TAIL))
            lines = errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its process ended without a message"

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / name

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # a step may wait there that the process has not read
                        pipe.close()
        if self._folder is not None:
            self._folder.cleanup()


def _cannot(manifest: Manifest, boundary: Boundary) -> str | None:
    """Say why no peer computes the same loss."""
    if any(layer.dropouts for layer in manifest.layers[boundary.layer :]):
        return "it cannot draw the dropout masks of the other engines"
    if boundary.head is not None or boundary.narrow is not None:
        return "it has no training step of a part of a layer"
    if manifest.loss != Loss("cross_entropy") or len(manifest.output.shape) != 1:
        return "its step is written for cross entropy over classes only"
    return None
