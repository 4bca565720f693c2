"""What the subcommands share: tables and JSON on standard output, a progress bar on standard error, figures as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from federation.errors import InputError
from federation.printable import printable, printable_lines

# Called with what happens now, and how many of how many steps are done.
Progress = Callable[[str, int, int], None]

Track = Annotated[
    str | None, typer.Option(help="Keep the curves in tensorboard, mlflow or wandb: pip install 'embrace-fl[…]'.")
]
DATA = "FILE.npz, a folder of images by class, FILE.csv, FILE.jsonl, FILE.txt or FILE.py:NAME."
Tokenizer = Annotated[Path | None, typer.Option(help="Makes tokens of texts: tokenizer.json. Default: the bundle's.")]
Frozen = Annotated[
    str, typer.Option(help="Compute layers that are not trained in float32, or in int8: less time, less exact.")
]
PIPE_WIDTH = 160  # a file has no edge: tables keep their natural width


class Screen(Console):
    """rich's console, but that no text which is printed can give orders to a terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable_lines(each) if isinstance(each, str) else each for each in objects), **options)


def console() -> Screen:
    """Open standard output as it is now; made anew each time, because tests and pipes exchange it."""
    return Screen(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def line(text: str, style: str = "") -> Text:
    """Make a line that is cut at the width of the screen."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def print_json(value: Any) -> None:
    """Print nothing but JSON, so that the output can be piped."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Show a bar while something runs, and only on a terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with ProgressBar(
        *columns, TimeElapsedColumn(), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=printable(f"{title}: {what}"), completed=done, total=total)

        yield report


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, left: int = 1) -> Table:
    """Make a plain table; all columns but the first `left` hold numbers and are aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        # Text, not a markup string: names may contain brackets.
        made.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return made


def size(count: int) -> str:
    """Format bytes in the largest unit that leaves at least one: '1.41 MB'. Units are powers of ten."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.{2 if count < 100 * factor else 0}f} {unit}"
    return f"{count} B"


def peak(memory: Mapping[str, int]) -> str:
    """Format a report's peak: of the whole process, beside what it was allowed.

    >>> peak({"anonymous": 23_000_000, "process": 63_400_000, "allowed": 70_000_000})
    '63 of 70 MB'
    """
    whole = memory.get("process", memory.get("anonymous"))
    if whole is None:
        return "–"
    allowed = memory.get("allowed")
    return size(whole) if allowed is None else f"{whole / 1e6:.0f} of {allowed / 1e6:.0f} MB"


def number(count: int) -> str:
    """Format an integer with its thousands set apart."""
    return f"{count:,}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def shape(dimensions: Sequence[int]) -> str:
    return "×".join(map(str, dimensions)) or "scalar"


def pairs(option: str, text: str) -> dict[str, Any]:
    """Read KEY=NUMBER,…; a number without a point is an integer."""
    found: dict[str, Any] = {}
    for part in comma_list(text):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value) if "." in value or "e" in value else int(value)
        except ValueError:
            raise InputError(f"{option}: expected KEY=NUMBER, got {part!r}") from None
    return found


def comma_list(text: str | None) -> list[str]:
    """Parse 'a, b' as ['a', 'b'], and nothing as []."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
