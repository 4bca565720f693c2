"""`embrace bench step`: one training step of every engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from federation.errors import InputError

if TYPE_CHECKING:
    from bench.device.step import StepReport, Timing

MODELS: list[str] = ["resnet20"]
BATCHES: list[int] = [32]
ENGINES = ("torch", "channels-last", "compile", "portable", "ort-training", "jax", "mnn")


def step(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Bundles, zoo names or forward graphs model.onnx.", show_default="resnet20"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=2, help="Samples per step; may be given several times.", show_default="32")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every engine.")] = 1,
    boundaries: Annotated[str, typer.Option(help="NAME,… or 'tiers' or 'all'.")] = "tiers",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each engine that count.")] = 30,
    peers: Annotated[
        str,
        typer.Option(help="Beside PyTorch eager: channels-last, compile (takes a minute each), jax, mnn, or none."),
    ] = "channels-last",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the medians of one model: FILE.png")] = None,
) -> None:
    """Time one training step per boundary: PyTorch, portable, onnxruntime-training, taking turns.

    A bundle is timed as it is, and needs no PyTorch; with it, the module that it was made from is timed too. Ratios say
    how many times longer than the portable engine another one takes; the worst of them stand first.

    Example: embrace bench step resnet20 --threads 1 --boundaries tiers

    Example: embrace bench step resnet20 mobilenetv2 --batch 4 --batch 32 --peers channels-last,compile

    Example: embrace bench step bundles/mine --boundaries all

    JAX and MNN are installed by pip, once, each into an environment of its own in the folder for caches.
    """
    cases = [(model, size) for model in models or MODELS for size in batch or BATCHES]
    if plot is not None and len(cases) > 1:
        raise InputError("--plot: draws one model at one batch size; leave the others out")
    wanted = [name.strip() for name in peers.split(",") if name.strip() and name.strip() != "none"]
    with show.progress("bench") as progress:
        from bench.device.step import bench_step

        settings: dict[str, Any] = {"threads": threads, "boundaries": boundaries, "rounds": rounds, "peers": wanted}
        found = [bench_step(model, batch=size, progress=progress, **settings) for model, size in cases]
    if plot is not None:
        _draw(found[0], plot)
    if json_:
        facts = [summary(report, rounds) for report in found]
        show.print_json(facts[0] if len(facts) == 1 else {"reports": facts})
        return
    screen = show.console()
    screen.print(_table(found, rounds))
    screen.print(", ".join(f"{name} {version}" for name, version in found[0].versions.items()), markup=False)
    for note in dict.fromkeys(note for report in found for note in report.notes):
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
                "ratios": {f"{peer}/portable": timing.ratio(peer, "portable") for peer in timing.peers},
            }
            for timing in found.timings
        ],
        "notes": found.notes,
    }


def _table(found: Sequence[StepReport], rounds: int) -> Any:
    cases = sorted(((report, timing) for report in found for timing in report.timings), key=lambda case: case[1].worst)
    used = [engine for engine in ENGINES if any(engine in timing.rounds for _, timing in cases)]
    others = [engine for engine in used if engine != "portable"]
    rows = [
        (
            report.model,
            timing.boundary,
            ", ".join(timing.tiers),
            report.batch,
            *(_milliseconds(timing, engine) for engine in used),
            *(_ratio(timing.ratio(other, "portable")) for other in others),
        )
        for report, timing in cases
    ]
    columns = ["model", "boundary", "tier", "batch", *used, *(f"{other} / portable" for other in others)]
    title = f"one training step, {_threads(found[0])}, ms of {rounds} rounds: median (minimum)"
    return show.table(title, columns, rows, left=3)


def _threads(found: StepReport) -> str:
    return f"{found.threads} threads, by the clock" if found.threads > 1 else "1 thread, processor time"


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
    title = f"{found.model}: one training step, batch {found.batch}, {_threads(found)}"
    plot_steps(title, names, series, file)
