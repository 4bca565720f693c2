"""Scores of new versions, computed in worker processes so that rounds do not wait for them."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.data_reference import file_of
from federation.errors import InputError

log = logging.getLogger("embrace.evaluation")
LONGEST = 3600.0  # seconds


@dataclass(frozen=True)
class Evaluation:
    """What to score; the weights are this request's own file and are removed afterwards."""

    job: str
    version: int
    bundle: Path
    weights: Path
    data: str
    statistics: str = "global"  # of batch norm


def check_data(reference: str | None) -> None:
    """Before a job is made: whether there is anything to score with."""
    if reference is not None and not file_of(reference).exists():
        raise InputError(f"evaluate.data: the coordinator's machine has no {str(file_of(reference))!r}")


class Evaluations:
    """One at a time, in the order in which they come."""

    def __init__(self, done: Callable[[Evaluation, dict[str, Any]], None]) -> None:
        self._done = done
        self._waiting: queue.SimpleQueue[Evaluation | None] = queue.SimpleQueue()
        self._unfinished: Counter[str] = Counter()  # by job
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="evaluate", daemon=True)
        self._thread.start()

    def put(self, request: Evaluation) -> None:
        self._count(request, 1)
        self._waiting.put(request)

    def unfinished(self, job: str) -> bool:
        """Whether there is a version of a job whose score is still to come."""
        with self._counting:
            return self._unfinished[job] > 0

    def _count(self, request: Evaluation, change: int) -> None:
        with self._counting:
            self._unfinished[request.job] += change

    def close(self) -> None:
        """Finish what is waiting."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                self._done(request, self._score(request))
            except Exception:
                log.exception("version %s of job %s was not evaluated", request.version, request.job)
            finally:
                request.weights.unlink(missing_ok=True)
                self._count(request, -1)

    @staticmethod
    def _score(request: Evaluation) -> dict[str, Any]:
        # Seen from the coordinator's folder, which is not that of the process: data may be FILE.py:NAME as well.
        places = {"bundle": request.bundle, "weights": request.weights, "data": Path(request.data)}
        given = {**{name: str(place.absolute()) for name, place in places.items()}, "statistics": request.statistics}
        command = [sys.executable, "-m", "edge_runtime.evaluate_version"]
        answer = subprocess.run(
            command,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
            cwd=Path(__file__).resolve().parents[1],
        )
        if answer.returncode:
            return {"error": (answer.stderr.strip().splitlines() or ["no message"])[-1]}
        found: dict[str, Any] = json.loads(answer.stdout)
        return found
