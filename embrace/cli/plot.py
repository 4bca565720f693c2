"""`embrace plot`: curves and tables of runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from embrace.cli import show
from federation.errors import InputError


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, each with metrics.jsonl and run.json.")],
    out: Annotated[Path | None, typer.Option(help="Where to draw: FILE.png")] = None,
    x: Annotated[str, typer.Option(help="rounds, steps or bytes.")] = "rounds",
    y: Annotated[
        str, typer.Option(help="accuracy, loss, test_loss, or by layer: discrepancy, svcca, interval.")
    ] = "accuracy",
    table: Annotated[bool, typer.Option("--table", help="Print a table in Markdown.")] = False,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="An accuracy from 0 to 1: rounds and bytes until it is reached.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures of the table as JSON.")] = False,
) -> None:
    """Draw runs as curves; those that differ only in the seed become one, with a band of one standard deviation.

    What is measured by layer is drawn as a map of layers and rounds if there is a single run, else as the mean over the
    layers.

    Example: embrace plot runs/fedavg-* runs/embracing-* --y accuracy --out accuracy.png --table --target 0.8
    """
    from simulation.runs import PER_LAYER, check_axes, group_runs, read_run

    check_axes(x, y, "--")
    if out is None and not table and not json_:
        raise InputError("nothing to do: expected --out FILE.png, --table or --json")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise InputError(f"--out {out}: expected a file in a directory that exists")
    read = [read_run(path) for path in runs]
    groups = group_runs(read)
    for run in read:
        if run.skipped:
            sys.stderr.write(f"note: {run.path}: lines of metrics.jsonl that could not be read: {run.skipped}\n")
    if out is not None:
        from simulation.plots import plot_curves, plot_layers, save

        alone = y in PER_LAYER and len(groups) == 1 and len(groups[0].runs) == 1
        save(plot_layers(groups[0].runs[0], y, x) if alone else plot_curves(groups, x, y, target), out)
    from simulation.run_table import markdown, summarise

    lines = [summarise(group, target) for group in groups]
    if json_:
        show.print_json([asdict(line) for line in lines])
    elif table:
        sys.stdout.write(markdown(lines, target) + "\n")
    elif out is not None:
        show.console().print(f"picture: {out}", markup=False)
