"""`embrace bench step`: one training step of every engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show

if TYPE_CHECKING:
    from bench.device.step import StepReport, Timing

ENGINES = ("torch", "portable", "ort-training")


def step(
    model: Annotated[str, typer.Argument(help="A bundle, a zoo name or a forward graph model.onnx.")] = "resnet20",
    batch: Annotated[int, typer.Option(min=2, help="Samples per step.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every engine.")] = 1,
    boundaries: Annotated[str, typer.Option(help="NAME,… or 'tiers' or 'all'.")] = "tiers",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each engine that count.")] = 30,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the medians: FILE.png")] = None,
) -> None:
    """Time one training step per boundary: PyTorch eager, portable, onnxruntime-training, taking turns.

    A bundle is timed as it is, and needs no PyTorch; with it, the module that it was made from is timed too.

    Example: embrace bench step resnet20 --threads 1 --boundaries tiers

    Example: embrace bench step bundles/mine --boundaries all
    """
    with show.progress("bench") as progress:
        from bench.device.step import bench_step

        found = bench_step(model, batch=batch, threads=threads, boundaries=boundaries, rounds=rounds, progress=progress)
    if plot is not None:
        _draw(found, plot)
    if json_:
        show.print_json(summary(found, rounds))
        return
    screen = show.console()
    screen.print(_table(found, rounds))
    screen.print(", ".join(f"{name} {version}" for name, version in found.versions.items()), markup=False)
    for note in found.notes:
        screen.print(f"note: {note}", markup=False)
    if plot is not None:
        screen.print(f"picture: {plot}", markup=False)


def summary(found: StepReport, rounds: int) -> dict[str, Any]:
    """All figures, as `--json` prints them."""
    return {
        "model": found.model,
        "batch": found.batch,
        "threads": found.threads,
        "rounds": rounds,
        "versions": found.versions,
        "boundaries": [
            {
                "name": timing.boundary,
                "tiers": timing.tiers,
                "milliseconds": {
                    engine: {"median": timing.median(engine), "minimum": timing.minimum(engine)}
                    for engine in timing.rounds
                },
                "ratios": {
                    "portable/torch": timing.ratio("portable", "torch"),
                    "portable/ort-training": timing.ratio("portable", "ort-training"),
                },
            }
            for timing in found.timings
        ],
        "notes": found.notes,
    }


def _table(found: StepReport, rounds: int) -> Any:
    columns = ["boundary", "tier", *(f"{engine} ms" for engine in ENGINES), "portable/torch", "portable/ort-training"]
    rows = [
        (
            timing.boundary,
            ", ".join(timing.tiers),
            *(_milliseconds(timing, engine) for engine in ENGINES),
            *(_ratio(timing.ratio("portable", other)) for other in ("torch", "ort-training")),
        )
        for timing in found.timings
    ]
    title = f"{found.model}, one training step, {_setting(found)}, {rounds} rounds: median (minimum)"
    return show.table(title, columns, rows, left=2)


def _setting(found: StepReport) -> str:
    return f"batch {found.batch}, {found.threads} thread{'s' if found.threads > 1 else ''}"


def _milliseconds(timing: Timing, engine: str) -> str:
    if engine not in timing.rounds:
        return "–"
    return f"{timing.median(engine):.2f} ({timing.minimum(engine):.2f})"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _draw(found: StepReport, file: Path) -> None:
    from bench.plots import plot_steps

    names = [
        f"{timing.boundary}\n({', '.join(timing.tiers)})" if timing.tiers else timing.boundary
        for timing in found.timings
    ]
    used = [engine for engine in ENGINES if any(engine in timing.rounds for timing in found.timings)]
    series = {e: [t.median(e) if e in t.rounds else None for t in found.timings] for e in used}
    title = f"{found.model}: one training step, {_setting(found)}"
    plot_steps(title, names, series, file)
