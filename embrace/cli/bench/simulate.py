"""`embrace bench simulate`: how many steps of devices a simulation makes in a second."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.bench.report import BenchReport, TextTable, check_targets, deliver, megabytes, ratio
from federation.errors import InputError

if TYPE_CHECKING:
    from bench.simulation.speed import SpeedReport

NAMES = {"bare": "bare PyTorch loop", "embrace": "embrace", "flower": "Flower, Ray"}


def simulate(
    models: Annotated[str, typer.Option(help="Zoo models: NAME,…")] = "resnet20,mnist_lr",
    devices: Annotated[int, typer.Option(min=1, max=100_000, help="Devices there are.")] = 128,
    cohort: Annotated[int, typer.Option(min=1, max=100_000, help="Devices of a round.")] = 32,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Local steps.")] = 10,
    batch: Annotated[int, typer.Option(min=1, max=65_536, help="Samples of a step.")] = 32,
    samples: Annotated[int, typer.Option(min=1, max=1_000_000, help="Samples of a device.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds that count; the median does.")] = 3,
    tiers: Annotated[
        str | None, typer.Option(help="Our devices by tier: strong=16,weak=112. Default: all train everything.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")] = 2,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie. Default: random samples.")] = None,
    flower_python: Annotated[
        Path | None, typer.Option(help="A Python that has flwr[simulation] and torch. Default: none.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw steps per second: FILE.png")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a report: FILE.md")] = None,
) -> None:
    """Measure `embrace simulate` beside a bare PyTorch loop and Flower's simulation: client-steps per second, memory.

    Example: embrace bench simulate --models mnist_lr --rounds 20 --plot simulate.png
    """
    check_targets(plot, out)
    if cohort > devices or batch > samples:
        raise InputError("expected a cohort of at most all devices and batches of at most all samples of a device")
    counts = show.pairs("--tiers", tiers) if tiers else {}
    if tiers and sum(counts.values()) != devices:
        raise InputError(f"--tiers: expected numbers that add up to {devices} devices, got {sum(counts.values())}")
    with show.progress("bench") as progress:
        from bench.simulation.speed import bench_simulate

        found = bench_simulate(
            show.comma_list(models),
            rounds=rounds,
            workers=workers,
            data_dir=data_dir,
            flower_python=flower_python,
            progress=progress,
            devices=devices,
            cohort=cohort,
            steps=steps,
            batch=batch,
            samples=samples,
            tiers=None if tiers is None else counts,
        )
    if plot is not None:
        draw(found, plot)
    deliver(report_of(found, plot), out, summary(found) if json_ else None)


def summary(found: SpeedReport) -> dict[str, Any]:
    """All figures, as `--json` prints them. Seconds and bytes."""
    rows = [
        {
            **asdict(row),
            "steps_per_second": row.rate,
            "steps_per_cpu_second": row.cpu_rate,
            "relative": {
                "to_bare": found.ratio(row, "bare"),
                "to_flower": found.ratio(row, "flower"),
                "cpu_to_bare": found.ratio(row, "bare", "cpu_rate"),
                "cpu_to_flower": found.ratio(row, "flower", "cpu_rate"),
            },
        }
        for row in found.rows
    ]
    bars = [{**asdict(bar), "met": bar.met} for bar in found.bars()]
    return {"case": found.case, "device": found.device, "rows": rows, "bars": bars, "notes": found.notes}


def report_of(found: SpeedReport, plot: Path | None = None) -> BenchReport:
    case = found.case
    title = (
        f"Client-steps per second: {case['devices']} devices, {case['cohort']} per round, {case['steps']} steps of "
        f"batch {case['batch']}, {case['workers']} worker processes"
    )
    rows = [
        (
            row.model,
            NAMES[row.contestant],
            f"{row.rate:,.1f}",
            ratio(found.ratio(row, "bare")),
            ratio(found.ratio(row, "flower")),
            "–" if row.cpu_rate is None else f"{row.cpu_rate:,.1f}",
            ratio(found.ratio(row, "bare", "cpu_rate")),
            megabytes(row.memory),
        )
        for row in found.rows
    ]
    columns = ("model", "simulation", "steps / s", "to bare", "to Flower", "steps / CPU s", "to bare", "memory MB")
    bars = [
        f"{bar.what}: {bar.measured:.3g}, at {'least' if bar.at_least else 'most'} {bar.limit:g}: "
        f"{'met' if bar.met else 'missed'}"
        for bar in found.bars()
    ]
    pictures = {"client-steps per second relative to a bare loop": plot} if plot else {}
    return BenchReport(title, [TextTable(title, columns, rows, 2)], found.device, bars, found.notes, pictures)


def draw(found: SpeedReport, file: Path) -> None:
    from bench.plots import plot_groups

    models = list(dict.fromkeys(row.model for row in found.rows))
    series: dict[str, list[float | None]] = {}
    for name in dict.fromkeys(row.contestant for row in found.rows):
        rows = [found.row(name, model) for model in models]
        series[NAMES[name]] = [found.ratio(row, "bare") if row else None for row in rows]
    plot_groups("Client-steps per second", models, series, "relative to a bare PyTorch loop", file)
