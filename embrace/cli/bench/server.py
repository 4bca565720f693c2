"""`embrace bench server`: what a round costs the coordinator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.bench.report import BenchReport, TextTable, check_targets, deliver, megabytes, ratio
from federation.errors import InputError

if TYPE_CHECKING:
    from bench.server.report import ServerReport

NAMES = {"baseline": "bare baseline", "embrace": "embrace", "flower": "Flower"}


def server(
    devices: Annotated[str, typer.Option(help="Numbers of simulated devices: N,…")] = "8,32,128",
    parameters: Annotated[str, typer.Option(help="Numbers of parameters of the model: P,…")] = "272762,6603710",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds per case; the median counts.")] = 1,
    at_once: Annotated[int, typer.Option(min=1, max=1000, help="Devices that transfer at the same time.")] = 64,
    folder: Annotated[Path | None, typer.Option(help="Where the servers write; removed afterwards.")] = None,
    flower_python: Annotated[
        Path | None, typer.Option(help="A Python that has flwr, to compare with. Default: none.")
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(help="Compare numbers of processes on a PostgreSQL that is started for it: 1,2."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the time of a round: FILE.png")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a report: FILE.md")] = None,
) -> None:
    """Measure rounds of many devices that download and upload over real sockets and train nothing.

    Beside a bare baseline, the least a server can do: read each body, write it to a file, add it to a vector.

    Example: embrace bench server --devices 8,128,512 --parameters 272762 --plot server.png

    Example: embrace bench server --processes 1,2 --devices 128 --parameters 272762 --rounds 5
    """
    check_targets(plot, out)
    if folder is not None and not folder.is_dir():
        raise InputError(f"--folder {folder}: expected a directory that exists")
    wanted = {"--devices": numbers("--devices", devices), "--parameters": numbers("--parameters", parameters)}
    if processes is not None:
        count, size = wanted.values()
        options = {"rounds": rounds, "at_once": at_once, "folder": folder}
        _compare_processes(numbers("--processes", processes), count, size, options, json_, out)
        return
    with show.progress("bench") as progress:
        from bench.server.measure import bench_server

        found = bench_server(
            *wanted.values(),
            rounds=rounds,
            at_once=at_once,
            folder=folder,
            flower_python=flower_python,
            progress=progress,
        )
    if plot is not None:
        draw(found, plot)
    deliver(report_of(found, plot), out, summary(found) if json_ else None)


def _compare_processes(
    processes: list[int],
    devices: list[int],
    parameters: list[int],
    options: dict[str, Any],
    json_: bool,
    out: Path | None,
) -> None:
    from bench.server.scaling import BAR, bench_scaling
    from edge_runtime.machine import describe_device

    rows, bars = [], []
    with show.progress("bench") as progress:
        for size, count in [(size, count) for size in parameters for count in devices]:
            found = bench_scaling(processes, count, size, progress=progress, **options)
            rows += found
            one, two = (next((row for row in found if row.processes == number), None) for number in (1, 2))
            if one is not None and two is not None:
                load = f"{count} devices, {size:,} parameters: 2 processes / 1"
                for what, value in (
                    ("updates / s", two.rate / one.rate),
                    ("by CPU", two.rate_by_cpu / one.rate_by_cpu),
                ):
                    verdict = "met" if value >= BAR else "missed"
                    bars.append(f"{load}, {what}: {value:.2f}, at least {BAR:g}: {verdict}")
    title = "Rounds of several processes on one PostgreSQL, as many cores as processes"
    columns = (
        *("parameters", "devices", "processes", "round s", "updates / s", "CPU ms / update: processes"),
        *("PostgreSQL", "devices", "updates / s by CPU", "load"),
    )
    cells = [
        (
            f"{row.parameters:,}",
            str(row.devices),
            str(row.processes),
            f"{row.round_seconds:.2f}",
            f"{row.rate:.1f}",
            " + ".join(f"{1e3 * cpu:.1f}" for cpu in row.servers),
            f"{1e3 * row.database:.1f}",
            f"{1e3 * row.devices_cpu:.1f}",
            f"{row.rate_by_cpu:.0f}",
            f"{row.load:.1f}",
        )
        for row in rows
    ]
    machine = {key: value for key, value in describe_device().items() if "torch" not in key and "onnx" not in key}
    report = BenchReport(title, [TextTable(title, columns, cells, 3)], machine, bars)
    summary = {"device": machine, "cases": [asdict(row) for row in rows], "bars": bars} if json_ else None
    deliver(report, out, summary)


def numbers(option: str, text: str) -> list[int]:
    """Parse '8,32' as [8, 32]."""
    parts = show.comma_list(text)
    if not parts or not all(part.isdecimal() and len(part) < 12 for part in parts):
        raise InputError(f"{option}: expected numbers separated by commas, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def summary(found: ServerReport) -> dict[str, Any]:
    """All figures, as `--json` prints them. Seconds and bytes."""
    return {
        "at_once": found.at_once,
        "device": found.device,
        "cases": [
            {
                **asdict(row),
                "updates_per_second": row.rate,
                "bytes_per_second": row.bytes_per_second,
                "growth": row.growth,
                "relative": {
                    "seconds_to_baseline": found.ratio(row, "round_seconds", "baseline"),
                    "cpu_to_baseline": found.ratio(row, "cpu_seconds", "baseline"),
                    "seconds_to_flower": found.ratio(row, "round_seconds", "flower"),
                    "cpu_to_flower": found.ratio(row, "cpu_seconds", "flower"),
                },
            }
            for row in found.rows
        ],
        "bars": [{**asdict(bar), "met": bar.met} for bar in found.bars()],
        "notes": found.notes,
    }


def report_of(found: ServerReport, plot: Path | None = None) -> BenchReport:
    title = f"A round without training, {found.at_once} devices transferring at once"
    pictures = {"time of a round by server and load": plot} if plot else {}
    bars = [
        f"{bar.what}: {bar.measured:.3g}, at most {bar.limit:g}: {'met' if bar.met else 'missed'}"
        for bar in found.bars()
    ]
    return BenchReport(title, [_table(found, title)], found.device, bars, found.notes, pictures)


def _table(found: ServerReport, title: str) -> TextTable:
    rows = [
        (
            f"{row.parameters:,}",
            str(row.devices),
            NAMES[row.server],
            f"{row.round_seconds:.2f}",
            f"{row.rate:.1f}",
            f"{row.bytes_per_second / 1e6:.0f}",
            f"{row.cpu_seconds:.2f}",
            megabytes(row.idle),
            megabytes(row.growth),
            "–" if row.models is None else f"{row.models:.1f}",
            ratio(found.ratio(row, "round_seconds", "baseline")),
        )
        for row in found.rows
    ]
    columns = (
        *("parameters", "devices", "server", "round s", "updates / s", "MB / s", "server CPU s", "idle MB"),
        *("peak above idle MB", "in models", "round / baseline"),
    )
    return TextTable(title, columns, rows, 3)


def draw(found: ServerReport, file: Path) -> None:
    from bench.plots import plot_groups

    loads = list(dict.fromkeys((row.parameters, row.devices) for row in found.rows))
    groups = [f"{devices} devices,\n{parameters:,} parameters" for parameters, devices in loads]
    series: dict[str, list[float | None]] = {}
    for server in dict.fromkeys(row.server for row in found.rows):
        rows = [found.row(server, devices, parameters) for parameters, devices in loads]
        series[NAMES[server]] = [row.round_seconds if row else None for row in rows]
    plot_groups("A round without training", groups, series, "seconds", file)
