"""A table of a paper, as something that can be run again: rows that are jobs, columns that are measured, claims.

Every row of a table is run with the same seeds, on the same data, and its rate is chosen from the same grid with the
same effort, so that what differs between rows is what their labels say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from federation.errors import InputError
from simulation.runs import Floats, Run

Scale = str  # smoke, short, medium or full; not every table has a medium one
Measured = Mapping[str, Mapping[str, float | None]]  # label -> column -> mean over the seeds


@dataclass(frozen=True)
class PaperRow:
    """One line: a model and the tables of a job file, without bundle, name and seed."""

    label: str
    model: str  # of the zoo
    job: Mapping[str, Any]
    published: Mapping[str, float | str] = field(default_factory=dict)  # column -> what the paper says
    panel: str = ""  # rows of one panel are drawn together
    curve: str = ""  # what it is called there; without it the label
    tuned_as: str = ""  # rows that share this share the rate that was best for the first of them
    stop_at: float | None = None  # accuracy at which the run ends
    widths: tuple[float, ...] = ()  # narrow boundaries that the bundle needs
    every: Mapping[str, int] = field(default_factory=dict)  # on top of the setting's
    measured: bool = True  # in the table; otherwise only drawn


@dataclass(frozen=True)
class Setting:
    """A table at one scale."""

    note: str  # in words, what is not in the rows
    rows: Sequence[PaperRow]
    rates: tuple[str, ...] = ()  # every row tries each of them once; empty: the rates of the jobs
    tuning_share: float = 1.0  # of a row's rounds, for which it tries them
    every: Mapping[str, int] = field(default_factory=dict)  # what is measured in which rounds: see Options

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len(set(labels)) < len(labels):
            raise InputError("reproduce: expected a label of its own for every row")


@dataclass(frozen=True)
class Column:
    """A figure of one run; a row shows the mean over its seeds."""

    name: str
    measure: Callable[[Run], float | None]
    digits: int = 2
    relative: bool = False  # in percent of the first row


@dataclass(frozen=True)
class Drawn:
    """What a panel of the picture shows: a curve of each run, nan where there is no value."""

    title: str  # behind the name of the rows' panel
    label: str  # of the y axis
    curve: Callable[[Run], tuple[Floats, Floats]]  # over the table's x


@dataclass(frozen=True)
class Claim:
    """What should come out; `test` says whether it did, or None where the scale has not the rows for it."""

    text: str
    test: Callable[[Measured], bool | None]


@dataclass(frozen=True)
class Table:
    """One table of a paper."""

    name: str
    paper: str
    tests: str  # what it is about, in one sentence
    settings: Mapping[Scale, Callable[[], Setting]]
    columns: Sequence[Column]
    claims: Sequence[Claim] = ()
    x: str = "rounds"  # of the picture: rounds, steps or bytes
    maps: Sequence[tuple[str, str]] = ()  # (label, quantity): pictures of a row's first run, layer by layer
    drawn: Sequence[Drawn] = ()  # empty: test accuracy
    balance: bool = False  # papers take cohorts as they are drawn; the job's default swaps a strong device in

    def setting(self, scale: Scale) -> Setting:
        if scale not in self.settings:
            raise InputError(f"--scale: expected {', '.join(self.settings)}, got {scale!r}")
        setting = self.settings[scale]()
        return replace(setting, rows=[self._as_drawn(row) for row in setting.rows])

    def _as_drawn(self, row: PaperRow) -> PaperRow:
        participate = {"balance": self.balance, **row.job.get("participate", {})}
        return replace(row, job={**row.job, "participate": participate})


def above(
    column: str, better: Sequence[str], worse: Sequence[str], margin: float = 0.0
) -> Callable[[Measured], bool | None]:
    """Whether the best of some rows is above the best of others, by more than a margin."""

    def test(measured: Measured) -> bool | None:
        high, low = (_best(measured, column, labels) for labels in (better, worse))
        return None if high is None or low is None else high > low + margin

    return test


def _best(measured: Measured, column: str, labels: Sequence[str]) -> float | None:
    found = [measured[label].get(column) for label in labels if label in measured]
    return max((value for value in found if value is not None), default=None)
