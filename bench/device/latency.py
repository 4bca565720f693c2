"""Where the milliseconds of a training iteration go: training the last layers, and training a narrow model.

Two ways to let a weaker device take part are compared: EmbracingFL, which freezes the first layers and trains the rest,
and width reduction (HeteroFL), which trains a whole model with fewer channels. Every case runs in a fresh process
(edge_runtime/measure.py), which also gives its peak memory. Cases take turns, a few iterations at a time, so that
whatever else the machine does meets all of them alike; figures are medians over all iterations.

The published figures are Table 8 of EmbracingFL.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from bench.device.agents import measure_agents
from bench.device.subject import Progress, Subject, has_graph, is_bundle, open_subject
from edge_runtime.activations import StoredType
from edge_runtime.engine.choose import EngineName
from edge_runtime.engine.session import FrozenType, RuntimeSettings
from edge_runtime.machine import describe_device
from edge_runtime.measure import Case, Measurement, measure
from federation.errors import InputError, OutOfMemory

TURNS = 3  # processes per case
WARM_UP = 2  # iterations of each process that do not count
WIDTHS: Mapping[str, float] = MappingProxyType({"moderate": 0.45, "weak": 0.2})

Method = Literal["whole model", "EmbracingFL", "width reduction"]
# Milliseconds that add up to `with_forward`; the last four of them to `iteration`, two of those to `step`.
PARTS = ("frozen_forward", "activation_io", "training_forward", "backward", "optimiser")
SUMS = ("step", "iteration", "with_forward", "reusing")
REUSED = 4  # rounds that `reusing` spreads the frozen forward over: refresh_every
ROW_KEYS = ("method", "tier", "model", "boundary", "engine")


@dataclass(frozen=True)
class LatencyRow:
    """One case: tier, boundary, engine, and everything that was measured of it."""

    method: Method
    tier: str
    model: str
    boundary: str
    engine: EngineName
    runs: list[Measurement] = field(default_factory=list)
    agent: int | None = None  # peak anonymous bytes of a real agent's tasks, on top of the idle process

    def series(self, part: str) -> list[float]:
        """Milliseconds of every counted iteration, process after process."""
        share = self.forward_share
        return [1e3 * value for run in self.runs for value in _seconds(run, part, share)]

    def median(self, part: str) -> float:
        return float(np.median(self.series(part)))

    def quartiles(self, part: str) -> tuple[float, float]:
        low, high = np.percentile(self.series(part), [25, 75])
        return float(low), float(high)

    @property
    def forward_share(self) -> float:
        """Of a training step: each process finds one from the runtime's record, the middle one is taken for all."""
        return float(np.median([run.forward_share or 0.0 for run in self.runs]))

    @property
    def load(self) -> float:
        """Milliseconds to open the sessions, once."""
        return 1e3 * float(np.median([run.load for run in self.runs]))

    @property
    def memory(self) -> int | None:
        """Peak anonymous bytes on top of the idle process; None where the system does not say."""
        return max((run.memory["anonymous"] for run in self.runs if run.memory), default=None)


def _seconds(run: Measurement, part: str, share: float) -> list[float]:
    nothing = [0.0] * len(run.training)
    frozen, io = run.forward_compute or nothing, run.activation_io or nothing
    match part:
        case "frozen_forward":
            return frozen
        case "activation_io":
            return io
        case "training_forward":
            return [share * step for step in run.training]
        case "backward":
            return [(1.0 - share) * step for step in run.training]
        case "optimiser":
            return run.optimiser
        case "step":
            return run.training
        case "iteration":
            return [sum(parts) for parts in zip(io, run.training, run.optimiser)]
        case "with_forward":
            return [sum(parts) for parts in zip(frozen, io, run.training, run.optimiser)]
        case "reusing":
            return [first / REUSED + sum(parts) for first, *parts in zip(frozen, io, run.training, run.optimiser)]
    raise KeyError(part)


@dataclass(frozen=True)
class LatencyBar:
    """Something that the project promises, and what was measured."""

    engine: EngineName
    what: str
    limit: float
    measured: float | None

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.limit


@dataclass
class LatencyReport:
    """What was measured, how, on what, and what could not be."""

    model: str
    batch: int
    threads: int
    iterations: int
    stored_as: StoredType
    device: dict[str, str]
    rows: list[LatencyRow]
    notes: list[str]
    frozen: FrozenType = "float32"

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> LatencyReport:
        """Read what `--json` printed: only the raw measurements are taken, everything else is computed again."""
        rows = [
            LatencyRow(
                **{key: case[key] for key in ROW_KEYS},
                runs=[Measurement(**run) for run in case["processes"]],
                agent=case.get("agent"),
            )
            for case in facts["cases"]
        ]
        head = {key: facts[key] for key in ("model", "batch", "threads", "iterations", "stored_as", "device", "notes")}
        return cls(**head, rows=rows, frozen=facts.get("frozen", "float32"))

    @property
    def engines(self) -> list[EngineName]:
        return list(dict.fromkeys(row.engine for row in self.rows))

    def strong(self, engine: EngineName) -> LatencyRow | None:
        """The row that the others of its engine are compared with."""
        return next((row for row in self.rows if row.engine == engine and row.method == "whole model"), None)

    def weakest(self, engine: EngineName) -> LatencyRow | None:
        """The row of the tier that trains least; None if this engine cannot serve it."""
        tiers = [row.tier for row in self.rows if row.method == "EmbracingFL"]
        lowest = "weak" if "weak" in tiers else tiers[-1] if tiers else None
        rows = (row for row in self.rows if row.engine == engine and row.method == "EmbracingFL")
        return next((row for row in rows if row.tier == lowest), None)

    def ratio(self, row: LatencyRow, part: str) -> float | None:
        """A median, or 'memory', relative to training everything with the same engine."""
        strong = self.strong(row.engine)
        if strong is None:
            return None
        if part == "memory":
            return row.memory / strong.memory if row.memory is not None and strong.memory else None
        return row.median(part) / strong.median(part)

    def bars(self) -> list[LatencyBar]:
        """The project's promises about the weakest tier, for every engine."""
        found = []
        for engine in self.engines:
            weakest = self.weakest(engine)

            def of_strong(part: str, weakest: LatencyRow | None = weakest) -> float | None:
                return self.ratio(weakest, part) if weakest else None

            # Narrow models are the others' method: their shares are reported, not promised.
            own = [row for row in self.rows if row.engine == engine and row.method != "width reduction"]
            most = max(map(backward_share, own), default=None)
            tier = weakest.tier if weakest else "weak"
            found += [
                LatencyBar(engine, f"{tier} step / strong step", 0.25, of_strong("step")),
                LatencyBar(engine, f"{tier} iteration / strong iteration", 0.25, of_strong("iteration")),
                LatencyBar(engine, "backward / training forward, worst tier", 3.0, most),
            ]
        return found


def backward_share(row: LatencyRow) -> float:
    """How many times longer the backward pass takes than the forward pass of the trained part."""
    return row.median("backward") / row.median("training_forward")


def bench_latency(
    reference: str,
    *,
    batch: int = 32,
    threads: int = 1,
    iterations: int = 10,
    engine: str = "all",
    stored_as: StoredType = "float32",
    frozen: FrozenType = "float32",
    narrow: Mapping[str, str] | None = None,
    agents: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> LatencyReport:
    """Measure a zoo model and its narrow versions, or a bundle and the narrow bundles given: {tier: directory}."""
    RuntimeSettings(threads, frozen=frozen)  # refuses what is wrong with them
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="embrace-bench-") as name:
        folder = Path(name)
        subject = open_subject(reference, engine, folder, progress=progress)
        narrow_subjects = dict(_narrow(reference, narrow or {}, engine, subject, folder, notes, progress))
        made = [
            (row, _case(row, directory, batch, threads, stored_as, frozen))
            for row, directory in _rows(subject, narrow_subjects, notes)
        ]
        _measure(made, iterations, notes, progress)
        measured = [(row, case) for row, case in made if row.runs]
        peaks = measure_agents([case for _, case in measured], agents, notes, progress)
        rows = [
            replace(row, agent=(peak or {}).get("anonymous")) for (row, _), peak in zip(measured, peaks, strict=True)
        ]
    if not rows:
        raise OutOfMemory(f"nothing could be measured: {notes[-1]}")
    return LatencyReport(
        subject.manifest.name,
        batch,
        threads,
        iterations,
        stored_as,
        describe_device(),
        rows,
        [*subject.manifest.notes, *notes],
        frozen,
    )


def _narrow(
    reference: str,
    given: Mapping[str, str],
    engine: str,
    wide: Subject,
    folder: Path,
    notes: list[str],
    progress: Progress,
) -> Iterable[tuple[str, Subject]]:
    """Width reduction's models by tier: those given, or for a zoo model those of the paper."""
    for tier, directory in given.items():
        if not is_bundle(directory):
            raise InputError(f"--narrow {tier}={directory}: not a bundle; make one with 'embrace export NAME@RATIO'")
        yield tier, open_subject(directory, engine, folder)
    if given or is_bundle(reference) or wide.manifest.source.kind != "zoo" or "@" in reference:
        return
    for tier, ratio in WIDTHS.items():
        if tier not in wide.manifest.tiers:
            continue
        try:
            yield tier, open_subject(f"{reference}@{ratio}", engine, folder, boundaries=False, progress=progress)
        except InputError as error:  # not every model has a width to reduce
            notes.append(f"width reduction: {error}")
            return


def _rows(subject: Subject, narrow: Mapping[str, Subject], notes: list[str]) -> Iterable[tuple[LatencyRow, Path]]:
    """Every case with the bundle it needs: tier after tier, the two methods side by side."""
    manifest = subject.manifest
    places = subject.places("tiers") if manifest.tiers else [(manifest.boundaries[0], ["strong"])]
    if len(places) == 1:
        notes.append("the bundle names no weaker tier: export it with --tiers weak=0.16,moderate=0.42 to compare")
    for engine in subject.engines:
        for boundary, tiers in places:
            for tier in tiers:
                method: Method = "EmbracingFL" if tier != "strong" else "whole model"
                if has_graph(boundary, engine):
                    yield LatencyRow(method, tier, manifest.name, boundary.name, engine), subject.directory
                else:
                    notes.append(f"{engine}: no graph for {boundary.name} ({tier})")
                if tier in narrow and engine in narrow[tier].engines:
                    thin = narrow[tier].manifest
                    first = thin.boundaries[0].name
                    yield LatencyRow("width reduction", tier, thin.name, first, engine), narrow[tier].directory


def _case(
    row: LatencyRow, directory: Path, batch: int, threads: int, stored_as: StoredType, frozen: FrozenType
) -> Case:
    return Case(
        str(directory),
        row.boundary,
        row.engine,
        batch,
        threads,
        warm_up=WARM_UP,
        whole_round=True,
        stored_as=stored_as,
        frozen=frozen,
    )


def _measure(
    made: Sequence[tuple[LatencyRow, Case]],
    iterations: int,
    notes: list[str],
    progress: Progress,
    measure: Callable[[Case], Measurement] = measure,
) -> None:
    """Measure each case a few iterations at a time, in turns; another one begins in every turn."""
    turns = [count for count in _divided(iterations, TURNS) if count]
    failed: set[int] = set()
    for turn, count in enumerate(turns):
        order = [(number + turn) % len(made) for number in range(len(made))]
        for done, number in enumerate(order):
            row, case = made[number]
            progress(f"{row.model} {row.tier}, {row.engine}", turn * len(made) + done, len(turns) * len(made))
            if number in failed:
                continue
            try:
                row.runs.append(measure(replace(case, iterations=count)))
            except OutOfMemory as error:
                failed.add(number)
                row.runs.clear()
                notes.append(f"{row.model} {row.tier}, {row.engine}: not measured, {error}")
    progress("done", len(turns) * len(made), len(turns) * len(made))


def _divided(total: int, parts: int) -> list[int]:
    """Divide 10 into 3 parts: 4, 3, 3."""
    return [total // parts + (number < total % parts) for number in range(parts)]


class Figures(NamedTuple):
    """Milliseconds of one batch, as the paper divides them."""

    forward: float  # of the whole model, frozen or not
    io: float
    backward: float
    total: float


def _published(forward: float, io: float, backward: float) -> Figures:
    return Figures(forward, io, backward, forward + io + backward)


PHONE = "OnePlus 9 Pro, MNN (published)"
PHONE_MODEL = "resnet20"
PHONE_STRONG: Mapping[Method, Figures] = MappingProxyType(
    {"EmbracingFL": _published(2095.4, 0.0, 419_643.8), "width reduction": _published(2010.7, 0.0, 421_047.5)}
)
PHONE_WEAKER: Mapping[tuple[Method, str], Figures] = MappingProxyType(
    {
        ("EmbracingFL", "moderate"): _published(2095.4, 678.4, 197_265.0),
        ("width reduction", "moderate"): _published(1431.0, 0.0, 317_669.7),
        ("EmbracingFL", "weak"): _published(2095.4, 1316.8, 85_448.3),
        ("width reduction", "weak"): _published(936.7, 0.0, 187_580.4),
    }
)


@dataclass(frozen=True)
class TierComparison:
    """One line relative to training everything on the same device; I/O relative to the forward pass of that."""

    method: Method
    tier: str
    where: str
    forward: float
    io: float
    backward: float
    total: float


def compare_with_phone(found: LatencyReport) -> list[TierComparison]:
    """The published figures beside this device's, each relative to its own strong row; nothing for other models."""
    if found.model != PHONE_MODEL:
        return []
    lines = []
    for (method, tier), figures in PHONE_WEAKER.items():
        lines.append(TierComparison(method, tier, PHONE, *_relative(figures, PHONE_STRONG[method])))
        for row in found.rows:
            strong = found.strong(row.engine)
            if (row.method, row.tier) == (method, tier) and strong is not None:
                where = f"here, {row.engine}"
                lines.append(TierComparison(method, tier, where, *_relative(_figures(row), _figures(strong))))
    return lines


def _figures(row: LatencyRow) -> Figures:
    """Forward is all of it; the optimiser, which the paper does not name, goes with the backward pass."""
    return Figures(
        row.median("frozen_forward") + row.median("training_forward"),
        row.median("activation_io"),
        row.median("backward") + row.median("optimiser"),
        row.median("with_forward"),
    )


def _relative(row: Figures, strong: Figures) -> Figures:
    return Figures(
        row.forward / strong.forward,
        row.io / strong.forward,
        row.backward / strong.backward,
        row.total / strong.total,
    )
