""".csv files: one sample per line, one column of labels, the others are the features in order."""

from __future__ import annotations

import csv
import math
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edge_runtime.data.input_adapter import Array
from edge_runtime.data.targets import order_classes
from federation.errors import DataError, EmptyData
from federation.manifest import Manifest

LABEL_NAMES = ("label", "target", "class", "y")
_ENCODING = "utf-8-sig"  # spreadsheets put a mark in front
_LONGEST_LINE = 64 << 20


@dataclass(frozen=True)
class TableLayout:
    """What the first line tells."""

    delimiter: str
    width: int
    label: int  # number of the label column, from 0
    names: list[str] | None  # of the columns, if there is a header
    skip: int  # lines in front of the data

    def column(self, number: int) -> str:
        """Name a column for a message; columns are counted from 1, as lines are."""
        return f"column {number + 1}" + (f" ({self.names[number]})" if self.names else "")


def read_table(
    path: Path, name: str, manifest: Manifest, label: str | None
) -> tuple[Array, Array, list[str] | None, str]:
    """Read features, labels, names of the classes if they are text, and which column the labels are."""
    try:
        layout = _read_layout(path, name, label)
        features, texts, codes = _read_columns(path, name, layout, np.dtype(manifest.input.dtype))
        numbers, class_names = _label_numbers(path, name, layout, list(texts), manifest)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{name} is no text in UTF-8") from None
    except MemoryError:
        raise DataError(f"{name} does not fit memory: store it with numpy.savez, then it is read in place") from None
    return features, numbers[codes], class_names, layout.column(layout.label)


def _read_layout(path: Path, name: str, label: str | None) -> TableLayout:
    with path.open(encoding=_ENCODING, newline="") as file:
        skip, line = 0, file.readline(_LONGEST_LINE)
        while line and not line.strip():
            skip, line = skip + 1, file.readline(_LONGEST_LINE)
    if not line:
        raise EmptyData(f"{name} has no samples")
    delimiter = max(",;\t", key=line.count)
    cells = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
    if len(cells) < 2:
        raise DataError(f"{name}: line {skip + 1} has one column, expected features and a label")
    lower = [cell.lower() for cell in cells]
    known = next((lower.index(each) for each in LABEL_NAMES if each in lower), None)
    if known is not None and lower[known] == "y" and all(_is_number(cell) for cell in cells if cell not in "yY"):
        known = None  # the first sample's answer: yes
    column = _label_column(name, label, cells, known)
    features = [cell for number, cell in enumerate(cells) if number != column]
    named = known is not None or (label is not None and not _is_column_number(label))
    header = named or not all(_is_number(cell) for cell in features)
    return TableLayout(delimiter, len(cells), column, cells if header else None, skip + header)


def _label_column(name: str, label: str | None, cells: list[str], known: int | None) -> int:
    if label is None:
        return len(cells) - 1 if known is None else known
    if _is_column_number(label):
        if 1 <= int(label) <= len(cells):
            return int(label) - 1
        raise DataError(f"{name} has no column {label}: its columns are 1 to {len(cells)}")
    if label in cells:
        return cells.index(label)
    shown = ", ".join(cells[:20]) + (", …" if len(cells) > 20 else "")
    raise DataError(f"{name} has no column named {label!r}; its first line has: {shown}")


def _read_columns(
    path: Path, name: str, layout: TableLayout, dtype: np.dtype[Any]
) -> tuple[Array, dict[str, int], Array]:
    """Read features; every different label with its code; the code of each line's label."""
    texts: dict[str, int] = {}
    codes = array("q")

    def keep(text: str) -> int:
        codes.append(texts.setdefault(text.strip(), len(texts)))
        return 0

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an integer written as 3.0, an empty file
            table = np.loadtxt(
                str(path.resolve()),
                dtype,
                comments=None,
                delimiter=layout.delimiter,
                skiprows=layout.skip,
                ndmin=2,
                quotechar='"',
                encoding=_ENCODING,
                converters={layout.label: keep},
            )
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError, Warning) as error:
        _explain(path, name, layout, dtype, str(error))
    if table.shape[1] != layout.width or (dtype.kind == "f" and not np.isfinite(table).all()):
        _explain(path, name, layout, dtype, f"{table.shape[1]} columns, expected {layout.width}")
    last = layout.width - 1
    if layout.label in (0, last):
        features = table[:, 1:] if layout.label == 0 else table[:, :last]
    else:
        features = np.delete(table, layout.label, axis=1)
    return features, texts, np.frombuffer(codes, np.int64)


def _label_numbers(
    path: Path, name: str, layout: TableLayout, texts: list[str], manifest: Manifest
) -> tuple[Array, list[str] | None]:
    """Number every different label: what it says, or else the place of the class's name among all."""
    words = [text for text in texts if not _is_number(text)]
    known = manifest.classes is not None and set(texts) <= set(manifest.classes)  # also names that are numbers
    if not words and not known:
        return np.array([float(text) for text in texts], np.float64), None
    if not known and (len(words) < len(texts) or manifest.class_count is None or "" in words):
        wanted = "a class" if manifest.class_count is not None and len(words) == len(texts) else "a number"
        word = min(words)
        where = (line for line, cells in _lines(path, layout) if cells[layout.label].strip() == word)
        line = next(where, "?")  # unless the two readers take its quotes differently
        raise DataError(f"{name}: line {line}, {layout.column(layout.label)}: expected {wanted}, got {word!r}")
    names = order_classes(name, "names of classes", sorted(texts), manifest, "or write numbers instead of names")
    places = {each: place for place, each in enumerate(names)}
    return np.array([places[text] for text in texts], np.int64), names


def table_classes(path: Path, name: str, label: str | None) -> list[str]:
    """List the names of classes in a table, in the order of their numbers."""
    try:
        layout = _read_layout(path, name, label)
        texts = {cells[layout.label].strip() for _, cells in _lines(path, layout) if len(cells) == layout.width}
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{name} is no text in UTF-8") from None
    if all(map(_is_number, texts)):
        raise DataError(f"{name}: {layout.column(layout.label)} has numbers; expected names of classes")
    return sorted(texts)


def _explain(path: Path, name: str, layout: TableLayout, dtype: np.dtype[Any], reason: str) -> NoReturn:
    """Read again, slowly, to find the line and the column that are wrong."""
    empty = True
    for line, cells in _lines(path, layout):
        empty = False
        if len(cells) != layout.width:
            raise DataError(f"{name}: line {line} has {len(cells)} columns, expected {layout.width}")
        for number, cell in enumerate(cells):
            if number != layout.label and not _fits(cell, dtype):
                kind = "a finite number" if dtype.kind == "f" else "a whole number"
                raise DataError(f"{name}: line {line}, {layout.column(number)}: expected {kind}, got {cell.strip()!r}")
    if empty:
        raise EmptyData(f"{name} has no samples")
    raise DataError(f"{name} cannot be read: {reason}")


def _lines(path: Path, layout: TableLayout) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.reader(file, delimiter=layout.delimiter)
        try:
            for cells in reader:
                if reader.line_num > layout.skip and cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise DataError(f"{path.name}: line {reader.line_num}: {error}") from None


def _fits(cell: str, dtype: np.dtype[Any]) -> bool:
    try:
        if dtype.kind == "f":
            return math.isfinite(float(cell)) and abs(float(cell)) <= float(np.finfo(dtype).max)
        return np.iinfo(dtype).min <= int(cell) <= np.iinfo(dtype).max
    except ValueError:
        return False


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_column_number(label: str) -> bool:
    return label.isascii() and label.isdigit() and len(label) < 10
