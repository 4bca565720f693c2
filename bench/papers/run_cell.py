"""One run of a table, in whatever process it is done: bundle, data and simulation, with nothing else to start."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.papers.editions import edition_of
from federation.errors import EmbraceError
from federation.job import plan_from
from model_export.bundle import Choices, export_bundle
from model_export.source import load_source
from simulation.datasets import Dataset, load_dataset
from simulation.fleet import fleet_table, open_fleet
from simulation.pool import InlinePool
from simulation.runs import Record
from simulation.simulate import Options, Simulation

FAILED = "failed.txt"


@dataclass(frozen=True)
class RunSpec:
    """What a run is. Its folder is named after all of it: another setting is another run, equal rows share one.

    A run of an earlier edition is not gone on with: its data or its model were others.
    """

    model: str
    widths: tuple[float, ...]
    job: Mapping[str, Any]
    seed: int
    rate: str | None  # instead of the job's
    stop_at: float | None
    every: Mapping[str, int]

    @property
    def whole_job(self) -> dict[str, Any]:
        job = {**self.job, "bundle": self.model, "seed": self.seed}
        return job if self.rate is None else {**job, "local": {**job.get("local", {}), "rate": self.rate}}

    @property
    def folder(self) -> str:
        other = [self.widths, self.stop_at, dict(self.every), edition_of(self.model)]
        facts = json.dumps([self.whole_job, other], sort_keys=True)  # as it is written: defaults may gain keys
        return f"{self.job.get('algorithm', 'job')}-{sha256(facts.encode()).hexdigest()[:10]}-seed{self.seed}"


def bundle_of(model: str, widths: tuple[float, ...], folder: Path) -> Path:
    """The model's bundle, exported when it is first asked for."""
    path = folder / "-".join([model, *map(str, widths), f"edition{edition_of(model)}"])
    if not (path / "manifest.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        export_bundle(load_source(model), path, Choices(widths=widths))
    return path


class OutOfTime(Exception):
    """The time for runs is over: this one goes on with the next command."""


def run_one(spec: RunSpec, runs: Path, bundle: Path, data_dir: Path | None, until: float | None = None) -> str | None:
    """Do a run, or the rest of it; returns why it failed. A run that diverged is a result, too.

    `until`: when to leave it, by `time.time`.
    """
    folder = runs / spec.folder
    if (folder / FAILED).is_file():
        return (folder / FAILED).read_text("utf-8")
    if _is_over(until):
        return None
    plan = plan_from(spec.whole_job)
    fleet = open_fleet(plan, bundle, _data(fleet_table(plan, {}).dataset, data_dir))
    options = replace(Options(workers=1, pool=InlinePool, stop_at=spec.stop_at), **dict[str, Any](spec.every))

    def on_round(record: Record) -> None:
        if _is_over(until):
            raise OutOfTime

    try:
        Simulation(fleet, folder, options).run(on_round=on_round)
    except OutOfTime:
        return None
    except EmbraceError as error:
        if "use a smaller rate" not in str(error):
            raise
        (folder / FAILED).write_text(str(error), "utf-8")
        return str(error)
    return None


def _is_over(until: float | None) -> bool:
    return until is not None and time.time() > until


@lru_cache(maxsize=1)
def _data(name: str, data_dir: Path | None) -> Dataset:
    return load_dataset(name, data_dir)
