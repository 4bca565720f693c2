"""`embrace bench browser`: a training step in a browser, beside the same step of this machine's own runtime."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embrace.cli import show
from embrace.cli.bench.report import BenchReport, TextTable, check_targets, deliver, megabytes, milliseconds, ratio

if TYPE_CHECKING:
    from bench.device.browser import BrowserReport, Timing

NATIVE = "native, 1 thread"


def browser(
    models: Annotated[list[str] | None, typer.Argument(help="Bundles, zoo names or forward graphs model.onnx.")] = None,
    batch: Annotated[int, typer.Option(min=2, max=4096, help="Samples per step.")] = 32,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of the columns with several.")] = 2,
    boundaries: Annotated[str, typer.Option(help="NAME,… or 'tiers' or 'all'.")] = "tiers",
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Turns of each column that count, five steps each.")
    ] = 6,
    chromium: Annotated[str | None, typer.Option(help="The browser: a Chromium, Chrome or Edge.")] = None,
    software_gpu: Annotated[bool, typer.Option(help="Time WebGPU also where its adapter is software.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, with every step.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a report: FILE.md")] = None,
) -> None:
    """Time a training step in a browser: WebAssembly with one thread and several, WebGPU, and native, taking turns.

    It starts a Chromium of this machine, without a window and with a new profile, on a page that this command serves
    on loopback. It needs the built pages (`make web` in a clone; a wheel has them). Columns that the browser does not
    have are left out, and the report says why. Default models: femnist_cnn and resnet20.

    Example: embrace bench browser resnet20 --boundaries tiers --out report.md

    Example: embrace bench browser bundles/mine --chromium /usr/bin/google-chrome
    """
    check_targets(None, out)
    with show.progress("bench") as progress:
        from bench.device.browser import bench_browser

        found = bench_browser(
            models or ["femnist_cnn", "resnet20"],
            batch=batch,
            threads=threads,
            boundaries=boundaries,
            rounds=rounds,
            chromium=chromium,
            software_gpu=software_gpu,
            progress=progress,
        )
    deliver(report_of(found), out, asdict(found) if json_ else None)


def report_of(found: BrowserReport) -> BenchReport:
    in_page = [column for column in found.columns if not column.startswith("native")]
    ratios = [f"{column} / native" for column in in_page]
    times = [
        (*_names(t), *(_times(t, c) for c in found.columns), *(ratio(t.ratio(c, NATIVE)) for c in in_page))
        for t in found.timings
    ]
    spent = [(*_names(t), *(_spent(t, c) for c in found.columns)) for t in found.timings]
    heaps = [(*_names(t), *(megabytes(t.heaps.get(c)) for c in in_page)) for t in found.timings]
    first = [(f.model, f.boundary, f"{f.seconds:.1f}", megabytes(f.bytes), megabytes(f.memory)) for f in found.first]
    what = ("model", "boundary", "tier")
    steps = len(found.timings[0].whole(NATIVE))
    batch = found.timings[0].batch
    tables = [
        TextTable(
            f"One training step, batch {batch}: ms, minimum of {steps} (of which the local rule); ratios are medians "
            "over steps, each compared with the native one of its round",
            (*what, *found.columns, *ratios),
            times,
            3,
        ),
        TextTable("The same: ms of processor time per step, mean", (*what, *found.columns), spent, 3),
        TextTable("Memory of the runtime, MB", (*what, *in_page), heaps, 3),
        TextTable(
            "From opening the page, with nothing cached, to the end of the first step, one thread",
            ("model", "boundary", "seconds", "MB moved", "MB, all processes of the browser"),
            first,
            2,
        ),
    ]
    load = f"load of the machine before and after: {found.load[0]:.1f}, {found.load[-1]:.1f}"
    return BenchReport("A training step in a browser", tables, found.device, notes=[*found.notes, load])


def _names(timing: Timing) -> tuple[str, str, str]:
    return timing.model, timing.boundary, ", ".join(timing.tiers)


def _times(timing: Timing, column: str) -> str:
    if not timing.whole(column):
        return "–"
    return f"{milliseconds(min(timing.whole(column)))} ({milliseconds(min(timing.rules[column]))})"


def _spent(timing: Timing, column: str) -> str:
    return milliseconds(timing.processor[column]) if column in timing.processor else "–"
