"""How much memory training from each boundary takes, measured, beside what the papers' formula says and PyTorch needs.

Every case runs in fresh processes, of which the one in the middle counts: PyTorch's peak differs by a tenth from one
process to the next, because it depends on how its freed blocks lie. What is measured is the peak on top of the idle
process, with its runtime loaded and warm: anonymous memory, which only this process has, and file-backed memory (code,
mapped files), which the kernel can drop. The idle process itself is reported apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from bench.device.agents import measure_agents
from bench.device.subject import Progress, Subject, open_subject
from edge_runtime.engine.choose import EngineName
from edge_runtime.machine import describe_device
from edge_runtime.measure import Case, in_fresh_process, measure
from federation.capacity import capacity, predicted_memory
from federation.errors import EmbraceError, OutOfMemory
from federation.manifest import Boundary

ITERATIONS = 5
Runner = Literal["portable", "ort-training", "torch"]
Bytes = dict[str, int]  # resident (idle only), anonymous, file_backed, total (peaks only)


@dataclass(frozen=True)
class MemoryRow:
    """One boundary, trained by one engine or by PyTorch."""

    boundary: str
    tiers: list[str]
    runner: Runner
    predicted: int  # bytes by the papers' formula
    capacity: float
    idle: Bytes
    training: Bytes  # peak of training from the boundary, of the process in the middle
    whole_round: Bytes | None  # peak if the frozen layers run before, in the same process; None: there are none
    anonymous_of_all: list[int]  # peak of training in every process
    agent: Bytes | None = None  # peak of an agent's tasks, as it reports it; None: not measured

    @property
    def anonymous(self) -> int | None:
        return self.training.get("anonymous")

    @property
    def round_anonymous(self) -> int | None:
        return self.whole_round.get("anonymous") if self.whole_round else self.anonymous

    @property
    def agent_anonymous(self) -> int | None:
        return self.agent.get("anonymous") if self.agent else None


@dataclass
class MemoryReport:
    """What was measured, on what, and what could not be."""

    model: str
    batch: int
    threads: int
    device: dict[str, str]
    rows: list[MemoryRow]
    notes: list[str]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> MemoryReport:
        """Back from what `--json` printed."""
        known = [key.name for key in fields(MemoryRow)]  # older results lack what agents took
        rows = [MemoryRow(**{key: case[key] for key in known if key in case}) for case in facts["cases"]]
        return cls(**{key: facts[key] for key in ("model", "batch", "threads", "device", "notes")}, rows=rows)

    @property
    def runners(self) -> list[Runner]:
        return list(dict.fromkeys(row.runner for row in self.rows))

    def row(self, boundary: str, runner: Runner) -> MemoryRow | None:
        return next((row for row in self.rows if (row.boundary, row.runner) == (boundary, runner)), None)

    def strong(self, runner: Runner) -> MemoryRow | None:
        """What the others are compared with: training everything."""
        return next((row for row in self.rows if row.runner == runner and "strong" in row.tiers), None)

    def predicted_ratio(self, row: MemoryRow) -> float | None:
        strong = self.strong(row.runner)
        return row.predicted / strong.predicted if strong else None

    def training_ratio(self, row: MemoryRow) -> float | None:
        """Anonymous peak of training, relative to training everything."""
        strong = self.strong(row.runner)
        return _quotient(row.anonymous, strong.anonymous) if strong else None

    def round_ratio(self, row: MemoryRow) -> float | None:
        """The same for a process that runs the frozen layers first, at the same batch size."""
        strong = self.strong(row.runner)
        return _quotient(row.round_anonymous, strong.anonymous) if strong else None

    def agent_ratio(self, row: MemoryRow) -> float | None:
        """The same for agents."""
        strong = self.strong(row.runner)
        return _quotient(row.agent_anonymous, strong.agent_anonymous) if strong else None

    def to_torch(self, row: MemoryRow) -> float | None:
        """Anonymous peak of training relative to PyTorch's at the same boundary."""
        torch = self.row(row.boundary, "torch")
        return _quotient(row.anonymous, torch.anonymous) if torch and row.runner != "torch" else None


def _quotient(value: int | None, divisor: int | None) -> float | None:
    return value / divisor if value is not None and divisor else None


def bench_memory(
    reference: str,
    *,
    batch: int | None = None,
    threads: int = 1,
    boundaries: str = "tiers",
    engine: str = "all",
    repeats: int = 3,
    agents: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> MemoryReport:
    """Measure a model or a bundle from its tiers, from named boundaries, or from all of them; with real agents, too."""
    with tempfile.TemporaryDirectory(prefix="embrace-bench-") as folder:
        subject = open_subject(reference, engine, Path(folder), progress=progress)
        size = batch or subject.manifest.batch
        notes = list(subject.manifest.notes)
        runners = _runners(subject, notes)
        cases = [(place, runner) for place in subject.places(boundaries) for runner in runners]
        rows = []
        for done, ((boundary, tiers), runner) in enumerate(cases):
            progress(f"{boundary.name}, {runner}", done, len(cases))
            if runner != "torch" and runner not in subject.engines_at(boundary):
                notes.append(f"{runner}: no graph for {boundary.name}")
                continue
            try:
                measured = _measured(subject, boundary, runner, size, threads, repeats)
            except OutOfMemory as error:
                notes.append(f"{boundary.name}, {runner}: not measured, {error}")
                continue
            except EmbraceError as error:
                if runner != "torch":
                    raise
                notes.append(f"PyTorch at {boundary.name}: {error}")
                continue
            predicted = predicted_memory(subject.manifest, boundary, size).total
            share = capacity(subject.manifest, boundary, size)
            rows.append(MemoryRow(boundary.name, tiers, runner, predicted, share, *measured))
        own = [(n, row, row.runner) for n, row in enumerate(rows) if row.runner != "torch"]
        told = [Case(str(subject.directory), row.boundary, runner, size, threads) for _, row, runner in own]
        for (number, row, _), peak in zip(own, measure_agents(told, agents, notes, progress), strict=True):
            rows[number] = replace(row, agent=peak)
        progress("done", len(cases), len(cases))
    if not any(row.training for row in rows):
        raise EmbraceError(notes[-1] if notes else "this system does not say how much memory a process takes")
    return MemoryReport(subject.manifest.name, size, threads, describe_device(), rows, notes)


def _runners(subject: Subject, notes: list[str]) -> list[Runner]:
    """The engines, and PyTorch where it is installed and the model is one of its modules."""
    if subject.manifest.source.kind == "onnx":
        notes.append("PyTorch: the model comes from an ONNX file, so there is no module to compare with")
    elif not _has_torch():
        notes.append("PyTorch is not installed here, so it is not compared with")
    else:
        return [*subject.engines, "torch"]
    return list(subject.engines)


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


def _measured(
    subject: Subject, boundary: Boundary, runner: Runner, batch: int, threads: int, repeats: int
) -> tuple[Bytes, Bytes, Bytes | None, list[int]]:
    """(idle, peak of training, peak of a round with frozen layers, peaks of every process)."""

    def run(whole_round: bool) -> tuple[Bytes, Bytes]:
        if runner == "torch":
            found = _torch(subject, boundary, batch, threads)
            return found["idle"], found["memory"]
        one = measure(_case(subject, boundary, runner, batch, threads, whole_round=whole_round))
        return one.idle, one.memory

    runs = sorted((run(False) for _ in range(repeats)), key=_anonymous)
    idle, training = runs[len(runs) // 2]
    rounds = [run(True) for _ in range(repeats)] if subject.manifest.frozen(boundary) and runner != "torch" else []
    whole_round = sorted(rounds, key=_anonymous)[len(rounds) // 2][1] if rounds else None
    return idle, training, whole_round, [_anonymous(one) for one in runs]


def _anonymous(run: tuple[Bytes, Bytes]) -> int:
    return run[1].get("anonymous", 0)


def _case(
    subject: Subject, boundary: Boundary, engine: EngineName, batch: int, threads: int, *, whole_round: bool
) -> Case:
    return Case(
        str(subject.directory),
        boundary.name,
        engine,
        batch,
        threads,
        warm_up=0,
        iterations=ITERATIONS,
        whole_round=whole_round,
        divide=False,
    )


def _torch(subject: Subject, boundary: Boundary, batch: int, threads: int) -> dict[str, Any]:
    request = {
        "bundle": str(subject.directory.resolve()),
        "boundary": boundary.name,
        "batch": batch,
        "threads": threads,
        "iterations": ITERATIONS,
    }
    return in_fresh_process("bench.device.torch_memory", request, f"PyTorch from {boundary.name!r}")
