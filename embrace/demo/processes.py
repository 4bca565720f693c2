"""The processes of the demo: they start with the `embrace` command and do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.system import HERE

COORDINATOR = "coordinator"  # the name of its process and of its directory
GOODBYE = 2.0  # seconds for a process to end
# `embrace`, as a device has it: without torch and onnx, which onnxruntime-training loads wherever it finds them, and
# which would take three seconds and 180 MB in each process.
HEAVY = ("torch", "onnx")
PROGRAM = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); from embrace.cli.main import main; main()"


class Processes:
    """Child processes that do not outlive the `with` block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            for process in reversed(self.running.values()):  # agents first: the coordinator waits for their requests
                process.terminate()
            until = time.monotonic() + GOODBYE
            for process in reversed(self.running.values()):
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:  # it never loses anything, however it ends
                    process.kill()
                    process.wait()

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start `embrace ARGUMENTS` in a group of its own: Ctrl-C is for the demo, which ends the others in order."""
        root = str(Path(__file__).resolve().parents[2])
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("EMBRACE_")}
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with self.output(name).open("wb") as out, self.log(name).open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**inherited, "PYTHONPATH": path, "PYTHONUTF8": "1", **environment},
                **HERE.own_group,
            )
        return self.running[name]

    def output(self, name: str) -> Path:
        return self.directory / f"{name}.out"

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def ended(self, name: str) -> str:
        """Say how a process ended; '' while it runs, and for an agent that has done its tasks."""
        code = self.running[name].poll()
        if code is None or (code == 0 and name != COORDINATOR):
            return ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = self.last_words(name) if code > 0 else ""  # what a signal ended did not say why
        return f"{name} {how}{f': {last}' if last else ''}"

    def last_words(self, name: str) -> str:
        """Return the last line of a log."""
        lines = self.log(name).read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C while cleaning up, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def served_at(output: Path) -> str | None:
    """Read a coordinator's address from its output."""
    lines = output.read_text("utf-8").splitlines() if output.is_file() else []
    return next((line.split()[1] for line in lines if line.startswith("coordinator: ")), None)
