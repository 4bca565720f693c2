"""`embrace bench memory`: how much memory training takes, predicted, measured, and in PyTorch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.bench.report import BenchReport, TextTable, check_targets, deliver, megabytes, ratio, threads_of

if TYPE_CHECKING:
    from bench.device.memory import MemoryReport, MemoryRow

TARGETS = {("resnet20", 32, "weak"): 12 << 20}  # bytes of training, by model, batch and tier
NAMES = {"torch": "PyTorch"}


def memory(
    model: Annotated[str, typer.Argument(help="A zoo name, a forward graph model.onnx, or a bundle.")] = "resnet20",
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per step. Default: the bundle's.")] = None,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of every engine.")] = 1,
    boundaries: Annotated[str, typer.Option(help="NAME,… or 'tiers' or 'all'.")] = "tiers",
    engine: Annotated[str, typer.Option(help="portable, ort-training, or all that are available.")] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Processes per case; the one in the middle counts.")] = 3,
    agents: Annotated[bool, typer.Option(help="Also measure agents of a coordinator, which is started.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted and measured memory: FILE.png")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a report: FILE.md")] = None,
) -> None:
    """Measure the peak memory of training from each boundary, beside the papers' formula and PyTorch eager.

    Every case runs in fresh processes; peaks come on top of what the idle process has. Anonymous memory is the
    process's own; file-backed memory (code, mapped files) the system can drop. `agent` is the peak of a real agent in
    two tasks, without a budget.

    Example: embrace bench memory resnet20 --boundaries all --plot memory.png
    """
    check_targets(plot, out)
    with show.progress("bench") as progress:
        from bench.device.memory import bench_memory

        found = bench_memory(
            model,
            batch=batch,
            threads=threads,
            boundaries=boundaries,
            engine=engine,
            repeats=repeats,
            agents=agents,
            progress=progress,
        )
    if plot is not None:
        draw(found, plot)
    deliver(report_of(found, plot), out, summary(found) if json_ else None)


def summary(found: MemoryReport) -> dict[str, Any]:
    """All figures, as `--json` prints them. Bytes."""
    return {
        "model": found.model,
        "batch": found.batch,
        "threads": found.threads,
        "device": found.device,
        "cases": [
            {
                **asdict(row),
                "relative": {
                    "predicted": found.predicted_ratio(row),
                    "training": found.training_ratio(row),
                    "whole_round": found.round_ratio(row),
                    "agent": found.agent_ratio(row),
                    "to_torch": found.to_torch(row),
                },
            }
            for row in found.rows
        ],
        "notes": found.notes,
    }


def report_of(found: MemoryReport, plot: Path | None = None) -> BenchReport:
    title = f"{found.model}: memory of training at batch {found.batch}, {threads_of(found.threads)}"
    pictures = {"predicted and measured memory by tier": plot} if plot else {}
    return BenchReport(title, [_table(found, title)], found.device, _bars(found), found.notes, pictures)


def _table(found: MemoryReport, title: str) -> TextTable:
    rows = [
        (
            f"{row.boundary} ({', '.join(row.tiers)})" if row.tiers else row.boundary,
            NAMES.get(row.runner, row.runner),
            megabytes(row.predicted),
            *(megabytes(row.training.get(kind)) for kind in ("anonymous", "file_backed", "total")),
            megabytes(row.round_anonymous) if row.whole_round else "–",
            megabytes(row.agent_anonymous),
            megabytes(row.idle.get("anonymous")),
            f"{row.capacity:.3f}",
            *map(ratio, (found.predicted_ratio(row), found.training_ratio(row), found.to_torch(row))),
        )
        for row in found.rows
    ]
    columns = (
        *("boundary", "engine", "predicted", "anonymous", "file-backed", "total", "with frozen layers"),
        *("agent", "idle"),
        *("capacity", "predicted / strong", "measured / strong", "measured / PyTorch"),
    )
    return TextTable(f"{title}; MB on top of the idle process", columns, rows, 2)


def _bars(found: MemoryReport) -> list[str]:
    """Compare peaks of training with PyTorch's at the same boundary, and with targets.

    Both are bytes: a share of what the whole model takes would punish a whole model that takes less.
    """
    lines = []
    for row in found.rows:
        if row.runner == "torch" or row.anonymous is None:
            continue
        torch = found.row(row.boundary, "torch")
        limits = {"PyTorch's": torch.anonymous if torch else None}
        limits |= {f"the {tier} tier's target": TARGETS.get((found.model, found.batch, tier)) for tier in row.tiers}
        for what, limit in limits.items():
            if limit is not None:
                words = "met" if row.anonymous <= limit else "missed"
                peak = f"{row.runner}: {row.boundary}, peak of training {megabytes(row.anonymous)} MB"
                lines.append(f"{peak}, at most {what} {megabytes(limit)}: {words}")
    return lines


def draw(found: MemoryReport, file: Path) -> None:
    from bench.plots import plot_groups

    shown: dict[str, MemoryRow] = {row.boundary: row for row in found.rows}
    groups = [f"{name}\n({', '.join(row.tiers)})" if row.tiers else name for name, row in shown.items()]
    series: dict[str, list[float | None]] = {"predicted": [row.predicted / 1e6 for row in shown.values()]}
    for runner in found.runners:
        peaks = [row.anonymous if (row := found.row(name, runner)) else None for name in shown]
        series[NAMES.get(runner, runner)] = [peak / 1e6 if peak is not None else None for peak in peaks]
    title = f"{found.model}: peak memory of training at batch {found.batch}"
    plot_groups(title, groups, series, "MB of anonymous memory on top of the idle process", file)
