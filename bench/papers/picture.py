"""The picture of a table: one panel for each group of rows, test accuracy or whatever else the table draws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.papers.runner import Reproduction, RowResult
from bench.papers.table import Drawn
from simulation.plots import CURVES, STYLES, X_NAMES, Y_NAMES, draw_curves, plot_layers, save, tidy
from simulation.runs import RunGroup


def draw(found: Reproduction, folder: Path, name: str) -> list[Path]:
    """Draw NAME.png, and one more for each map of layers; return the files. Where no run ended there is none."""
    if not any(result.runs for result in found.rows):
        return []
    file = folder / f"{name}.png"
    _draw_curves(found, file)
    files, by_label = [file], {result.row.label: result for result in found.rows}
    for number, (label, quantity) in enumerate(found.table.maps, 1):
        runs = by_label[label].runs if label in by_label else ()
        if runs:
            files.append(folder / f"{name}-{quantity}-{number}.png")
            save(plot_layers(replace(runs[0], name=label), quantity, found.table.x), files[-1])
    return files


def _draw_curves(found: Reproduction, file: Path) -> None:
    groups: dict[str, list[RowResult]] = {}
    for result in found.rows:
        if result.runs:
            groups.setdefault(result.row.panel, []).append(result)
    panels = [(name, drawn) for drawn in found.table.drawn or (None,) for name in groups]
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(1.5 + 4.6 * across, 0.8 + 3.6 * down), layout="constrained")
    every = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, drawn) in zip(every, panels):
        unit = _accuracies(axes, groups[name], found.table.x) if drawn is None else _drawn(axes, groups[name], drawn)
        title = ", ".join(filter(None, (name, drawn.title if drawn else "")))
        axes.set_title(title or found.table.name, fontsize=10, loc="left")
        axes.set_xlabel(X_NAMES[found.table.x] + unit, fontsize=9)
        axes.set_ylabel(drawn.label if drawn else Y_NAMES["accuracy"], fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=found.table.x != "bytes")
        axes.legend(frameon=False, fontsize=7, loc="best" if drawn else "lower right")
        tidy(axes, "both")
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    seeds = f": mean and standard deviation of {len(found.seeds)} seeds" if len(found.seeds) > 1 else ""
    figure.suptitle(f"{found.table.name}, {found.scale}{seeds}")
    save(figure, file)


def _accuracies(axes: Axes, results: list[RowResult], x: str) -> str:
    return draw_curves(axes, [RunGroup(_name(result), result.runs) for result in results], x, "accuracy")


def _drawn(axes: Axes, results: list[RowResult], drawn: Drawn) -> str:
    """Curves of one kind over the same places for all seeds of a row."""
    for number, result in enumerate(results):
        curves = [drawn.curve(run) for run in result.runs]
        places, values = curves[0][0], np.stack([values for _, values in curves])
        seen = np.isfinite(values).all(0)
        colour, style = CURVES[number % len(CURVES)], STYLES[number // len(CURVES) % len(STYLES)]
        means, spread = values.mean(0)[seen], values.std(0, ddof=1 if len(values) > 1 else 0)[seen]
        axes.plot(places[seen], means, style, color=colour, label=_name(result), linewidth=1.5)
        axes.fill_between(places[seen], means - spread, means + spread, color=colour, alpha=0.18, linewidth=0)
    return ""


def _name(result: RowResult) -> str:
    return result.row.curve or result.row.label
