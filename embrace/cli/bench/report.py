"""What the measurements share: the same tables on the screen and in a Markdown report, checked before they start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from os.path import relpath
from pathlib import Path
from typing import Any

from rich.text import Text

from embrace.cli import show
from federation.errors import InputError


@dataclass(frozen=True)
class TextTable:
    """A table as text, before it becomes Markdown or a table on the screen."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int  # so many columns hold words, the rest numbers

    def markdown(self) -> str:
        rules = ["---" if number < self.left else "---:" for number in range(len(self.columns))]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rules, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


@dataclass(frozen=True)
class BenchReport:
    """The result of a measurement: tables, device, bars, notes, pictures."""

    title: str
    tables: Sequence[TextTable]
    device: Mapping[str, str]
    bars: Sequence[str] = ()  # promises, each with what was measured
    notes: Sequence[str] = ()
    pictures: Mapping[str, Path] = field(default_factory=dict)  # words for those who cannot see it -> file

    def print(self) -> None:
        screen = show.console()
        for table in self.tables:
            screen.print(show.table(table.title, table.columns, table.rows, left=table.left))
        screen.print(", ".join(f"{key} {value}" for key, value in self.device.items()), markup=False)
        for note in self.notes:
            screen.print(f"note: {note}", markup=False)
        for picture in self.pictures.values():
            screen.print(f"picture: {picture}", markup=False)
        for bar in self.bars:
            screen.print(Text(bar, style="red" if "missed" in bar else ""))

    def write(self, file: Path) -> None:
        """Write it as Markdown; pictures are referred to from where the file lies."""
        parts = [f"# {self.title}", bullets(f"{key}: {value}" for key, value in self.device.items())]
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{words}]({relpath(picture, file.parent)})" for words, picture in self.pictures.items()]
        parts += [bullets(self.bars)] if self.bars else []
        parts += [bullets(f"note: {note}" for note in self.notes)] if self.notes else []
        try:
            file.write_text("\n\n".join(parts) + "\n", "utf-8")
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror}") from None


def deliver(report: BenchReport, out: Path | None, facts: Mapping[str, Any] | None) -> None:
    """Write what was measured where it is wanted: a file, and JSON or tables on the screen."""
    if out is not None:
        report.write(out)
    if facts is not None:
        show.print_json(facts)
    else:
        report.print()


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def check_targets(plot: Path | None, out: Path | None) -> None:
    """Check folders and packages before minutes of measuring."""
    for option, file in (("--plot", plot), ("--out", out)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise InputError(f"{option} {file}: expected a file in a directory that exists")
    if plot is not None:
        import_module("bench.plots")


def threads_of(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def milliseconds(value: float) -> str:
    """Format milliseconds with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.1f}" if count >= 10**6 else f"{count / 1e6:.2f}"
