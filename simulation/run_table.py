"""The figures of runs in a table: accuracy at the end and at best, rounds and bytes to a target, bytes in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulation.runs import Floats, Group, Run, deviation


@dataclass(frozen=True)
class Figure:
    """A mean over runs, and its standard deviation."""

    mean: float
    deviation: float
    runs: int


@dataclass(frozen=True)
class Line:
    """What one group of runs says; None where no run says it."""

    name: str
    runs: int
    rounds: int  # of the longest run
    final: Figure | None
    best: Figure | None
    total_bytes: Figure | None
    reached: int = 0  # so many runs reached the target; the next two are about these alone
    rounds_to_target: Figure | None = None
    bytes_to_target: Figure | None = None


def summarise(group: Group, target: float | None = None) -> Line:
    """`target` is an accuracy from 0 to 1."""
    scored = [_accuracy(run) for run in group.runs]
    reached = [(run, row) for run in group.runs if target is not None and (row := _first_row(run, target)) is not None]
    return Line(
        group.name,
        len(group.runs),
        max(int(run.progress("rounds")[-1]) for run in group.runs),
        _figure([values[-1] for values in scored if len(values)]),
        _figure([values.max() for values in scored if len(values)]),
        _figure([run.progress("bytes")[-1] for run in group.runs if _counts_bytes(run)]),
        len(reached),
        _figure([run.progress("rounds")[row] for run, row in reached]),
        _figure([run.progress("bytes")[row] for run, row in reached if _counts_bytes(run)]),
    )


def markdown(lines: Sequence[Line], target: float | None = None) -> str:
    """One row per group. Accuracy in percent, bytes in millions and in both directions."""
    heads = ["run", "seeds", "rounds", "final accuracy %", "best %", "MB"]
    heads += [f"rounds to {100 * target:g} %", f"MB to {100 * target:g} %"] if target is not None else []
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for line in lines:
        cells = [line.name.replace("|", "\\|"), str(line.runs), str(line.rounds)]
        cells += [_text(line.final, 100), _text(line.best, 100), _text(line.total_bytes, 1e-6)]
        if target is not None:
            some = f" ({line.reached} of {line.runs})" if 0 < line.reached < line.runs else ""
            cells += [_text(line.rounds_to_target, 1, 1) + some, _text(line.bytes_to_target, 1e-6)]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _accuracy(run: Run) -> Floats:
    values = run.values("accuracy")
    return values[np.isfinite(values)]


def _first_row(run: Run, target: float) -> int | None:
    """The row in which the run reached the target."""
    good = run.values("accuracy") >= target  # nan is not
    return int(good.argmax()) if good.any() else None


def _counts_bytes(run: Run) -> bool:
    return any("bytes_up" in row or "bytes_down" in row for row in run.rows)


def _figure(values: Sequence[float]) -> Figure | None:
    return Figure(float(np.mean(values)), deviation(values), len(values)) if len(values) else None


def _text(figure: Figure | None, scale: float, decimals: int = 2) -> str:
    if figure is None:
        return "–"
    spread = f" ± {scale * figure.deviation:,.{decimals}f}" if figure.runs > 1 else ""
    return f"{scale * figure.mean:,.{decimals}f}{spread}"
