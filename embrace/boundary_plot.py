"""A picture of what training costs from each boundary of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from federation.capacity import forward_macs, predicted_memory, training_macs
from federation.manifest import Boundary, Manifest
from simulation.plots import COLOURS, save, tidy

PARTS = ("parameters", "gradients", "optimiser", "activations")


def plot_boundaries(manifest: Manifest, batch: int, file: Path) -> None:
    """Draw two panels, one row per boundary: predicted memory, and multiply-accumulates per sample."""
    names = [_label(manifest, boundary) for boundary in manifest.boundaries]
    figure = Figure(figsize=(11, 1.9 + 0.26 * len(names)), layout="constrained")
    memory, work = figure.subplots(1, 2, sharey=True)
    found = [predicted_memory(manifest, boundary, batch) for boundary in manifest.boundaries]
    _stack(memory, {part: [getattr(item, part) / 1e6 for item in found] for part in PARTS})
    memory.set_title("predicted memory")
    memory.set_xlabel("MB")
    memory.set_yticks(range(len(names)), names)
    _pair(
        work,
        {
            "frozen layers, forward, once": [forward_macs(manifest, b) / 1e6 for b in manifest.boundaries],
            "trained layers, every step": [training_macs(manifest, b) / 1e6 for b in manifest.boundaries],
        },
    )
    work.set_title("multiply-accumulates per sample")
    work.set_xlabel("million")
    memory.set_ylim(len(names) - 0.4, -0.6)  # input side on top; shared by both panels
    figure.suptitle(f"{manifest.name}: training from each boundary, batch {batch}")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    figure.legend(*work.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    save(figure, file)


def _label(manifest: Manifest, boundary: Boundary) -> str:
    tiers = [tier for tier, name in manifest.tiers.items() if name == boundary.name]
    return f"{boundary.name}  ({', '.join(tiers)})" if tiers else boundary.name


def _stack(axes: Axes, parts: dict[str, list[float]]) -> None:
    """Draw horizontal bars of parts that add up, so that names of any length and number stay readable."""
    left = [0.0] * len(next(iter(parts.values())))
    for (part, values), colour in zip(parts.items(), COLOURS):
        axes.barh(range(len(values)), values, left=left, label=part, color=colour, height=0.74)
        left = [a + b for a, b in zip(left, values)]
    _write_values(axes, left, 0.0, 8)
    tidy(axes, "x")


def _pair(axes: Axes, parts: dict[str, list[float]]) -> None:
    """Draw two thin bars per row, for quantities that do not add up."""
    for (part, values), colour, offset in zip(parts.items(), ("#999999", COLOURS[4]), (-0.19, 0.19)):
        rows = [row + offset for row in range(len(values))]
        axes.barh(rows, values, label=part, color=colour, height=0.36)
    _write_values(axes, values, 0.19, 7)
    tidy(axes, "x")


def _write_values(axes: Axes, values: Sequence[float], offset: float, size: int) -> None:
    for row, value in enumerate(values):
        place = (value, row + offset)
        axes.annotate(f"{value:.3g}", place, (4, 0), textcoords="offset points", va="center_baseline", fontsize=size)
    axes.set_xlim(0, 1.12 * max(axes.get_xlim()[1] / 1.05, 1e-9))
