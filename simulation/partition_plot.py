"""A picture of who has what: one bar per device, stacked by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from simulation.figure import save, tidy
from simulation.partitioners import Numbers

_FEW = 20  # classes that one can still tell apart by colour and name


def plot_partition(title: str, counts: Numbers, file: Path) -> None:
    """`counts` is devices × classes. Few classes have a legend, many a scale of colours."""
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
    save(figure, file)


def _colours(classes: int) -> list[tuple[float, float, float, float]]:
    if classes <= 10:
        return [colormaps["tab10"](number) for number in range(classes)]
    if classes <= _FEW:
        return [colormaps["tab20"](number) for number in range(classes)]
    return [colormaps["turbo"](place) for place in np.linspace(0.02, 0.98, classes)]
