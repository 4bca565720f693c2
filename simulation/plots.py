"""Draw runs (curves with a band over seeds, maps of layers) and partitions, in the style of all pictures here.

matplotlib's object interface only: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure

from federation.errors import DataError, InputError
from simulation.partitioners import Numbers
from simulation.runs import PER_LAYER, Floats, Run, RunGroup

# Okabe and Ito's colours: readers with any colour vision can tell them apart, in grey too.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00")
# Of curves, the darkest first; beyond eight the lines are dashed, then dotted.
CURVES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", ":")
X_NAMES = {"rounds": "rounds", "steps": "local steps", "bytes": "bytes up and down"}
Y_NAMES = {
    "accuracy": "test accuracy, %",
    "loss": "training loss",
    "test_loss": "test loss",
    "discrepancy": "model discrepancy",
    "svcca": "SVCCA",
    "interval": "steps between synchronisations",
}
_WIDE = 50.0  # a range of such a factor needs a logarithmic scale
_FEW = 20  # classes that one can still tell apart by colour and name


def tidy(axes: Axes, grid: Any) -> None:
    """Draw fewer lines, and a pale grid behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)


def save(figure: Figure, file: Path) -> None:
    """Write PNG, SVG or PDF, by the name's ending."""
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {file}: {str(error).splitlines()[0]}") from None


def plot_curves(groups: Sequence[RunGroup], x: str, y: str, target: float | None = None) -> Figure:
    """Draw one curve per group: the mean over its seeds, and a band of one standard deviation."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    unit_name = draw_curves(axes, groups, x, y)
    if target is not None and y == "accuracy":
        axes.axhline(100 * target, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    over_layers = ", mean over layers" if y in PER_LAYER else ""
    axes.set_xlabel(X_NAMES[x] + unit_name)
    axes.set_ylabel(Y_NAMES[y] + over_layers)
    tidy(axes, "both")
    _legend(figure, axes, len(axes.get_legend_handles_labels()[1]))
    return figure


def draw_curves(axes: Axes, groups: Sequence[RunGroup], x: str, y: str) -> str:
    """Draw the curves alone; return the unit of x to be named on its axis."""
    curves = {group.name: group.curve(y, x) for group in groups}
    drawn = {name: curve for name, curve in curves.items() if len(curve[0])}
    if not drawn:
        raise DataError(f"no run has values of {y} to draw")
    factor = 100.0 if y == "accuracy" else 1.0
    unit, unit_name = _byte_unit(max(places[-1] for places, _, _ in drawn.values())) if x == "bytes" else (1.0, "")
    sizes = {group.name: len(group.runs) for group in groups}
    for number, (name, (places, means, spread)) in enumerate(drawn.items()):
        colour, style = CURVES[number % len(CURVES)], STYLES[number // len(CURVES) % len(STYLES)]
        label = f"{name} ({sizes[name]} seeds)" if sizes[name] > 1 else name
        marker = "o" if len(places) < 2 else None  # a single point has no line
        axes.plot(places / unit, factor * means, style, color=colour, label=label, linewidth=1.7, marker=marker)
        if sizes[name] > 1:
            low, high = factor * (means - spread), factor * (means + spread)
            axes.fill_between(places / unit, low, high, color=colour, alpha=0.18, linewidth=0)
    _scale(axes, np.concatenate([factor * means for _, means, _ in drawn.values()]), y)
    return unit_name


def plot_layers(run: Run, y: str, x: str) -> Figure:
    """Draw one row of colours per layer, input side on top; rounds without values are left out."""
    layers = run.layers(y)
    if not layers:
        option = "--svcca-every" if y == "svcca" else "--layers-every"
        raise DataError(
            f"{run.path or run.name}: no line has per_layer.{y} to draw; 'embrace simulate {option} N' measures it"
        )
    values = run.by_layer(y, layers)
    seen = np.isfinite(values).any(0)
    values, places = values[:, seen], run.progress(x)[seen]
    if not len(places):
        raise DataError(f"{run.path or run.name}: per_layer.{y} has no finite values to draw")
    figure = Figure(figsize=(9, min(14.0, 1.8 + 0.26 * len(layers))), layout="constrained")
    axes = figure.subplots()
    unit, unit_name = _byte_unit(places[-1]) if x == "bytes" else (1.0, "")
    edges = _edges(places / unit)
    picture = axes.pcolormesh(edges, np.arange(len(layers) + 1) - 0.5, values, cmap="viridis", norm=_norm(values, y))
    axes.set_yticks(range(len(layers)), layers, fontsize=8)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xlabel(X_NAMES[x] + unit_name)
    axes.set_title(f"{run.name}: {Y_NAMES[y]} by layer", fontsize=11)
    bar = figure.colorbar(picture, ax=axes, pad=0.015)
    if y == "interval" and len(kinds := np.unique(values[np.isfinite(values)])) <= 8:
        bar.set_ticks(kinds.tolist(), labels=[f"{kind:g}" for kind in kinds])
        bar.minorticks_off()
    return figure


def plot_partition(title: str, counts: Numbers) -> Figure:
    """Draw one bar per device, stacked by class; `counts` is devices × classes.

    Few classes have a legend, many a scale of colours.
    """
    devices, classes = counts.shape
    width = min(16.0, max(6.0, 2.5 + 0.3 * devices))
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = _colours(classes)
    bottom = np.zeros(devices)
    for label in range(classes):
        axes.bar(range(devices), counts[:, label], 0.86, bottom, color=colours[label], label=str(label))
        bottom += counts[:, label]
    axes.set_xlim(-0.6, devices - 0.4)
    axes.set_ylim(0, 1.1 * bottom.max())
    if devices <= 40:
        axes.set_xticks(range(devices))
        for device, total in enumerate(bottom):
            axes.annotate(
                f"{total:.0f}",
                (device, total),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                rotation=0 if devices <= 25 else 90,
            )
    sizes = counts.sum(1)
    axes.set_xlabel(
        f"device; samples per device: {sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}; "
        f"classes: {(counts > 0).sum(1).min()} to {(counts > 0).sum(1).max()}"
    )
    axes.set_ylabel("samples")
    axes.set_title(title)
    if classes <= _FEW:
        figure.legend(title="class", loc="outside right upper", frameon=False, fontsize=9, reverse=True)
    else:
        scale = BoundaryNorm(np.arange(classes + 1) - 0.5, classes)
        bar = figure.colorbar(ScalarMappable(scale, ListedColormap(colours)), ax=axes, label="class", pad=0.01)
        bar.set_ticks(range(0, classes, 10), minor=False)
        bar.minorticks_off()
    tidy(axes, "y")
    return figure


def _edges(places: Floats) -> Floats:
    """Say where one column ends and the next begins; columns end where their values were measured."""
    first = places[0] - (places[1] - places[0] if len(places) > 1 else 1.0)
    return np.concatenate([[first], places])


def _norm(values: Floats, y: str) -> Normalize:
    finite = values[np.isfinite(values)]
    if y == "discrepancy" and finite.min() > 0 and finite.max() / finite.min() > _WIDE:
        return LogNorm(finite.min(), finite.max())
    if y == "svcca":
        return Normalize(min(0.0, finite.min()), 1.0)
    return Normalize(finite.min(), max(finite.max(), finite.min() + 1e-12))


def _scale(axes: Axes, values: Floats, y: str) -> None:
    if y == "discrepancy" and values.min() > 0 and values.max() / values.min() > _WIDE:
        axes.set_yscale("log")


def _byte_unit(most: float) -> tuple[float, str]:
    """Choose the largest unit of which the longest curve has at least one."""
    for name, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= factor:
            return factor, f", {name}"
    return 1.0, ""


def _legend(figure: Figure, axes: Axes, curves: int) -> None:
    """Put the legend beside the curves if it would cover them."""
    if curves > 6:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    else:
        axes.legend(frameon=False, fontsize=9)


def _colours(classes: int) -> list[tuple[float, float, float, float]]:
    if classes <= 10:
        return [colormaps["tab10"](number) for number in range(classes)]
    if classes <= _FEW:
        return [colormaps["tab20"](number) for number in range(classes)]
    return [colormaps["turbo"](place) for place in np.linspace(0.02, 0.98, classes)]
