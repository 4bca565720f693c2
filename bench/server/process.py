"""Server processes that are measured: started, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from bench.server.load import LoadError
from bench.server.report import Name, ServerRow
from federation.errors import EmbraceError

ROUND_LIMIT, START_LIMIT, END_LIMIT = 600.0, 60.0, 10.0  # seconds
ROOT = Path(__file__).resolve().parents[2]


class Watch:
    """Measure a server process, from /proc where there is one; else by the clock only."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._idle = process_memory(pid, "VmRSS")
        self._seconds: list[float] = []
        self._cpu: list[float] = []

    def round(self, round: Awaitable[None]) -> None:
        cpu, began = cpu_seconds(self._pid), time.perf_counter()
        run_round(round)
        self._seconds.append(time.perf_counter() - began)
        self._cpu.append(cpu_seconds(self._pid) - cpu)

    def row(self, server: Name, devices: int, parameters: int) -> ServerRow:
        peak = process_memory(self._pid, "VmHWM")
        return ServerRow(server, devices, parameters, self._seconds, self._cpu, self._idle, peak)


def run_round(round: Awaitable[None]) -> None:
    """Let devices do a round, in the time that one may take."""
    try:
        asyncio.run(_in_time(round))
    except OSError as error:
        raise LoadError(f"a device lost its connection: {error}") from None


async def _in_time(round: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(round, ROUND_LIMIT)
    except asyncio.TimeoutError:
        raise LoadError(f"a round took more than {ROUND_LIMIT:g} seconds") from None


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_memory(pid: int, what: Literal["VmRSS", "VmHWM"]) -> int | None:
    """Read the resident memory of a process, or its peak, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def running(folder: Path, arguments: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python program, and end it at the end of the block."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EMBRACE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env={**kept, "PYTHONPATH": path, **environment},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def first_words(process: subprocess.Popen[bytes], folder: Path, find: Callable[[str], str]) -> str:
    """Wait for what a program prints when it is ready."""
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        for line in (folder / "out").read_text().splitlines(keepends=True):
            if line.endswith("\n") and (found := find(line)):
                return found
        if process.poll() is not None:
            break
        time.sleep(0.02)
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
    raise EmbraceError(f"a server did not start: {' '.join(last) or 'it said nothing'}")
