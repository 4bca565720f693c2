"""One contestant of `embrace bench simulate`, in a process of its own: `python -m bench.simulate_contest NAME FOLDER`.

The folder has `case.json`, `inputs.npy`, `labels.npy`; the result goes to `NAME.json`. Both contestants use the same
worker processes: `embrace` trains groups of devices, `bare` is a plain PyTorch loop over the same batches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.processes import family_cpu, family_memory
from bench.simulate.layouts import GROUP, in_groups, layouts
from bench.simulate.pool import Job, LocalPool, Plan
from bench.simulate_bare import DECAY, MOMENTUM
from federation.axes.local import Momentum, WeightDecay
from federation.manifest import read_manifest
from federation.messages import Task, encode_task
from federation.weights import map_weights


@dataclass(frozen=True)
class Case:
    """What is run: the same for every contestant."""

    model: str
    bundle: str
    devices: int = 128
    cohort: int = 32
    samples: int = 64  # of each device
    steps: int = 10
    batch: int = 32
    rate: float = 0.01
    workers: int = 2
    rounds: int = 3  # that count; one more comes first

    def cohort_of(self, number: int) -> list[int]:
        """The devices of a round, in turns."""
        return [(number * self.cohort + place) % self.devices for place in range(self.cohort)]


@dataclass(frozen=True)
class Result:
    """What a contestant took."""

    seconds: list[float]  # of each round
    cpu: list[float]  # seconds of all its processes
    memory: int | None  # bytes: the most that all its processes had after a round
    loss: float  # of the first round


def run(name: str, folder: Path) -> Result:
    """All rounds of a contestant."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    inputs, labels = (np.load(folder / f"{what}.npy", mmap_mode="r") for what in ("inputs", "labels"))
    manifest = read_manifest(Path(case.bundle))
    shared, slot = layouts(manifest, inputs, labels, case.devices)
    build = {"embrace": "bench.simulate.worker:build", "bare": "bench.simulate_bare:build"}[name]
    plan = Plan(build, {"bundle": case.bundle, "case": asdict(case)}, shared, slot)
    weights = np.array(map_weights(Path(case.bundle) / manifest.weights.name, manifest.space))
    seconds, cpu, memory, losses = [], [], [], []
    with LocalPool(plan, case.workers) as pool:
        pool.share("inputs", inputs)
        pool.share("labels", labels)
        pool.share("starts", np.arange(case.devices + 1) * case.samples)
        for number in range(case.rounds + 1):
            used, began = family_cpu(os.getpid()), time.perf_counter()
            pool.share("global", weights)
            total = np.zeros(weights.size)
            for answer, rows in pool.map(_jobs(name, case, number, manifest.boundaries[0].name)):
                total += rows["updates"].sum(0, dtype=np.float64)
                losses += answer["losses"]
            weights = (weights + total / case.cohort).astype(np.float32)
            seconds.append(time.perf_counter() - began)
            cpu.append(family_cpu(os.getpid()) - used)
            memory.append(family_memory(os.getpid()) or 0)
    return Result(seconds[1:], cpu[1:], max(memory) or None, float(np.mean(losses[: case.cohort])))


def _jobs(name: str, case: Case, number: int, boundary: str) -> list[Job]:
    devices = case.cohort_of(number)
    rules = (WeightDecay(DECAY), Momentum(MOMENTUM))
    task = encode_task(Task(boundary, case.steps, case.batch, case.rate, rules, round=number))
    size = GROUP if name == "embrace" else -(-len(devices) // case.workers)
    return [{"devices": group, "task": task} for group in in_groups(devices, size)]


if __name__ == "__main__":
    (Path(sys.argv[2]) / f"{sys.argv[1]}.json").write_text(json.dumps(asdict(run(sys.argv[1], Path(sys.argv[2])))))
