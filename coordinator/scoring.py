"""Score a version of the weights in a process of its own: whatever happens to it, the coordinator goes on.

The process gets a bounded memory and time, a folder of its own, and nothing of the coordinator's environment but where
programs and libraries are: no settings, no tokens. It reads a request from standard input and writes a score to
standard output.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.scratch import scratch_folder
from edge_runtime.system import HERE
from federation.errors import EmbraceError

_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # of the environment
_START = "import sys; sys.path.insert(0, sys.argv[1]); from coordinator.scoring import main; main()"
_MOST_WORDS = 500  # of an error


@dataclass(frozen=True)
class Evaluation:
    """What to score."""

    job: str
    version: int
    bundle: Path
    weights: Path
    data: Path
    statistics: str  # of batch norm
    memory: int  # bytes that the process may use
    seconds: float


def score(request: Evaluation) -> dict[str, Any]:
    """Start the process and return what it found, or an error in words."""
    places = {name: str(getattr(request, name).absolute()) for name in ("bundle", "weights", "data")}
    given = {**places, "statistics": request.statistics, "memory": request.memory, "seconds": request.seconds}
    with scratch_folder("embrace-score") as folder:
        own = {name: os.environ[name] for name in _KEPT if name in os.environ}
        try:
            answer = subprocess.run(
                [sys.executable, "-I", "-c", _START, str(Path(__file__).resolve().parents[1])],
                input=json.dumps(given),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=request.seconds,
                check=False,
                cwd=folder,
                env={**own, "TMPDIR": str(folder), "HOME": str(folder)},
                **HERE.own_group,  # Ctrl-C is the coordinator's, which finishes what it scores
            )
        except subprocess.TimeoutExpired:
            return {"error": f"scoring took more than the {request.seconds:g} s allowed (setting evaluation_seconds)"}
    if answer.returncode:
        return {"error": _why_it_ended(answer, request.memory)}
    return _finite(json.loads(answer.stdout))


def _why_it_ended(answer: subprocess.CompletedProcess[str], memory: int) -> str:
    code, told = answer.returncode, (answer.stderr.strip().splitlines() or [""])[-1][:_MOST_WORDS]
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
    return f"the process that scores ended {how}{f', {told}' if told else ''}; " + (
        f"it may use {memory:,} bytes of memory (setting evaluation_memory)"
    )


def _finite(found: dict[str, Any]) -> dict[str, Any]:
    """Refuse a score that is no number: JSON and databases have none, and no version is better by it."""
    loss = found.get("mean_loss")
    return {"error": f"the loss is {loss}"} if loss is not None and not math.isfinite(loss) else found


def main() -> None:
    """Read a request from standard input and write its score, or an error in words, to standard output."""
    request = json.load(sys.stdin)
    _limit(request["memory"], request["seconds"])
    from edge_runtime.evaluate_version import score_version  # here: the coordinator itself never loads a runtime

    try:
        bundle, weights, data = (Path(request[name]) for name in ("bundle", "weights", "data"))
        found = score_version(bundle, weights, data, request["statistics"])
    except EmbraceError as error:
        found = {"error": str(error)[:_MOST_WORDS]}
    json.dump(found, sys.stdout)


def _limit(memory: int, seconds: float) -> None:
    """Bound what this process may use, where the system can: also if the coordinator is gone before it ends."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    processors = os.cpu_count() or 1
    bounds = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_CPU: math.ceil(seconds) * processors,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
