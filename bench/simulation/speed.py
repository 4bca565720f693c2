"""Client-steps per second of a simulation, beside a bare PyTorch loop and Flower's Ray simulation, in one run.

Every contestant runs in fresh processes over the same model, devices and samples. Rounds are timed after a first one
that does not count. Ours is the whole of `embrace simulate`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.flower_python import FlowerMissing, flower_version, has_flower
from bench.simulation.case import SpeedCase, write_case
from bench.simulation.contest import Result
from edge_runtime.machine import describe_device
from federation.errors import EmbraceError, InputError
from federation.manifest import Manifest
from model_export.bundle import Choices, export_bundle
from model_export.source import load_source
from simulation.datasets import load_dataset

Progress = Callable[[str, int, int], None]
Name = Literal["bare", "embrace", "flower"]
ROOT = Path(__file__).resolve().parents[2]
BARS = {"resnet20": 1.6, "mnist_lr": 1.9}  # of the bare loop's steps per processor second, at least
MIXED = {"strong": 16, "weak": 112}
MIXED_BAR = 3.0  # with 16 strong and 112 weak devices, of a loop in which all train everything
MEMORY_BAR = 0.5  # of Flower's memory, at most
DATA = {"resnet20": "cifar10", "resnet8": "cifar10", "mnist_lr": "mnist", "mnist_2nn": "mnist", "mnist_cnn": "mnist"}
SAME_LOSS = 0.01  # contestants that train the same have the same loss in every round, but for rounding


@dataclass(frozen=True)
class SpeedRow:
    """One contestant with one model."""

    contestant: Name
    model: str
    seconds: list[float]
    cpu: list[float]
    memory: int | None
    losses: list[float]
    steps: int  # of all devices in a round

    @property
    def rate(self) -> float:
        """Client-steps per second."""
        return self.steps / statistics.median(self.seconds)

    @property
    def cpu_rate(self) -> float | None:
        """Client-steps per second of processor time: what is left of a figure on a machine that others use, too."""
        spent = sum(self.cpu)  # a round may be shorter than a tick of the kernel's clock
        return self.steps * len(self.cpu) / spent if spent else None


@dataclass(frozen=True)
class SpeedBar:
    """A promise and what was measured."""

    what: str
    limit: float
    measured: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass
class SpeedReport:
    """What was measured, how, on what, and what could not be."""

    case: dict[str, Any]
    device: dict[str, str]
    rows: list[SpeedRow]
    notes: list[str]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> SpeedReport:
        """Read what `--json` printed."""
        rows = [SpeedRow(**{key.name: row[key.name] for key in fields(SpeedRow)}) for row in facts["rows"]]
        return cls(facts["case"], facts["device"], rows, facts["notes"])

    def row(self, contestant: Name, model: str) -> SpeedRow | None:
        return next((row for row in self.rows if (row.contestant, row.model) == (contestant, model)), None)

    def ratio(self, row: SpeedRow, other: Name, what: Literal["rate", "cpu_rate"] = "rate") -> float | None:
        """Steps per second relative to another contestant's."""
        base = self.row(other, row.model)
        mine, theirs = getattr(row, what), getattr(base, what) if base else None
        return mine / theirs if mine and theirs else None

    def bars(self) -> list[SpeedBar]:
        found = []
        for row in self.rows:
            bare, flower = self.ratio(row, "bare", "cpu_rate"), self.row("flower", row.model)
            limit = MIXED_BAR if self.case.get("tiers") == MIXED else BARS.get(row.model)
            if row.contestant == "embrace" and bare is not None and limit is not None:
                found.append(SpeedBar(f"{row.model}: steps per processor second / bare loop", limit, bare, True))
            if row.contestant == "embrace" and flower and flower.memory and row.memory:
                share = row.memory / flower.memory
                found.append(SpeedBar(f"{row.model}: memory / Flower", MEMORY_BAR, share, False))
        return found


def bench_simulate(
    models: Sequence[str],
    *,
    rounds: int = 3,
    workers: int = 2,
    data_dir: Path | None = None,
    flower_python: Path | None = None,
    folder: Path | None = None,
    tiers: Mapping[str, int] | None = None,
    progress: Progress = lambda what, done, total: None,
    **sizes: int,
) -> SpeedReport:
    """Measure every model with every contestant. Files are written to a folder that is removed at the end.

    `tiers`: how many devices are of which. They are ours alone: devices of all other contestants train everything.
    """
    notes: list[str] = []
    contestants: list[Name] = ["bare", "embrace"]
    contestants += ["flower"] if has_flower(flower_python, notes) else []
    rows, case = [], {}
    total = len(models) * len(contestants)
    for place, model in enumerate(models):
        with tempfile.TemporaryDirectory(prefix="embrace-bench-", dir=folder) as made:
            progress(f"{model}: export", place * len(contestants), total)
            counts = dict(tiers or {})
            case = asdict(_prepare(Path(made), model, rounds, workers, data_dir, notes, {**sizes, "tiers": counts}))
            for number, contestant in enumerate(contestants):
                progress(f"{model}: {contestant}", place * len(contestants) + number, total)
                try:
                    rows.append(_measure(contestant, model, Path(made), case, flower_python))
                except FlowerMissing as error:
                    notes.append(f"Flower, {model}: {error}")
        if not tiers:
            _check_same([row for row in rows if row.model == model and row.contestant != "flower"])
    progress("done", total, total)
    device = describe_device()
    if "flower" in contestants and flower_python:
        device["flwr"] = flower_version(flower_python)
    kept = {key: value for key, value in case.items() if key not in ("model", "bundle")}
    return SpeedReport(kept, device, rows, notes)


def _prepare(
    folder: Path,
    model: str,
    rounds: int,
    workers: int,
    data_dir: Path | None,
    notes: list[str],
    sizes: Mapping[str, Any],
) -> SpeedCase:
    source = load_source(model)
    if source.loss.name != "cross_entropy" or source.input_dtype != "float32":
        raise InputError(f"{model}: expected a model that classifies images, like resnet20 or mnist_lr")
    manifest = export_bundle(source, folder / "bundle", Choices(engines=("portable",)))
    case = SpeedCase(model, str(folder / "bundle"), rounds=rounds, workers=workers, **sizes)
    write_case(case, folder, *_data(manifest, model, case.devices * case.samples, data_dir, notes))
    return case


def _data(
    manifest: Manifest, model: str, count: int, data_dir: Path | None, notes: list[str]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read or draw samples as they are stored, and labels."""
    rng = np.random.default_rng(0)
    if data_dir is None or model not in DATA:
        notes.append(f"{model}: random samples")
        return rng.random((count, *manifest.input.shape), np.float32), rng.integers(0, manifest.output.shape[0], count)
    found = load_dataset(DATA[model], data_dir)
    notes.append(f"{model}: {DATA[model]}")
    chosen = rng.integers(0, len(found.x_train), count)
    return found.x_train[chosen], found.y_train[chosen]


def _measure(
    contestant: Name, model: str, folder: Path, case: Mapping[str, Any], flower_python: Path | None
) -> SpeedRow:
    if contestant == "flower":
        from bench.flower.simulation import run_flower_simulation  # the wheel does not have it

        assert flower_python is not None
        run_flower_simulation(flower_python, ROOT, folder)
    else:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-m", "bench.simulation.contest", contestant, str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise EmbraceError(f"{contestant}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    result = Result(**json.loads((folder / f"{contestant}.json").read_text()))
    steps = case["cohort"] * case["steps"]
    return SpeedRow(contestant, model, result.seconds, result.cpu, result.memory, result.losses, steps)


def _check_same(rows: Sequence[SpeedRow]) -> None:
    """Check that all contestants train the same: their losses agree."""
    for losses in zip(*(row.losses for row in rows), strict=True):
        if max(losses) - min(losses) > SAME_LOSS * max(losses):
            raise EmbraceError(f"{rows[0].model}: the contestants do not train the same, their losses are {losses}")
