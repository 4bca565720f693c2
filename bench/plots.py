"""Pictures of what training costs. matplotlib's object interface only: no display, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from simulation.plots import COLOURS, save, tidy

STACK_COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999")
GROUP_COLOURS = ("#999999", "#0072B2", "#E69F00", "#D55E00")


def plot_steps(title: str, boundaries: Sequence[str], series: dict[str, list[float | None]], file: Path) -> None:
    """Grouped bars: milliseconds of one training step by boundary and engine; None is left out."""
    figure = Figure(figsize=(max(5.0, 1.6 + 1.1 * len(boundaries)), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(series), 1)
    for number, (engine, values) in enumerate(series.items()):
        places = [row + (number - (len(series) - 1) / 2) * width for row in range(len(boundaries))]
        heights = [value or 0.0 for value in values]
        bars = axes.bar(places, heights, width * 0.94, label=engine, color=COLOURS[2 * number % len(COLOURS)])
        axes.bar_label(bars, [f"{v:.3g}" if v else "" for v in values], fontsize=8, padding=2)
    axes.set_xticks(range(len(boundaries)), boundaries, rotation=0 if len(boundaries) < 6 else 60)
    axes.set_ylabel("ms per step (median)")
    axes.set_title(title)
    axes.legend(frameon=False)
    tidy(axes, "y")
    save(figure, file)


@dataclass(frozen=True)
class Stack:
    """One bar of parts that add up."""

    label: str
    parts: Sequence[float]
    written: str  # at its end
    pale: bool = False  # the method that one compares with
    gap: bool = False  # some room above: a new group begins


def plot_stacks(title: str, parts: Sequence[str], panels: Mapping[str, Sequence[Stack]], unit: str, file: Path) -> None:
    """Horizontal bars, one panel below the other, all on one scale."""
    heights = [len(stacks) + 0.6 * sum(stack.gap for stack in stacks) for stacks in panels.values()]
    figure = Figure(figsize=(9.5, 1.5 + 0.62 * len(panels) + 0.34 * sum(heights)), layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    every_stack = [stack for stacks in panels.values() for stack in stacks]
    longest = max(sum(stack.parts) for stack in every_stack)
    # A letter takes about a hundredth of the width.
    room = max(sum(stack.parts) + 0.013 * longest * (2 + len(stack.written)) for stack in every_stack)
    for axes, (panel, stacks) in zip(every, panels.items()):
        places = _places(stacks)
        left = [0.0] * len(stacks)
        for number, part in enumerate(parts):
            values = [stack.parts[number] for stack in stacks]
            bars = axes.barh(places, values, 0.76, left=left, label=part, color=STACK_COLOURS[number])
            for bar, stack in zip(bars, stacks):
                bar.set_alpha(0.45 if stack.pale else 1.0)
            left = [a + b for a, b in zip(left, values)]
        for place, total, stack in zip(places, left, stacks):
            axes.annotate(
                stack.written, (total, place), (4, 0), textcoords="offset points", va="center_baseline", fontsize=8
            )
        axes.set_yticks(places, [stack.label for stack in stacks], fontsize=9)
        axes.set_ylim(max(places) + 0.6, -0.6)
        axes.set_title(panel, loc="left", fontsize=10)
        axes.set_xlim(0, room)
        tidy(axes, "x")
    every[-1].set_xlabel(unit)
    figure.suptitle(title, fontsize=12)
    handles = [Patch(color=colour) for colour in STACK_COLOURS[: len(parts)]]
    figure.legend(handles, parts, loc="outside lower center", ncols=len(parts), frameon=False, fontsize=9)
    save(figure, file)


def _places(stacks: Sequence[Stack]) -> list[float]:
    """Bars of a group lie together."""
    places: list[float] = []
    for stack in stacks:
        places.append((places[-1] + 1.0 + 0.6 * stack.gap) if places else 0.0)
    return places


def plot_groups(
    title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], unit: str, file: Path
) -> None:
    """Horizontal bars side by side in groups; None is left out."""
    figure = Figure(figsize=(9.5, 1.6 + len(groups) * (0.26 * len(series) + 0.2)), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / max(len(series), 1)
    longest = max((value for values in series.values() for value in values if value), default=1.0)
    for number, ((name, values), colour) in enumerate(zip(series.items(), GROUP_COLOURS)):
        places = [row + (number - (len(series) - 1) / 2) * width for row in range(len(groups))]
        axes.barh(places, [value or 0.0 for value in values], width * 0.92, label=name, color=colour)
        for place, value in zip(places, values):
            text = "–" if value is None else f"{value:.3g}"
            where = (value or 0.0, place)
            axes.annotate(text, where, (4, 0), textcoords="offset points", va="center_baseline", fontsize=8)
    axes.set_yticks(range(len(groups)), groups, fontsize=9)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=12)
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False, fontsize=9)
    tidy(axes, "x")
    save(figure, file)
