"""`embrace bench latency`: where the milliseconds of an iteration go, on devices of every strength."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.bench.report import (
    BenchReport,
    TextTable,
    check_targets,
    deliver,
    megabytes,
    milliseconds,
    ratio,
    threads_of,
)
from federation.errors import InputError

if TYPE_CHECKING:
    from bench.device.latency import LatencyBar, LatencyReport, LatencyRow
    from edge_runtime.activations import StoredType

HEADS = {
    "frozen_forward": "frozen forward",
    "activation_io": "activation I/O",
    "training_forward": "training forward",
    "backward": "backward",
    "optimiser": "optimiser",
    "iteration": "iteration",
    "with_forward": "with forward",
}


def latency(
    model: Annotated[str, typer.Argument(help="A zoo name, a forward graph model.onnx, or a bundle.")] = "resnet20",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 32,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the runtime.")] = 1,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of each case that count.")] = 10,
    engine: Annotated[str, typer.Option(help="portable, ort-training, or all that are available.")] = "all",
    stored_as: Annotated[str, typer.Option(help="Stored activations: float32 or float16.")] = "float32",
    frozen: show.Frozen = "float32",
    narrow: Annotated[
        str | None, typer.Option(help="Bundles of width reduction: moderate=DIRECTORY,weak=DIRECTORY")
    ] = None,
    agents: Annotated[bool, typer.Option(help="Also measure agents of a coordinator, which is started.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, with every iteration.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw where the time goes: FILE.png")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a report: FILE.md")] = None,
) -> None:
    """Time one iteration of strong, moderate and weak devices: EmbracingFL, and width reduction for comparison.

    Every case runs in fresh processes. `iteration` is what repeats in every local step: reading and writing stored
    activations, forward and backward of the trained layers, the optimiser. `with forward` adds the frozen layers'
    forward pass of the batch, through which every sample goes once per round. With `--frozen int8` opening the sessions
    (`load`) has the making of their graph in it.

    Example: embrace bench latency resnet20 --batch 32 --plot latency.png --out report.md
    """
    check_targets(plot, out)
    with show.progress("bench") as progress:
        from bench.device.latency import bench_latency

        found = bench_latency(
            model,
            batch=batch,
            threads=threads,
            iterations=iterations,
            engine=engine,
            stored_as=_stored_type(stored_as),
            frozen=frozen,  # type: ignore[arg-type]
            narrow=_parse_narrow(narrow),
            agents=agents,
            progress=progress,
        )
    if plot is not None:
        draw(found, plot)
    deliver(report_of(found, plot), out, summary(found) if json_ else None)


def _stored_type(text: str) -> StoredType:
    if text not in ("float32", "float16"):
        raise InputError(f"--stored-as {text}: expected float32 or float16")
    return "float32" if text == "float32" else "float16"


def _parse_narrow(text: str | None) -> dict[str, str]:
    pairs = [part.partition("=") for part in show.comma_list(text)]
    if not all(tier and directory for tier, _, directory in pairs):
        raise InputError(f"--narrow {text}: expected TIER=DIRECTORY,…, e.g. weak=bundles/resnet20@0.2")
    return {tier: directory for tier, _, directory in pairs}


def summary(found: LatencyReport) -> dict[str, Any]:
    """All figures, as `--json` prints them. Times in milliseconds, memory in bytes."""
    from bench.device.latency import compare_with_phone

    return {
        "model": found.model,
        "batch": found.batch,
        "threads": found.threads,
        "iterations": found.iterations,
        "stored_as": found.stored_as,
        "frozen": found.frozen,
        "device": found.device,
        "cases": [_case(found, row) for row in found.rows],
        "published": [asdict(line) for line in compare_with_phone(found)],
        "bars": [{**asdict(bar), "met": bar.met} for bar in found.bars()],
        "notes": found.notes,
    }


def _case(found: LatencyReport, row: LatencyRow) -> dict[str, Any]:
    from bench.device.latency import PARTS, SUMS

    return {
        "method": row.method,
        "tier": row.tier,
        "model": row.model,
        "boundary": row.boundary,
        "engine": row.engine,
        "milliseconds": {
            part: {"median": row.median(part), "quartiles": list(row.quartiles(part)), "all": row.series(part)}
            for part in (*PARTS, *SUMS)
        },
        "forward_share": row.forward_share,
        "load": row.load,
        "memory": row.memory,
        "agent": row.agent,
        "relative": {part: found.ratio(row, part) for part in (*SUMS, "memory")},
        "processes": [asdict(run) for run in row.runs],
    }


def report_of(found: LatencyReport, plot: Path | None = None) -> BenchReport:
    setting = f"batch {found.batch}, {threads_of(found.threads)}, activations stored as {found.stored_as}"
    setting += "" if found.frozen == "float32" else f", frozen layers in {found.frozen}"
    tables = [*(_times(found, engine, setting) for engine in found.engines), _shares(found)]
    tables += [table] if (table := _phone(found)) else []
    pictures = {"milliseconds of one iteration, part by part": plot} if plot else {}
    title = f"{found.model}: one training iteration, {setting}"
    return BenchReport(title, tables, found.device, [*map(_bar, found.bars())], found.notes, pictures)


def _times(found: LatencyReport, engine: str, setting: str) -> TextTable:
    rows = [(row.tier, row.method, *(_cell(row, part) for part in HEADS)) for row in found.rows if row.engine == engine]
    title = f"{found.model}, {engine}, {setting}: ms, median (quartiles) of {found.iterations} iterations"
    return TextTable(title, ("tier", "method", *HEADS.values()), rows, 2)


def _names(row: LatencyRow) -> tuple[str, str, str]:
    return row.tier, row.method, row.engine


def _cell(row: LatencyRow, part: str) -> str:
    if not any(row.series(part)):
        return "–"
    low, high = row.quartiles(part)
    return f"{milliseconds(row.median(part))} ({milliseconds(low)}–{milliseconds(high)})"


def _shares(found: LatencyReport) -> TextTable:
    from bench.device.latency import REUSED, backward_share

    rows = [
        (
            *_names(row),
            *(ratio(found.ratio(row, part)) for part in ("step", "iteration", "with_forward", "reusing", "memory")),
            ratio(backward_share(row)),
            megabytes(row.memory),
            megabytes(row.agent),
            milliseconds(row.load),
        )
        for row in found.rows
    ]
    shares = ("step", "iteration", "with forward", f"… every {REUSED} rounds", "peak memory", "backward / forward")
    title = (
        f"{found.model}: relative to training everything (step: training forward and backward), peak memory, "
        "opening the sessions"
    )
    return TextTable(title, ("tier", "method", "engine", *shares, "peak memory MB", "agent MB", "load ms"), rows, 3)


def _phone(found: LatencyReport) -> TextTable | None:
    from bench.device.latency import compare_with_phone

    lines = compare_with_phone(found)
    if not lines:
        return None
    rows = [
        (
            *(line.tier, line.method, line.where, ratio(line.forward), ratio(line.io) if line.io else "–"),
            *map(ratio, (line.backward, line.total)),
        )
        for line in lines
    ]
    columns = ("tier", "method", "where", "forward", "I/O / strong forward", "backward", "total")
    return TextTable("beside the paper's phone: each device relative to its own strong row", columns, rows, 3)


def _bar(bar: LatencyBar) -> str:
    words = {True: "met", False: "missed", None: "not measured"}[bar.met]
    figure = "" if bar.measured is None else f" {bar.measured:.3f},"
    return f"{bar.engine}: {bar.what}:{figure} at most {bar.limit:g}: {words}"


def draw(found: LatencyReport, file: Path) -> None:
    from bench.device.latency import PARTS
    from bench.plots import Stack, plot_stacks

    drawn = [*PARTS[1:], PARTS[0]]  # what repeats in every step first: its end is the iteration
    panels: dict[str, list[Stack]] = {}
    for engine in found.engines:
        rows = [row for row in found.rows if row.engine == engine]
        panels[engine] = [
            Stack(
                row.tier if row.method == "whole model" else f"{row.tier}, {row.method}",
                [row.median(part) for part in drawn],
                _written(row),
                pale=row.method == "width reduction",
                gap=number > 0 and row.tier != rows[number - 1].tier,
            )
            for number, row in enumerate(rows)
        ]
    title = f"{found.model}: one iteration at batch {found.batch}, {threads_of(found.threads)}"
    names = [*(HEADS[part] for part in drawn[:-1]), "frozen forward, once per round"]
    plot_stacks(title, names, panels, "ms (medians)", file)


def _written(row: LatencyRow) -> str:
    """Write the time of an iteration to the end of a bar, and the time with frozen layers where there are any."""
    iteration = milliseconds(row.median("iteration"))
    if not any(row.series("frozen_forward")):
        return iteration
    return f"{iteration}  ({milliseconds(row.median('with_forward'))} with forward)"
