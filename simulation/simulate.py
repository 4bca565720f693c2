"""Simulate a whole fleet: rounds, scores, a record of each, and a checkpoint to go on from."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle_files import map_weights, write_weights
from edge_runtime.data.load import Data
from edge_runtime.machine import describe_device
from edge_runtime.state_file import load_state, save_state
from federation.accumulate import Accumulator
from federation.best_version import find_best, reason_to_stop
from federation.coverage import coverage
from federation.errors import EmbraceError, InputError
from federation.exchange import measured_region, trained_region
from federation.job import Plan, plan_from, plan_to
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.metrics import Score
from federation.region import of_layers
from federation.traffic import FLOAT32, Link, Traffic, total_of
from simulation.apart import StepSums
from simulation.assignment import Assigner
from simulation.datasets import Dataset
from simulation.devices import HANDED_ON, KEPT, Share, forget_handed_on
from simulation.fleet import SimulatedFleet, open_fleet
from simulation.own_rules import can_travel, own_rules
from simulation.pool import ALIGNMENT, ArraySpec, InlinePool, LocalPool, Pool, WorkerSpec
from simulation.runs import CHECKPOINT, FACTS, METRICS, WEIGHTS, Record, Run
from simulation.server import SeatTask, ServerState, SimulatedServer
from simulation.svcca import FOLDER as SVCCA
from simulation.svcca import compare_saved

CHECKPOINT_SECONDS = 20.0
SCORED, MOST_SCORES = 256, 32  # test samples that go through the model at once; parts that are scored apart
Progress = Callable[[str, int, int], None]  # what, done, total
OnRound = Callable[[Record], None]
OpenPool = Callable[[WorkerSpec, int], Pool]


def simulate(
    plan: Plan,
    bundle: Path | str,
    data: Data | Dataset | None = None,
    *,
    test_data: Data | None = None,
    test_share: float | None = None,
    label: str | None = None,
    tokenizer: Path | str | None = None,
    data_dir: Path | None = None,
    devices: int | None = None,
    tiers: Mapping[str, int] | None = None,
    partition: str | None = None,
    partition_constants: Mapping[str, Any] | None = None,
    engine: str = "auto",
    workers: int | None = None,
    pool: OpenPool = LocalPool,
    folder: Path | str | None = None,
    evaluate_every: int = 1,
    layers_every: int = 0,
    svcca_every: int = 0,
    link: Link | None = None,
    stop_at: float | None = None,
    on_progress: Progress = lambda what, done, total: None,
    on_round: OnRound = lambda record: None,
) -> Run:
    """Run a job on simulated devices. The same seed gives the same result, whatever the number of processes.

    data: what a device takes: a pair of arrays, FILE.npz, FILE.csv (`label` is its column), a folder of images by
        class, FILE.jsonl (`tokenizer` makes tokens of texts; without it the bundle's) or FILE.py:NAME; or the name of a
        data set below `data_dir`; without it the job's.
    test_data, test_share: own data for testing in any of these forms, or the share that is held out for it (a fifth),
        the same share of each class and the same samples for every seed.
    devices, tiers, partition: how many devices, how many of which tier, how samples are dealt ("iid", "dirichlet" with
        {"alpha": 0.1} as constants, ...). What is not given is as in the job's table [simulate].
    engine: "torch" (fast), "portable" (the graphs that devices run) or "auto": torch where it is installed and the
        model can be built again from the bundle's source, else portable.
    workers: processes; without it one for each processor.
    folder: keeps records and checkpoints there, and goes on with a run that was interrupted. Without it the run is in
        memory alone.
    evaluate_every: rounds between scores on the test data; 0: none. Likewise for measurements of every layer and for
        comparisons of all local models by SVCCA.
    stop_at: an accuracy at which the run ends early.
    on_round: called with the record of each round when it is over; not again for rounds of a run that goes on. What it
        raises ends the run, which goes on from there when it is run again in the same folder.
    """
    on_progress("read the data", 0, 1)
    constants = partition_constants if partition is None else dict(partition_constants or {})
    given: dict[str, Any] = {"devices": devices, "partitioner": partition, "partition": constants}
    given |= {"test_share": test_share, "label": label}
    given["tokenizer"] = None if tokenizer is None else str(tokenizer)
    if tiers is not None:
        counts = dict(tiers) if isinstance(tiers, Mapping) else {}
        if not counts or not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise InputError(f"tiers: expected a number of devices for each tier, got {tiers!r}")
        given |= {"tiers": counts, "devices": devices or sum(counts.values())}
    fleet = open_fleet(plan, Path(bundle), data, given, test_data=test_data, data_dir=data_dir)
    if engine == "auto":
        engine = choose_engine(fleet.manifest)
    if not can_travel(plan):
        warnings.warn(
            "a rule of this job cannot be imported by worker processes: the simulation runs in this process alone; "
            'define the rule in a file, as in "mine.py:MyRule", to use all processors',
            stacklevel=2,
        )
        pool = InlinePool
    count = available_processors() if workers is None else workers
    options = Options(engine, count, pool, evaluate_every, layers_every, svcca_every, link, stop_at)
    with contextlib.ExitStack() as stack:
        place = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="embrace-run-"))
        run = Simulation(fleet, Path(place), options).run(on_progress, on_round)
        return run if folder else run.in_memory()


def choose_engine(manifest: Manifest) -> str:
    """Choose PyTorch where it is installed and the module can be built again in another process, and cut.

    A module is cut where one tensor crosses and no weight is used on both sides. Losses that were traced, and weights
    that are stored in fewer bits, are in the graphs alone.
    """
    if manifest.loss.own is not None or manifest.source.storage not in (None, "float32"):
        return "portable"
    if manifest.inputs is not None or any(layer.packed or layer.borrowed for layer in manifest.layers):
        return "portable"
    source = manifest.source
    file = Path(source.reference.rpartition(":")[0])
    rebuilds = source.kind == "zoo" or (source.kind == "torch" and file.suffix == ".py" and file.is_file())
    return "torch" if rebuilds and find_spec("torch") else "portable"


def available_processors() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Options:
    """How a simulation is computed. Of these the engine and an early end change the result."""

    engine: str = "torch"  # or portable
    workers: int = 2
    pool: OpenPool = LocalPool
    evaluate_every: int = 1  # rounds; 0: never
    by_layer_every: int = 0  # rounds between measurements of every layer; 0: never
    svcca_every: int = 0  # rounds between comparisons of all local models, layer by layer; 0: never
    link: Link | None = None  # how long the exchange of each round would take on it
    stop_at: float | None = None  # accuracy at which the run ends early
    svcca_samples: int = 64  # of the test data, with which they are compared
    both_statistics_every: int = 0  # rounds between scores with each kind of batch norm's statistics; 0: never
    apart_every: int = 0  # rounds in which the distance of local models is measured after every step; 0: never

    def __post_init__(self) -> None:
        if self.engine not in ("torch", "portable"):
            raise InputError(f"engine: expected torch or portable, got {self.engine!r}")
        if self.workers < 1:
            raise InputError(f"workers: expected at least 1, got {self.workers}")
        if self.svcca_samples < 2:
            raise InputError(f"svcca_samples: expected at least 2, got {self.svcca_samples}")
        for name in ("evaluate_every", "by_layer_every", "svcca_every", "apart_every", "both_statistics_every"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: expected a number of rounds, or 0 for never, got {getattr(self, name)}")


class Simulation:
    """Does one run in one folder; goes on with what is there already."""

    def __init__(self, fleet: SimulatedFleet, folder: Path, options: Options) -> None:
        self.fleet = fleet
        self.folder = folder
        self.options = options
        self.plan = fleet.plan
        self.manifest = fleet.manifest
        self.plan.local.check_parts(self.manifest)
        weights = map_weights(fleet.bundle / self.manifest.weights.name, self.manifest.space)
        profiles = {device.id: device.profile for device in fleet.devices}
        samples = {device.id: len(device.trained) for device in fleet.devices}
        self.assigner = Assigner(self.manifest, samples, options.engine == "torch", options.workers)
        seconds = self._seconds_of if fleet.table.pace else None
        self.server = SimulatedServer(self.plan, self.manifest, profiles, weights, seconds)
        local = self.plan.local
        if local.refresh_every > 1 and (local.crop or local.flip):
            raise InputError(
                "local.refresh_every: a simulation keeps no augmented activations; expected 1 with crop or flip"
            )
        if options.apart_every and self.plan.local.epochs is not None:
            raise InputError("apart_every: expected a job with local.steps, the same for every device, not epochs")
        self.records: list[Record] = []
        self.saved = 0  # the round that the checkpoint goes on with

    def run(self, progress: Progress = lambda what, done, total: None, on_round: OnRound = lambda record: None) -> Run:
        """Do every round that is still to come; return the whole run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror}; choose another folder") from None
        about = self._describe()
        self._resume()
        if not self._finished():
            pool = self._open_pool()
            try:
                self._rounds(pool, progress, on_round)
            finally:
                pool.close()
            self._save(final=True)
        return Run(about["name"], self.records, about, self.folder)

    def _open_pool(self) -> Pool:
        arrays, vectors = self.fleet.arrays(), self.server.state.vectors
        ends = np.cumsum([0, *(len(device.numbers) for device in self.fleet.devices)])
        settings = {
            "bundle": str(self.fleet.bundle),
            "plan": plan_to(self.plan, own_rules=True),
            "rules": own_rules(self.plan),
            "folder": str(self.folder),
            "engine": self.options.engine,
            "probe": self.options.svcca_samples,
            "vectors": list(vectors),
            "devices": [
                [device.id, int(first), int(end) - len(device.held_out), int(end)]
                for device, first, end in zip(self.fleet.devices, ends, ends[1:])
            ],
        }
        size, tracks = self.manifest.space.size, 1 + len(self.plan.choices.tracks)
        steps = self.plan.local.steps if self.options.apart_every else 0
        shared = {name: ArraySpec(array.shape, str(array.dtype)) for name, array in arrays.items()}
        spec = WorkerSpec(
            "simulation.worker:build",
            settings,
            {"vectors": ArraySpec(self._vectors().shape), **shared},
            {"sums": ArraySpec((tracks, size), "int64"), "apart": ArraySpec((steps, size), "int64")},
            ("simulation.stacked_trainer",) if self.options.engine == "torch" else (),
            reads=("bundle",),
            folder="folder",
            keeps=(KEPT, HANDED_ON, SVCCA),
        )
        pool = self.options.pool(spec, self.options.workers)
        for name, array in arrays.items():
            pool.share(name, array)
        return pool

    def _vectors(self) -> NDArray[np.float32]:
        """Stack the server's vectors; each begins at a multiple of ALIGNMENT, so that one computes like the others."""
        vectors = list(self.server.state.vectors.values())
        floats = ALIGNMENT // vectors[0].itemsize
        rows = np.zeros((len(vectors), -(-vectors[0].size // floats) * floats), np.float32)
        for row, vector in zip(rows, vectors, strict=True):
            row[: vector.size] = vector
        return rows

    def _rounds(self, pool: Pool, progress: Progress, on_round: OnRound) -> None:
        saved = time.monotonic()
        while not self._finished():
            number = self.server.state.number
            progress(f"round {number + 1}", number, self.plan.num_rounds)
            line = self._round(pool)
            why = self._why_to_stop([*self.records, line])
            self._record(line if why is None else {**line, "stopped": why})
            try:
                on_round(self.records[-1])
            except BaseException:  # the caller leaves the run, and may go on with it later
                self._save()
                raise
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()
        progress("done", self.plan.num_rounds, self.plan.num_rounds)

    def _finished(self) -> bool:
        best = max((line["accuracy"] for line in self.records if line.get("accuracy") is not None), default=0.0)
        reached = self.options.stop_at is not None and best >= self.options.stop_at
        stopped = self._why_to_stop(self.records) is not None
        return reached or stopped or self.server.state.number >= self.plan.num_rounds

    def _why_to_stop(self, records: Sequence[Record]) -> str | None:
        """Say why the run ends early, as the job's [evaluate] wants; the coordinator asks the same function."""
        found: dict[str, list[tuple[int, float]]] = {}
        for line in records:
            own, theirs = line["round"] + 1, line.get("evaluation", {})
            values = {"accuracy": (own, line.get("accuracy")), "mean_loss": (own, line.get("test_loss"))}
            values |= {f"device_{key}": (line["round"], theirs.get(key)) for key in ("accuracy", "mean_loss")}
            for metric, (version, value) in values.items():
                found.setdefault(metric, []).extend([] if value is None else [(version, value)])
        evaluate, scores = self.plan.evaluate, {metric: rows for metric, rows in found.items() if rows}
        best = find_best(evaluate.metric, scores)
        return None if best is None else reason_to_stop(evaluate.stop_rule, best.metric, scores[best.metric])

    def _round(self, pool: Pool) -> dict[str, Any]:
        began, server, number = time.perf_counter(), self.server, self.server.state.number
        invited = server.invite()
        seats, draws, hands_on = invited.counted, invited.draws, server.engine.inherits(number + 1)
        pool.share("vectors", self._vectors())
        compares = self._due(self.options.svcca_every, number)
        measures = self._due(self.options.apart_every, number)
        facts, saved = server.state.facts, self.saved
        works = [
            Share(number, facts, draws, groups, hands_on, compares, measures, saved)
            for groups in self.assigner.assign(seats)
        ]
        sums, found = server.sums(invited), []
        apart = StepSums(self.plan, self.manifest.space, draws) if measures else None
        keeps = server.engine.keeps_state
        for answer, arrays in pool.map({"work": work.encode(), "files": work.files(keeps)} for work in works):
            found.append(answer["done"])
            if apart:
                apart.merge(answer["apart"], arrays["apart"])
            for row, (name, header) in enumerate(answer["totals"].items()):
                sums.merge(name, Accumulator.load(self.manifest.space, header, arrays["sums"][row]))
        if hands_on:
            forget_handed_on(self.folder, (number, saved - 1))
        arrived = {slot for done in found for slot in done["arrived"]}
        self._check_kept(number, [report for done in found for report in done["reports"]])
        server.close(invited, [seat for seat in seats if seat.slot in arrived], sums)
        reports = [report for done in found for report in done["reports"]]
        failures = [failure for done in found for failure in done["failures"]]
        line = {"round": number, **_summary(reports), **server.engine.reuse(sums, reports), "failures": len(failures)}
        if invited.seconds is not None:
            line |= {"round_seconds": invited.seconds, "late": len(invited.seats) - len(seats)}
        if self.options.link:
            line["link_seconds"] = max(map(partial(_exchange_seconds, self.options.link), reports), default=0.0)
        answers = ((row["boundary"], (row["samples"], 0, row)) for row in reports)
        if (scores := server.engine.device_scores(answers)) is not None:
            line["evaluation"] = {"version": number, **scores}
        if self._due(self.options.evaluate_every, number):
            score = self._score(pool, self.plan.evaluate.statistics)
            line |= {"test_loss": score.mean_loss, "accuracy": score.accuracy}
            line |= {"by_head": score.describe()["by_head"]} if score.heads else {}
        if self._due(self.options.both_statistics_every, number):
            line["by_statistics"] = {kind: self._score(pool, kind).accuracy for kind in ("global", "static")}
        if self._due(self.options.by_layer_every, number):
            moved = total_of(Traffic(**done["traffic"]) for done in found)
            measured = server.engine.by_layer(sums, server.state.facts)
            line["per_layer"] = {**measured, "bytes_up": moved.up, "bytes_down": moved.down}
        if apart:
            line["apart"] = apart.distances()
        if compares:
            line.setdefault("per_layer", {})["svcca"] = compare_saved(self.folder)
        line["seconds"] = time.perf_counter() - began
        return line

    def _seconds_of(self, seat: SeatTask, number: int) -> float:
        """What a task takes at the fleet's pace: its arithmetic, and what it fetches and sends."""
        assert self.fleet.table.pace is not None
        covered = coverage(self.manifest, seat.task.boundary)
        trained = trained_region(self.manifest, covered).size
        frozen = 0 if seat.age else of_layers(self.manifest.space, range(covered.boundary.layer)).size
        sent = trained + measured_region(self.manifest, covered).size
        moved = Traffic({"": FLOAT32 * sent}, {"": FLOAT32 * (frozen + trained)})
        tier = self.server.profiles[seat.device].tier
        return self.fleet.table.pace.seconds(self.plan.seed, seat.device, tier, number, self.assigner.macs(seat), moved)

    def _check_kept(self, number: int, reports: Sequence[Mapping[str, Any]]) -> None:
        """End a run in which devices lost what they had kept: a fleet may go on from less, a simulation may not."""
        lost = sum(report["lost_state"] for report in reports)
        if lost:
            raise EmbraceError(
                f"round {number + 1}: {lost} of {len(reports)} devices lost what they had kept, which changes the "
                f"result: files are missing below {self.folder / KEPT}; begin again in another folder"
            )

    def _due(self, every: int, number: int) -> bool:
        return bool(every) and ((number + 1) % every == 0 or number + 1 == self.plan.num_rounds)

    def _score(self, pool: Pool, statistics: str) -> Score:
        pool.share("vectors", self._vectors())
        count, version = len(self.fleet.test_numbers), self.server.state.number
        step = SCORED * -(-count // (SCORED * MOST_SCORES))  # whatever the number of workers: sums of floats keep order
        starts = range(0, count, step)
        jobs = [
            {"score": [start, min(start + step, count)], "version": version, "statistics": statistics}
            for start in starts
        ]
        return sum((Score(**answer["score"]) for answer, _ in pool.map(jobs)), Score())

    # --- what is written ---------------------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        """Write what the run is, or see that the folder has the same one."""
        about: dict[str, Any] = {
            "name": self.plan.name or self.plan.algorithm or self.manifest.name,
            "job": {**plan_to(self.plan, own_rules=True), "simulate": self.fleet.table.to_json()},
            "engine": self.options.engine,
            "machine": describe_device(),
        }
        path = self.folder / FACTS
        if path.is_file():
            known = json.loads(path.read_text())
            job = json.loads(json.dumps(about["job"]))
            same = known.get("job") == job or _with_defaults(known.get("job")) == job
            if not same or known.get("engine") != about["engine"]:
                raise InputError(f"{self.folder} has another run in it; choose another folder")
        path.write_text(json.dumps(about, indent=1) + "\n")
        return about

    def _record(self, record: Record) -> None:
        self.records.append(record)
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _save(self, final: bool = False) -> None:
        state = self.server.state
        if final:
            write_weights(self.folder / WEIGHTS, self.manifest.space, np.array(state.vectors[MODEL]))
        about = {
            "number": state.number,
            "facts": asdict(state.facts),
            "last": state.last,
            "previous": state.previous,
            "arrived": {str(slot): task for slot, task in state.arrived.items()},
            "stored": state.stored,
            "wanted": state.wanted,
            "task_seconds": state.seconds,
            "lines": len(self.records),
        }
        save_state(self.folder / CHECKPOINT, state.vectors, {"state": json.dumps(about)})
        self.saved = state.number

    def _resume(self) -> None:
        path, metrics = self.folder / CHECKPOINT, self.folder / METRICS
        if not path.is_file():
            metrics.unlink(missing_ok=True)
            return
        vectors, words = load_state(path)
        about = json.loads(words["state"])
        self.saved = about["number"]
        self.records = [json.loads(line) for line in metrics.read_text().splitlines()[: about["lines"]]]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in self.records))
        self.server.state = ServerState(
            {name: np.array(vector) for name, vector in vectors.items()},
            self.server.engine.facts_of(about["number"], about["facts"]),
            about["number"],
            {device: (int(number), str(task)) for device, (number, task) in about["last"].items()},
            [(str(device), str(boundary), int(count)) for device, boundary, count in about["previous"]],
            {int(slot): str(task) for slot, task in about["arrived"].items()},
            {device: (int(number), int(layer)) for device, (number, layer) in about.get("stored", {}).items()},
            about.get("wanted", 0),
            {device: float(seconds) for device, seconds in about.get("task_seconds", {}).items()},
        )


def _with_defaults(job: Any) -> Any:
    """Add the keys that a job does not name: a run may have been begun by a program that had fewer of them."""
    try:
        return json.loads(json.dumps({**plan_to(plan_from(job)), "simulate": job["simulate"]}))
    except (EmbraceError, LookupError, TypeError):
        return None


def _exchange_seconds(link: Link, report: Mapping[str, Any]) -> float:
    moved = report["bytes"]
    return link.seconds(Traffic({"": moved["uploaded"]}, {"": moved["downloaded"]}, sum(map(bool, moved.values()))))


def _summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what devices reported."""
    losses = [report["loss"] for report in reports if report["loss"] is not None]
    return {
        "steps": max((report["steps"] for report in reports), default=0),
        "loss": math.fsum(losses) / len(losses) if losses else None,
        "devices": len(reports),
        "samples": sum(report["samples"] for report in reports),
        "bytes_up": sum(report["bytes"]["uploaded"] for report in reports),
        "bytes_down": sum(report["bytes"]["downloaded"] for report in reports),
        "messages": sum(bool(moved) for report in reports for moved in report["bytes"].values()),
        "lost_state": sum(report["lost_state"] for report in reports),
    }
