"""All runs of a table: the rates are chosen first, then every row is run with every seed. What is done stays done."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.papers.logs import Logs
from bench.papers.measures import final_accuracy
from bench.papers.run_cell import FAILED, RunSpec, bundle_of, run_one
from bench.papers.table import PaperRow, Setting, Table
from federation.errors import EmbraceError, InputError
from simulation.runs import CHECKPOINT, METRICS, WEIGHTS, Run, read_run

TUNING_SEED = 1000  # none of those that count
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RowResult:
    """The runs of a row; those that diverged are missing."""

    row: PaperRow
    rate: str
    tried: Mapping[str, float]  # rate -> accuracy at the end, where rates were tried
    runs: Sequence[Run]
    failures: Sequence[str]
    begun: Sequence[Run] = ()  # that have rounds to go

    def values(self, measure: Callable[[Run], float | None]) -> list[float]:
        found = (measure(run) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, measure: Callable[[Run], float | None]) -> float | None:
        values = self.values(measure)
        return float(np.mean(values)) if values else None

    @property
    def seconds(self) -> float:
        return sum(float(row.get("seconds", 0.0)) for run in self.runs for row in run.rounds)


@dataclass(frozen=True)
class Reproduction:
    """Everything that came of a table at one scale; of rows that were not asked for, what earlier commands did."""

    table: Table
    scale: str
    setting: Setting
    seeds: Sequence[int]
    rows: Sequence[RowResult]
    seconds: float  # this time; runs that were there already took none
    tuning_seconds: float = 0.0  # of all runs that tried rates, whenever they were done


@dataclass(frozen=True)
class Workplace:
    """Where runs, bundles and data lie, and how many runs go on at a time.

    Runs that are in the logs are not done again, wherever they were done, or go on from there. `until`, by `time.time`,
    is when runs are left, to go on with the next command.
    """

    runs: Path
    data_dir: Path | None = None
    jobs: int = 1
    logs: Logs | None = None
    until: float | None = None

    def logged(self, row: PaperRow, seed: int) -> Run | None:
        """Return a run of a row from the logs."""
        return self.logs.read(row, seed) if self.logs else None


def reproduce(
    table: Table,
    scale: str,
    seeds: int,
    place: Workplace,
    progress: Progress = lambda what, done, total: None,
    only: Sequence[str] = (),
) -> Reproduction:
    """Run a table, or what is missing of it; with `only` the rows of these labels, or whose labels contain a text."""
    began, setting = time.monotonic(), table.setting(scale)
    asked = [row for row in setting.rows if not only or any(_asks_for(text, row, setting) for text in only)]
    if not asked:
        raise InputError(f"--rows: no row has {' or '.join(map(repr, only))}; expected one of {_labels(setting)}")
    logged = {(row.label, seed): place.logged(row, seed) for row in setting.rows for seed in range(seeds)}
    todo = [row for row in asked if any(logged[row.label, seed] is None for seed in range(seeds))]
    with _executor(place.jobs) as run_all:
        work = _Work(setting, place, run_all, progress)
        tried = work.tune(todo)
        chosen = {key: max(found, key=lambda rate: found[rate]) for key, found in tried.items()}
        specs = {
            row.label: [spec_of(row, setting, seed, chosen.get(_key(row))) for seed in range(seeds)]
            for row in setting.rows
        }
        failed = work.run(
            "run", [(row, spec) for row in todo for spec in specs[row.label] if logged[row.label, spec.seed] is None]
        )
    rows = []
    for row in setting.rows:
        kept = [run for seed in range(seeds) if (run := logged[row.label, seed])]
        mine = [spec for spec in specs[row.label] if logged[row.label, spec.seed] is None]
        rows.append(_result(row, tried.get(_key(row), {}), kept, mine, failed, place))
    took = time.monotonic() - began
    return Reproduction(table, scale, setting, list(range(seeds)), rows, took, work.tuning_seconds)


def _result(
    row: PaperRow,
    tried: Mapping[str, float],
    logged: Sequence[Run],
    specs: Sequence[RunSpec],
    failed: Mapping[str, str],
    place: Workplace,
) -> RowResult:
    """Collect the runs of a row, those of the logs first; log what has ended since."""
    over = list(logged)
    begun: list[Run] = []
    for spec in specs:
        folder = place.runs / spec.folder
        if spec.folder in failed or not (folder / METRICS).is_file():
            continue
        run, is_over = read_run(folder), _is_over(folder)
        (over if is_over else begun).append(run)
        if place.logs:
            place.logs.write(row, spec.seed, run, None if is_over else folder / CHECKPOINT)
    jobs = [run.about.get("job", {}) for run in over] or [spec.whole_job for spec in specs]
    rate = str(jobs[0].get("local", {}).get("rate", ""))
    return RowResult(row, rate, tried, over, [failed[spec.folder] for spec in specs if spec.folder in failed], begun)


def spec_of(row: PaperRow, setting: Setting, seed: int, rate: str | None) -> RunSpec:
    return RunSpec(row.model, row.widths, row.job, seed, rate, row.stop_at, {**setting.every, **row.every})


def _is_over(folder: Path) -> bool:
    """Whether a run has done its last round, or failed."""
    return (folder / WEIGHTS).is_file() or (folder / FAILED).is_file()


def _asks_for(text: str, row: PaperRow, setting: Setting) -> bool:
    """Whether a text asks for a row: by its whole label, or by a part that is no other row's whole label."""
    return row.label == text if text in (other.label for other in setting.rows) else text in row.label


def _labels(setting: Setting) -> str:
    return "; ".join(row.label for row in setting.rows)


def _key(row: PaperRow) -> str:
    return row.tuned_as or row.label


class _Work:
    def __init__(self, setting: Setting, place: Workplace, run_all: _RunAll, progress: Progress) -> None:
        self.setting = setting
        self.place = place
        self.run_all = run_all
        self.progress = progress
        self.tuning_seconds = 0.0

    def tune(self, asked: Sequence[PaperRow]) -> dict[str, dict[str, float]]:
        """Of every row, or of the first of those that share a rate: the accuracy at the end with each rate.

        Rows that were not asked for are known only where an earlier command tried all rates for them.
        """
        rates, wanted = self.setting.rates, {_key(row) for row in asked}
        first = {_key(row): row for row in reversed(self.setting.rows)} if rates else {}
        known = {key: {rate: self._trial(row, rate) for rate in rates} for key, row in first.items()}
        specs = {
            (key, rate): spec
            for key, trials in known.items()
            if key in wanted or all(_is_over(self.place.runs / spec.folder) for spec in trials.values())
            for rate, spec in trials.items()
        }
        failed = self.run("try rates", [(first[key], spec) for (key, _), spec in specs.items()])
        if not all(_is_over(self.place.runs / spec.folder) for spec in specs.values()):
            raise EmbraceError("no rate was chosen: time ran out while rates were tried; the same command goes on")
        found: dict[str, dict[str, float]] = {key: {} for key, _ in specs}
        for (key, rate), spec in specs.items():
            found[key][rate] = 0.0 if spec.folder in failed else self._accuracy(spec)
        return found

    def _trial(self, row: PaperRow, rate: str) -> RunSpec:
        spec = spec_of(replace(row, stop_at=None), self.setting, TUNING_SEED, rate)
        rounds = max(1, round(self.setting.tuning_share * spec.job["num_rounds"]))
        return replace(spec, job={**spec.job, "num_rounds": rounds})

    def _accuracy(self, spec: RunSpec) -> float:
        run = read_run(self.place.runs / spec.folder)
        self.tuning_seconds += sum(float(row.get("seconds", 0.0)) for row in run.rounds)
        return round(final_accuracy(run) or 0.0, 2)

    def run(self, what: str, wanted: Sequence[tuple[PaperRow, RunSpec]]) -> dict[str, str]:
        """Run each and return by folder why it failed."""
        tasks = {}
        for row, spec in wanted:
            bundle = bundle_of(row.model, row.widths, self.place.runs / "bundles")
            if self.place.logs:
                self.place.logs.restore(row, spec.seed, self.place.runs / spec.folder)
            tasks[spec.folder] = (spec, self.place.runs, bundle, self.place.data_dir, self.place.until)
        failed = {}
        for done, (folder, failure) in enumerate(self.run_all(tasks)):
            self.progress(f"{what}: {folder}", done + 1, len(tasks))
            if failure is not None:
                failed[folder] = failure
        return failed


_RunAll = Callable[[Mapping[str, tuple[Any, ...]]], Iterable[tuple[str, str | None]]]


@contextmanager
def _executor(jobs: int) -> Iterator[_RunAll]:
    """Run side by side, each in a process with one thread; with one job, in this process."""
    if jobs == 1:
        yield lambda tasks: ((folder, run_one(*task)) for folder, task in tasks.items())
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:

        def run_all(tasks: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, str | None]]:
            futures = {pool.submit(run_one, *task): folder for folder, task in tasks.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()

        yield run_all
        pool.shutdown(cancel_futures=True)
