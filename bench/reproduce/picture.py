"""The picture of a table: one panel for each group of rows, test accuracy over rounds, steps or bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from bench.plots import save, tidy
from bench.reproduce.runner import Reproduction, RowResult
from bench.run_plots import X_NAMES, Y_NAMES, draw_curves, plot_layers
from bench.runs import Group


def draw(found: Reproduction, folder: Path, name: str) -> list[Path]:
    """NAME.png, and one more for each map of layers; returns the files."""
    file = folder / f"{name}.png"
    _draw_curves(found, file)
    files, by_label = [file], {result.row.label: result for result in found.rows}
    for number, (label, quantity) in enumerate(found.table.maps, 1):
        runs = by_label[label].runs if label in by_label else ()
        if runs:
            files.append(folder / f"{name}-{quantity}-{number}.png")
            plot_layers(replace(runs[0], name=label), quantity, found.table.x, files[-1])
    return files


def _draw_curves(found: Reproduction, file: Path) -> None:
    panels: dict[str, list[RowResult]] = {}
    for result in found.rows:
        if result.runs:
            panels.setdefault(result.row.panel, []).append(result)
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(1.5 + 4.6 * across, 0.8 + 3.6 * down), layout="constrained")
    every = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, results) in zip(every, panels.items()):
        groups = [Group(result.row.curve or result.row.label, result.runs) for result in results]
        unit = draw_curves(axes, groups, found.table.x, "accuracy")
        axes.set_title(name or found.table.name, fontsize=10, loc="left")
        axes.set_xlabel(X_NAMES[found.table.x] + unit, fontsize=9)
        axes.set_ylabel(Y_NAMES["accuracy"], fontsize=9)
        axes.legend(frameon=False, fontsize=7, loc="lower right")
        tidy(axes, "both")
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    seeds = f": mean and standard deviation of {len(found.seeds)} seeds" if len(found.seeds) > 1 else ""
    figure.suptitle(f"{found.table.name}, {found.scale}{seeds}")
    save(figure, file)
