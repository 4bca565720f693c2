"""`embrace bench fleet`: what bad luck costs a fleet of real agents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.bench.report import BenchReport, TextTable, check_targets, deliver

if TYPE_CHECKING:
    from bench.fleet import FleetReport


def fleet(
    agents: Annotated[int, typer.Option(min=2, max=500, help="Devices of each fleet.")] = 50,
    killed: Annotated[int, typer.Option(min=0, help="Devices that are killed, one in a round each.")] = 10,
    wrong: Annotated[int, typer.Option(min=0, help="Devices whose data does not fit the model.")] = 5,
    slow: Annotated[int, typer.Option(min=0, help="Devices that run for a twentieth of the time only.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds of the job.")] = 20,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Local steps of a device in a round.")] = 20,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a report: FILE.md")] = None,
) -> None:
    """Measure a job on a healthy fleet and on one with bad luck: each device is a process, on loopback.

    Example: embrace bench fleet --agents 8 --killed 2 --wrong 1 --slow 1 --rounds 5
    """
    check_targets(None, out)
    with show.progress("bench") as progress:
        from bench.fleet import Luck, bench_fleet

        unlucky = Luck("with bad luck", agents, killed, wrong, slow)
        fleets = [Luck("healthy", agents), unlucky, Luck("healthy, as many as are left", unlucky.well)]
        found = bench_fleet(fleets, rounds, steps, progress)
    deliver(report_of(found), out, summary(found) if json_ else None)


def summary(found: FleetReport) -> dict[str, Any]:
    """All figures, as `--json` prints them. Seconds."""
    return {"device": found.device, "fleets": [{**asdict(row), "ratio": found.ratio(row)} for row in found.rows]}


def report_of(found: FleetReport) -> BenchReport:
    from bench.fleet import BAR

    rows = [
        (
            row.luck.name,
            str(row.luck.agents),
            f"{row.luck.killed}, {row.luck.wrong}, {row.luck.slow}",
            f"{row.seconds:.1f}",
            f"{median(row.rounds):.2f}",
            f"{max(row.rounds):.2f}",
            str(row.updates),
            f"{row.failed}, {row.benched}",
            f"{row.load[0]:.1f}, {row.load[1]:.1f}",
            f"{found.ratio(row):.2f}",
        )
        for row in found.rows
    ]
    columns = (
        *("fleet", "agents", "killed, wrong, slow", "seconds", "round s, median", "longest", "updates"),
        *("failed, benched", "load before, after", "/ healthy"),
    )
    title = f"{len(found.rows[0].rounds)} rounds"
    measured = found.ratio(found.rows[1])
    met = "met" if measured <= BAR else "missed"
    bar = f"with bad luck against healthy: {measured:.2f}, at most {BAR:g}: {met}"
    stricter = f"against a healthy fleet of those that are left: {found.rows[1].seconds / found.rows[2].seconds:.2f}"
    notes = [
        "All processes share this machine's processors, and fewer devices leave more for each: " + stricter,
    ]
    return BenchReport("A fleet with bad luck", [TextTable(title, columns, rows, 3)], found.device, [bar], notes)
