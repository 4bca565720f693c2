"""Engines of others, each in an environment and a process of its own: made on demand, left out where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
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
SECONDS = 900  # for an installation, and for compiling a step


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
    """A step in another process; close it to end the process."""

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

    def start(self, x: NDArray[Any], labels: NDArray[Any]) -> float:
        """Start the process with a batch; return its loss."""
        with tempfile.TemporaryDirectory() as folder:
            inputs, targets, file = (f"{folder}/{name}" for name in ("x.npy", "y.npy", "request.json"))
            np.save(inputs, x)
            np.save(targets, labels)
            batch = {"input": inputs, "labels": targets}
            Path(file).write_text(json.dumps({"graphs": self._graphs, "threads": self._threads, **batch}))
            script = Path(__file__).with_name(f"{self._name}_step.py")
            self._process = subprocess.Popen(
                [str(self._python), str(script), file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
            answer = self._read()
        return float(answer["loss"])

    def __call__(self) -> float:
        """Run one step; return its milliseconds."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._read()["wall" if self._threads > 1 else "cpu"])

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None and self._process.stderr is not None
        line = next((line for line in self._process.stdout if line.startswith("{")), "")  # libraries print, too
        if not line:
            lines = self._process.stderr.read().strip().splitlines() or ["it ended without a message"]
            code = self._process.wait()
            raise EmbraceError(f"its process was ended by signal {-code}" if code < 0 else lines[-1])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _cannot(manifest: Manifest, boundary: Boundary) -> str | None:
    """Say why no peer computes the same loss."""
    if any(layer.dropouts for layer in manifest.layers[boundary.layer :]):
        return "it cannot draw the dropout masks of the other engines"
    if boundary.head is not None or boundary.narrow is not None:
        return "it has no training step of a part of a layer"
    if manifest.loss != Loss("cross_entropy") or len(manifest.output.shape) != 1:
        return "its step is written for cross entropy over classes only"
    return None
