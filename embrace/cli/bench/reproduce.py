"""`embrace bench reproduce`: a table of a paper, measured beside published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from embrace.cli import show
from federation.errors import InputError


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which one; without it a list.")] = None,
    scale: Annotated[str, typer.Option(help="smoke, short, medium (domo) or full, the paper's own.")] = "short",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every row.")] = 2,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="EMBRACE_DATA_DIR", help="Where data sets lie.", file_okay=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("bench/results"),
    runs: Annotated[
        Path, typer.Option(help="Folder for the runs; what is there is not run again.", file_okay=False)
    ] = Path("runs/reproduce"),
    rows: Annotated[
        list[str] | None, typer.Option(help="Run only rows whose names contain this; may be given again.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; without it one for each core.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, help="Leave runs after this time; the next command goes on with them.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a table of a paper again: every row with the same data, seeds and choice of rates.

    Writes reproduce-TABLE-SCALE.json, .md and .png. A command that was interrupted goes on where it was.

    Rows of the results that have no runs here stay as earlier commands left them. At scale full the rounds of each
    run are kept in OUT/logs, with a small model's checkpoint: another machine does not run them again.

    Example: embrace bench reproduce fedavg-table2 --scale short --data-dir data
    """
    import os
    import time

    from bench.papers import TABLES

    if table is None:
        lines = [(found.name, found.tests, found.paper) for found in TABLES.values()]
        show.console().print(show.table("tables", ("name", "what it tests", "paper"), lines, left=3))
        return
    if table not in TABLES:
        raise InputError(f"no table named {table!r}, expected one of {', '.join(TABLES)}")
    from bench.papers.logs import Logs
    from bench.papers.picture import draw
    from bench.papers.report import markdown, read_report, report
    from bench.papers.runner import Workplace
    from bench.papers.runner import reproduce as run

    name = f"reproduce-{table}-{scale}"
    stored = out / f"{name}.json"
    before = read_report(stored) if stored.is_file() else None  # which may fail, so before the runs
    with show.progress(table) as progress:
        until = None if hours is None else time.time() + 3600 * hours
        logs = Logs(out / "logs" / f"{table}-{scale}") if scale == "full" else None
        place = Workplace(runs / f"{table}-{scale}", data_dir, jobs or os.cpu_count() or 1, logs, until)
        found = run(TABLES[table], scale, seeds, place, progress, rows or ())
    data = report(found, before)
    text = markdown(data, found.table.columns)
    out.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    (out / f"{name}.md").write_text(text, "utf-8")
    drawn = draw(found, out, name)
    if json_:
        show.print_json(data)
    else:
        show.console().print(text, markup=False)
        show.console().print(f"{out / name}: .json, .md{', .png' if drawn else ''}", markup=False)
