"""Texts: FILE.jsonl, FILE.txt or a folder of text files, made token ids as a model takes them.

To a model that gives each sample one label a line of FILE.jsonl is a sample, cut or padded to the model's length. To
one that predicts tokens, texts are documents: joined with the token that ends one, and cut into samples of that length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array, Rows, shape_text
from edge_runtime.data.named_inputs import Inputs
from edge_runtime.data.targets import order_classes
from edge_runtime.data.token_file import ANYWHERE, TokenSpace, write_ids
from edge_runtime.data_reference import JSON_LINES, text_fields
from federation.errors import DataError, EmptyData
from federation.inputs import NamedInput
from federation.manifest import CLASSIFYING, Manifest

LONGEST_LINE = 4 << 20  # bytes
_PIECE = 1 << 20  # characters of a file that are tokenised together
_SMALL = 1 << 16  # vocabularies whose ids fit 16 bits
_TEXT = ".txt"

Label = str | int | float
# How an input follows from the number of tokens of each sample, by a part of the input's name.
_BESIDE: dict[str, Callable[[NDArray[np.int64], int], Array]] = {
    "mask": lambda counts, length: np.arange(length) < counts[:, None],
    "type": lambda counts, length: np.zeros((len(counts), length), np.int64),
    "segment": lambda counts, length: np.zeros((len(counts), length), np.int64),
    "position": lambda counts, length: np.broadcast_to(np.arange(length), (len(counts), length)),
}


@dataclass(frozen=True)
class TextForm:
    """What a model takes of a text."""

    tokens: str | None  # the input's name; None: the only one
    length: int
    vocabulary: int | None
    beside: tuple[NamedInput, ...]  # inputs that follow from the number of tokens

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest type that has every id, and every number of tokens."""
        small = self.vocabulary is not None and max(self.vocabulary, self.length) < _SMALL
        return np.uint16 if small else np.uint32


class _Beside:
    """Rows of an input that are computed when they are asked for."""

    def __init__(self, role: str, counts: Rows, length: int, dtype: str) -> None:
        self._make = _BESIDE[role]
        self._counts = counts
        self.shape = (counts.shape[0], length)
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    def __getitem__(self, indices: Any, /) -> Array:
        return self._make(np.asarray(self._counts[indices], np.int64), self.shape[1]).astype(self.dtype)


def text_form(manifest: Manifest) -> TextForm | None:
    """Find what a model takes of a text; None if it takes no tokens."""
    if manifest.inputs is None:
        spec = manifest.input
        takes = spec.dtype == "int64" and len(spec.shape) == 1
        return TextForm(None, spec.shape[0], manifest.vocabulary, ()) if takes else None
    beside = tuple(item for item in manifest.inputs if _role(item) is not None)
    tokens = [item for item in manifest.inputs if item not in beside]
    if len(tokens) != 1 or tokens[0].dtype != "int64" or any(item.shape != tokens[0].shape for item in beside):
        return None
    if len(tokens[0].shape) != 1:
        return None
    return TextForm(tokens[0].name, tokens[0].shape[0], tokens[0].vocabulary, beside)


def _role(item: NamedInput) -> str | None:
    return next((part for part in _BESIDE if part in item.name.lower()), None)


def is_text(reference: str) -> bool:
    """Whether this names texts, or may: a folder of text files looks as one of images does."""
    path = Path(reference)
    return JSON_LINES in reference.lower() or path.suffix.lower() == _TEXT or path.is_dir()


def read_texts(
    reference: str, manifest: Manifest, tokenizer: Path | None, space: TokenSpace = ANYWHERE
) -> tuple[Inputs, Array, list[str] | None, dict[str, Any]]:
    """Return inputs, labels, names of the classes if there are any, and a description."""
    form = text_form(manifest)
    if form is None:
        taken = ", ".join(item.name for item in manifest.inputs or ()) or shape_text(manifest.input.shape)
        raise DataError(
            f"{reference} has texts, the model {manifest.name!r} takes {taken}: expected tokens, and a mask"
        )
    if tokenizer is None:
        raise DataError(f"{reference} has texts, and the bundle no tokenizer: give --tokenizer tokenizer.json")
    try:
        if predicts_tokens(manifest):
            return _language(reference, manifest, form, tokenizer, space)
        return _classification(reference, manifest, form, tokenizer, space)
    except OSError as error:
        raise DataError(f"cannot read {reference}: {error.strerror or error}") from None


def predicts_tokens(manifest: Manifest) -> bool:
    """Whether each position of a text has a label: the token that follows."""
    return manifest.loss.name in CLASSIFYING and math.prod(manifest.labels.shape) > 1


def _classification(
    reference: str, manifest: Manifest, form: TextForm, tokenizer: Path, space: TokenSpace
) -> tuple[Inputs, Array, list[str] | None, dict[str, Any]]:
    labels: list[Label] = []

    def texts() -> Iterator[tuple[str, bool]]:
        for where, text, label in labelled_texts(reference):
            _check_label(where, label, manifest)
            labels.append(label)
            yield text, True

    rows = write_ids(tokenizer, texts(), form.dtype, form.length, space)
    if not labels:
        raise EmptyData(f"{reference} has no samples")
    numbers, names = _numbered(reference, labels, manifest)
    cut = int((rows[:, 0] == form.length).sum())
    about = {"stored": "text, tokens mapped", "tokens": form.length, "full_length": cut}
    return _inputs(form, rows[:, 1:], rows[:, 0]), numbers, names, about


def _language(
    reference: str, manifest: Manifest, form: TextForm, tokenizer: Path, space: TokenSpace
) -> tuple[Inputs, Array, list[str] | None, dict[str, Any]]:
    ids = write_ids(tokenizer, _documents(reference), form.dtype, None, space)
    shift = 0 if manifest.loss.next_token else 1  # else labels are the tokens that follow
    count = max(0, len(ids) - shift) // form.length
    if count == 0:
        raise EmptyData(f"{reference} has {len(ids)} tokens, and a sample of the model {manifest.name!r} {form.length}")
    size = count * form.length
    inputs = ids[:size].reshape(count, form.length)
    labels = ids[shift : shift + size].reshape(count, form.length)
    about = {"stored": "text, tokens mapped", "tokens": len(ids)}
    return _inputs(form, inputs, np.broadcast_to(np.int64(form.length), count)), labels, None, about


def _inputs(form: TextForm, ids: Array, counts: Array) -> Inputs:
    if form.tokens is None:
        return ids
    beside = {item.name: _Beside(str(_role(item)), counts, form.length, item.dtype) for item in form.beside}
    return {form.tokens: ids, **beside}


def _check_label(where: str, label: Label, manifest: Manifest) -> None:
    """Refuse a label that no class has, where it stands."""
    if manifest.class_count is None and isinstance(label, str):
        raise DataError(f"{where} has the label {label[:80]!r}, the loss {manifest.loss.name} takes numbers")
    if isinstance(label, str) and manifest.classes is not None and label not in manifest.classes:
        raise DataError(f"{where} has the label {label[:80]!r}; expected {', '.join(manifest.classes)[:200]}")


def _numbered(reference: str, labels: list[Label], manifest: Manifest) -> tuple[Array, list[str] | None]:
    words = {label for label in labels if isinstance(label, str)}
    if not words:
        return np.array(labels), None
    if len(words) < len(set(labels)):
        raise DataError(f"{reference}: some labels are words and some are numbers; expected one kind")
    names = order_classes(reference, "labels", sorted(words), manifest, "or write numbers instead of names")
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[str(label)] for label in labels], np.int64), names


def labelled_texts(reference: str) -> Iterator[tuple[str, str, Label]]:
    """Yield where a text stands, the text, and its label: lines of a file, or files in a folder for each class."""
    path = Path(reference)
    if path.is_dir():
        for folder in sorted(part for part in path.iterdir() if part.is_dir() and not part.name.startswith(".")):
            for file in _text_files(folder):
                yield str(file), _read_file(file), folder.name
    elif path.suffix.lower() == _TEXT:
        raise DataError(f"{reference} has no labels; expected FILE.jsonl, or a folder with a sub-folder for each class")
    else:
        file, text, label = text_fields(reference)
        for where, fields in _json_lines(file):
            yield where, _field(where, fields, text, str), _field(where, fields, label, Label)


def text_classes(reference: str) -> list[str]:
    """List the names of classes, in the order of their numbers."""
    found = {label for _, _, label in labelled_texts(reference)}
    if not all(isinstance(label, str) for label in found):
        raise DataError(f"{reference}: labels are numbers; expected names of classes")
    return sorted(map(str, found))


def _documents(reference: str) -> Iterator[tuple[str, bool]]:
    """Yield pieces of documents, and whether one ends there: a file of text is one, and so is a line of JSON."""
    path = Path(reference)
    if not path.is_dir() and path.suffix.lower() != _TEXT:
        file, text, _ = text_fields(reference)
        for where, fields in _json_lines(file):
            yield _field(where, fields, text, str), True
        return
    for file in _text_files(path) if path.is_dir() else [path]:
        piece: list[str] = []
        size = 0
        for _, line in _lines(file):
            if size >= _PIECE:
                yield "".join(piece), False
                piece, size = [], 0
            piece.append(line)
            size += len(line)
        yield "".join(piece), True


def _text_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == _TEXT and path.is_file())


def _read_file(file: Path) -> str:
    if file.stat().st_size > LONGEST_LINE:
        raise DataError(f"{file} has more than {LONGEST_LINE >> 20} MiB, too much for one sample")
    return "".join(line for _, line in _lines(file))


def _json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        where = f"{file}: line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON: {str(error)[:100]}") from None
        if not isinstance(found, dict):
            raise DataError(f'{where} is no JSON object; expected {{"text": …, "label": …}}')
        yield where, found


def _field(where: str, fields: dict[str, Any], name: str, kind: Any) -> Any:
    if name not in fields:
        known = ", ".join(map(str, fields))[:200] or "none"
        raise DataError(f"{where} has no field {name!r}, it has {known}; others are chosen by FILE.jsonl:TEXT:LABEL")
    value = fields[name]
    if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
        expected = "a text" if kind is str else "a name or a number"
        raise DataError(f"{where}: {name}: expected {expected}, got {str(value)[:80]!r}")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(f"{where}: {name}: expected text in UTF-8, it has one half of a surrogate pair, as \\ud83d")
    return int(value) if isinstance(value, bool) else value


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines with their ends, one at a time: a file may be larger than memory."""
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(f"{file}: line {number} has more than {LONGEST_LINE >> 20} MiB")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(f"{file}: line {number} is no text in UTF-8") from None
