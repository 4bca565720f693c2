"""Summarise runs in a table: accuracy at the end and at best, rounds and bytes to a target, bytes in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulation.runs import RunGroup, deviation


@dataclass(frozen=True)
class MeanOfRuns:
    """A mean over runs, and its standard deviation."""

    mean: float
    deviation: float
    runs: int


@dataclass(frozen=True)
class Summary:
    """What one group of runs says; None where no run says it."""

    name: str
    runs: int
    rounds: int  # of the longest run
    final: MeanOfRuns | None
    best: MeanOfRuns | None
    total_bytes: MeanOfRuns | None
    reached: int = 0  # so many runs reached the target; the next two are about these alone
    rounds_to_target: MeanOfRuns | None = None
    bytes_to_target: MeanOfRuns | None = None


def summarise(group: RunGroup, target: float | None = None) -> Summary:
    """Summarise a group of runs; `target` is an accuracy from 0 to 1."""
    final, best = ([run.accuracy for run in group.runs], [run.best_accuracy for run in group.runs])
    reached = [(run, row) for run in group.runs if target is not None and (row := run.place_of(target)) is not None]
    return Summary(
        group.name,
        len(group.runs),
        max(int(run.progress("rounds")[-1]) for run in group.runs),
        _mean([value for value in final if value is not None]),
        _mean([value for value in best if value is not None]),
        _mean([run.progress("bytes")[-1] for run in group.runs if run.counts_bytes]),
        len(reached),
        _mean([run.progress("rounds")[row] for run, row in reached]),
        _mean([run.progress("bytes")[row] for run, row in reached if run.counts_bytes]),
    )


def markdown(summaries: Sequence[Summary], target: float | None = None) -> str:
    """Write one row per group. Accuracy in percent, bytes in millions and in both directions."""
    heads = ["run", "seeds", "rounds", "final accuracy %", "best %", "MB"]
    heads += [f"rounds to {100 * target:g} %", f"MB to {100 * target:g} %"] if target is not None else []
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for line in summaries:
        cells = [line.name.replace("|", "\\|"), str(line.runs), str(line.rounds)]
        cells += [_text(line.final, 100), _text(line.best, 100), _text(line.total_bytes, 1e-6)]
        if target is not None:
            some = f" ({line.reached} of {line.runs})" if 0 < line.reached < line.runs else ""
            cells += [_text(line.rounds_to_target, 1, 1) + some, _text(line.bytes_to_target, 1e-6)]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _mean(values: Sequence[float]) -> MeanOfRuns | None:
    return MeanOfRuns(float(np.mean(values)), deviation(values), len(values)) if len(values) else None


def _text(value: MeanOfRuns | None, scale: float, decimals: int = 2) -> str:
    if value is None:
        return "–"
    spread = f" ± {scale * value.deviation:,.{decimals}f}" if value.runs > 1 else ""
    return f"{scale * value.mean:,.{decimals}f}{spread}"
