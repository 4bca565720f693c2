"""One contestant of `embrace bench simulate`, in a process of its own.

    python -m bench.simulation.contest NAME FOLDER

`embrace` is the run of `embrace simulate`: cohorts, tasks, training, checks, sums, the server's step, records and
checkpoints. `bare` is a plain PyTorch loop over the same batches in as many processes. The result goes to `NAME.json`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.simulation.bare import run_bare
from bench.simulation.case import SpeedCase, open_case, read_case
from bench.simulation.meter import Meter
from simulation.simulate import Options, Simulation


@dataclass(frozen=True)
class Result:
    """What a contestant took."""

    seconds: list[float]  # of each round
    cpu: list[float]  # seconds of all its processes
    memory: int | None  # bytes: the most that all its processes had
    losses: list[float]  # of each round, and of the first one, which does not count


def run_embrace(case: SpeedCase, folder: Path, meter: Meter) -> list[float]:
    """What the command does, without scores, which no other contestant computes. Returns the losses."""
    options = Options(workers=case.workers, evaluate_every=0)
    run = Simulation(open_case(case, folder), folder / "run", options).run(
        lambda what, done, total: meter.round() if done < total else meter.end()
    )
    return [record["loss"] for record in run.rounds]


def run(name: str, folder: Path) -> Result:
    """Run all rounds of a contestant."""
    meter = Meter()
    losses = {"embrace": run_embrace, "bare": run_bare}[name](read_case(folder), folder, meter)
    return Result(meter.seconds, meter.cpu, meter.memory or None, losses)


if __name__ == "__main__":
    (Path(sys.argv[2]) / f"{sys.argv[1]}.json").write_text(json.dumps(asdict(run(sys.argv[1], Path(sys.argv[2])))))
