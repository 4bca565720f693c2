"""A whole simulation: rounds, scores, a record of each, and a checkpoint to go on from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.bundle_files import map_weights, read_manifest, write_weights
from edge_runtime.machine import describe_device
from edge_runtime.state_file import load_state, save_state
from federation.accumulate import Accumulator
from federation.algorithm import Facts
from federation.decode import decode
from federation.errors import InputError
from federation.job import parse_plan, plan_to
from federation.layout import MODEL
from federation.metrics import Score
from federation.traffic import Link, Traffic, total_of
from simulation.assignment import Dealer
from simulation.devices import Share
from simulation.fleet import Scene, open_scene, shared_arrays
from simulation.pool import LocalPool, Pool
from simulation.pool import Plan as WorkPlan
from simulation.server import ServerState, SimulatedServer
from simulation.shared_arrays import layouts
from simulation.similarity import compare

CHECKPOINT_SECONDS = 20.0
SCORED = 256  # test samples that are scored together, whatever the number of processes
Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True)
class Options:
    """How a simulation is computed; none of it changes the result but the engine."""

    engine: str = "torch"  # or portable
    workers: int = 2
    pool: Callable[[WorkPlan, int], Pool] = LocalPool
    evaluate_every: int = 1  # rounds; 0: never
    by_layer_every: int = 0  # rounds between measurements of every layer; 0: never
    svcca_every: int = 0  # rounds between comparisons of all local models, layer by layer; 0: never
    link: Link | None = None  # how long the exchange of each round would take on it
    stop_at: float | None = None  # accuracy at which the run ends early

    def __post_init__(self) -> None:
        if self.engine not in ("torch", "portable"):
            raise InputError(f"engine: expected torch or portable, got {self.engine!r}")


def open_job(
    file: Path,
    given: Mapping[str, Any],
    data_dir: Path | None,
    *,
    num_rounds: int | None = None,
    seed: int | None = None,
) -> Scene:
    """The scene of a job file; the bundle it names is looked for beside it."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is no TOML: expected text in UTF-8") from None
    plan = parse_plan(text)
    told = {"num_rounds": num_rounds, "seed": seed}
    plan = replace(plan, **{key: value for key, value in told.items() if value is not None})
    bundle = file.parent / plan.bundle
    return open_scene(plan, given, bundle, read_manifest(bundle), data_dir)


class Simulation:
    """One run in one folder; what is there already is gone on with."""

    def __init__(self, scene: Scene, folder: Path, options: Options) -> None:
        self.scene = scene
        self.folder = folder
        self.options = options
        self.plan = scene.plan
        self.manifest = scene.manifest
        weights = map_weights(scene.bundle / self.manifest.weights.name, self.manifest.space)
        profiles = {device.id: device.profile for device in scene.devices}
        self.server = SimulatedServer(self.plan, self.manifest, profiles, weights)
        samples = {device.id: len(device.numbers) for device in scene.devices}
        self.dealer = Dealer(self.plan, self.manifest, samples, options.engine == "torch", options.workers)
        self.lines: list[dict[str, Any]] = []
        self.saved = 0  # the round that the checkpoint goes on with

    def run(self, progress: Progress = lambda what, done, total: None) -> list[dict[str, Any]]:
        """Every round that is still to come; returns the records of all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._describe()
        self._resume()
        if self._finished():
            return self.lines
        pool = self._open_pool()
        try:
            self._rounds(pool, progress)
        finally:
            pool.close()
        self._save(final=True)
        return self.lines

    def _open_pool(self) -> Pool:
        arrays, vectors = shared_arrays(self.scene), self.server.state.vectors
        ends = np.cumsum([0, *(len(device.numbers) for device in self.scene.devices)])
        places = [[d.id, int(a), int(b)] for d, a, b in zip(self.scene.devices, ends, ends[1:])]
        settings = {
            "bundle": str(self.scene.bundle),
            "plan": plan_to(self.plan),
            "folder": str(self.folder),
            "engine": self.options.engine,
            "vectors": list(vectors),
            "devices": places,
        }
        shared, slot = layouts(self.manifest, arrays, len(vectors), 1 + len(self.plan.choices.tracks))
        plan = WorkPlan("simulation.worker:build", settings, shared, slot)
        pool = self.options.pool(plan, self.options.workers)
        for name, array in arrays.items():
            pool.share(name, array)
        return pool

    def _rounds(self, pool: Pool, progress: Progress) -> None:
        saved = time.monotonic()
        while not self._finished():
            number = self.server.state.number
            progress(f"round {number + 1}", number, self.plan.num_rounds)
            self._record(self._round(pool))
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()
        progress("done", self.plan.num_rounds, self.plan.num_rounds)

    def _finished(self) -> bool:
        best = max((line["accuracy"] for line in self.lines if line.get("accuracy") is not None), default=0.0)
        reached = self.options.stop_at is not None and best >= self.options.stop_at
        return reached or self.server.state.number >= self.plan.num_rounds

    def _round(self, pool: Pool) -> dict[str, Any]:
        began, server, number = time.perf_counter(), self.server, self.server.state.number
        seats = server.seats()
        draws, hands_on = sum(seat.count for seat in seats), server.hands_on(number + 1)
        pool.share("vectors", np.stack(list(server.state.vectors.values())))
        compares = self._due(self.options.svcca_every, number)
        facts, saved = server.state.facts, self.saved
        works = [Share(number, facts, draws, groups, hands_on, compares, saved) for groups in self.dealer.deal(seats)]
        sums, found = server.sums(seats), []
        for answer, arrays in pool.map({"work": work.encode()} for work in works):
            found.append(answer["done"])
            for row, (name, header) in enumerate(answer["totals"].items()):
                sums.merge(name, Accumulator.load(self.manifest.space, header, arrays["sums"][row]))
        arrived = {slot for done in found for slot in done["arrived"]}
        server.close(seats, [seat for seat in seats if seat.slot in arrived], sums)
        reports = [report for done in found for report in done["reports"]]
        failures = [failure for done in found for failure in done["failures"]]
        line = {"round": number, **_summary(reports), "failures": len(failures)}
        if self.options.link:
            line["link_seconds"] = max(map(partial(_exchange_seconds, self.options.link), reports), default=0.0)
        if self._due(self.options.evaluate_every, number):
            score = self._score(pool)
            line |= {"test_loss": score.mean_loss, "accuracy": score.accuracy}
        if self._due(self.options.by_layer_every, number):
            moved = total_of(Traffic(**done["traffic"]) for done in found)
            line["per_layer"] = {**server.by_layer(sums), "bytes_up": moved.up, "bytes_down": moved.down}
        if compares:
            line.setdefault("per_layer", {})["svcca"] = compare(self.folder)
        line["seconds"] = time.perf_counter() - began
        return line

    def _due(self, every: int, number: int) -> bool:
        return bool(every) and ((number + 1) % every == 0 or number + 1 == self.plan.num_rounds)

    def _score(self, pool: Pool) -> Score:
        pool.share("vectors", np.stack(list(self.server.state.vectors.values())))
        count = len(self.scene.test_numbers)
        step = SCORED * max(1, -(-count // (SCORED * self.options.workers)))
        jobs = [{"score": [start, min(start + step, count)]} for start in range(0, count, step)]
        return sum((Score(**answer["score"]) for answer, _ in pool.map(jobs)), Score())

    # --- what is written ---------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        about = {
            "name": self.plan.name or self.plan.algorithm or self.manifest.name,
            "job": {**plan_to(self.plan), "simulate": asdict(self.scene.table)},
            "engine": self.options.engine,
            "machine": describe_device(),
        }
        path = self.folder / "run.json"
        if path.is_file():
            known = json.loads(path.read_text())
            same = json.loads(json.dumps(about["job"])) == known.get("job") and known.get("engine") == about["engine"]
            if not same:
                raise InputError(f"{self.folder} has another run in it; choose another folder")
        path.write_text(json.dumps(about, indent=1) + "\n")

    def _record(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self, final: bool = False) -> None:
        state = self.server.state
        if final:
            write_weights(self.folder / "weights.safetensors", self.manifest.space, np.array(state.vectors[MODEL]))
        about = {
            "number": state.number,
            "facts": asdict(state.facts),
            "last": state.last,
            "previous": state.previous,
            "arrived": {str(slot): task for slot, task in state.arrived.items()},
            "lines": len(self.lines),
        }
        save_state(self.folder / "checkpoint", state.vectors, {"state": json.dumps(about)})
        self.saved = state.number

    def _resume(self) -> None:
        path, metrics = self.folder / "checkpoint", self.folder / "metrics.jsonl"
        if not path.is_file():
            metrics.unlink(missing_ok=True)
            return
        vectors, words = load_state(path)
        about = json.loads(words["state"])
        self.saved = about["number"]
        self.lines = [json.loads(line) for line in metrics.read_text().splitlines()[: about["lines"]]]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.server.state = ServerState(
            {name: np.array(vector) for name, vector in vectors.items()},
            decode(Facts, about["facts"], "facts"),
            about["number"],
            {device: (int(number), str(task)) for device, (number, task) in about["last"].items()},
            [(str(device), str(boundary), int(count)) for device, boundary, count in about["previous"]],
            {int(slot): str(task) for slot, task in about["arrived"].items()},
        )


def _exchange_seconds(link: Link, report: Mapping[str, Any]) -> float:
    moved = report["bytes"]
    return link.seconds(Traffic({"": moved["uploaded"]}, {"": moved["downloaded"]}, sum(map(bool, moved.values()))))


def _summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What devices said, in sum."""
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
