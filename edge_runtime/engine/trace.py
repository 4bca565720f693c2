"""How a training step's time divides into forward and backward, from the runtime's own record of every node."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.engine.choose import Step

RUNS = 3  # the first one also makes its memory, so it does not count


@dataclass(frozen=True)
class Division:
    """Seconds of one step's nodes."""

    forward: float
    backward: float

    @property
    def forward_share(self) -> float:
        return self.forward / (self.forward + self.backward)


def divide(open_step: Callable[[Path], Step], run: Callable[[Step], object]) -> Division:
    """Open a step that records, run it a few times and read the record."""
    with tempfile.TemporaryDirectory() as folder:
        step = open_step(Path(folder) / "trace")
        for _ in range(RUNS):
            run(step)
        record = Path(step.session.end_profiling())
        return _read(record, step.is_backward)


def _read(record: Path, is_backward: Callable[[str], bool]) -> Division:
    """Read a record line by line: that of a large graph is many times larger as Python objects than as text."""
    seconds = {False: 0.0, True: 0.0}
    runs = 0
    with record.open() as lines:
        for line in lines:
            if '"model_run"' in line:
                runs += 1
            if '"cat" : "Node"' not in line and '"cat":"Node"' not in line:
                continue
            event = json.loads(line.strip().rstrip(",").removeprefix("[").removesuffix("]"))
            name = str(event["name"])
            # A run is recorded after its nodes: with `runs` at zero these are still the nodes of the first.
            if runs and name.endswith("_kernel_time"):
                seconds[is_backward(name)] += event["dur"] * 1e-6
    counted = max(runs - 1, 1)
    return Division(seconds[False] / counted, seconds[True] / counted)
