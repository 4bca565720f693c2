"""Read IMDB film reviews, positive or negative (Maas et al., 2011), as token numbers. The groups are the films.

An archive `imdb_10k_256.npz` has them ready. The original texts (`aclImdb`) are made into the same form: lower case,
without `<br />`, words are `[a-z0-9]+('[a-z]+)?`; 0 fills up in front of the text, 1 starts it, 2 is an unknown word,
then the 9,997 most frequent words of the training texts (equally frequent ones in the order of the alphabet); of a
longer review the last 256 tokens are kept. Reviews stand in the order positive, negative, each by their number. An
archive that fills up behind the text is turned: a recurrent network that reads a hundred zeros last forgets the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from edge_runtime.data.archive import read_arrays
from edge_runtime.data.input_adapter import Array
from federation.errors import DataError
from simulation.datasets.dataset import Dataset, Progress, as_labels

VOCABULARY = 10_000
LENGTH = 256
_START, _UNKNOWN, _FIRST_WORD = 1, 2, 3
_ARCHIVE = "imdb_10k_256.npz"
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_FILM = re.compile(r"/title/tt(\d+)")
_SIDES = ("neg", "pos")  # the label is the index
MARKERS = (_ARCHIVE, "train/pos")

Review = tuple[list[str], int, int]  # words, label, number


def read_imdb(folder: Path, progress: Progress) -> Dataset:
    if (folder / _ARCHIVE).is_file():
        return _read_archive(folder / _ARCHIVE)
    parts = {part: _read_texts(folder / part, progress, step) for step, part in enumerate(("train", "test"))}
    numbers = number_words(words for words, _, _ in parts["train"])
    x = {part: np.stack([encode(words, numbers) for words, _, _ in reviews]) for part, reviews in parts.items()}
    y = {part: np.array([label for _, label, _ in reviews], np.int64) for part, reviews in parts.items()}
    films = _films(folder / "train", parts["train"])
    return Dataset("imdb", x["train"], y["train"], x["test"], y["test"], 2, films)


def _read_archive(path: Path) -> Dataset:
    where = str(path)
    x, y, films, x_test, y_test = read_arrays(path, where, ["x_train", "y_train", "movie_train", "x_test", "y_test"])
    for tokens in (x, x_test):
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not ((tokens >= 0) & (tokens < VOCABULARY)).all():
            raise DataError(f"{where}: expected rows of token numbers from 0 to {VOCABULARY - 1}")
    x, x_test = filled_in_front(x), filled_in_front(x_test)
    labels = [as_labels(values, where) for values in (y, y_test, films)]
    return Dataset("imdb", x, labels[0], x_test, labels[1], 2, labels[2])


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.replace("<br />", " ").lower())


def number_words(texts: Iterable[list[str]]) -> dict[str, int]:
    """Number the words, the most frequent word first."""
    counts: Counter[str] = Counter()
    for words in texts:
        counts.update(words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - _FIRST_WORD]
    return {word: _FIRST_WORD + rank for rank, word in enumerate(ranked)}


def encode(words: list[str], numbers: dict[str, int]) -> Array:
    """Make one row: zeros, and the last tokens behind them."""
    tokens = [_START, *(numbers.get(word, _UNKNOWN) for word in words)][-LENGTH:]
    row = np.zeros(LENGTH, np.uint16)
    row[-len(tokens) :] = tokens
    return row


def filled_in_front(rows: Array) -> Array:
    """Move the zeros behind every text to its front."""
    width = rows.shape[1]
    behind = np.argmax(rows[:, ::-1] != 0, axis=1)  # of a row of zeros: none, and it stays
    return np.take_along_axis(rows, (np.arange(width) - behind[:, None]) % width, axis=1)


def _read_texts(folder: Path, progress: Progress, step: int) -> list[Review]:
    reviews: list[Review] = []
    for half, label in enumerate((1, 0)):
        progress(f"{folder.name}/{_SIDES[label]}", 2 * step + half, 4)
        side = folder / _SIDES[label]
        for path in sorted(side.glob("*_*.txt"), key=_number):
            try:
                reviews.append((split_words(path.read_text("utf-8", "replace")), label, _number(path)))
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not reviews:
        raise DataError(f"{folder} has no reviews, expected pos/NUMBER_RATING.txt and neg/NUMBER_RATING.txt")
    return reviews


def _number(path: Path) -> int:
    number = path.name.partition("_")[0]
    if not number.isascii() or not number.isdigit():
        raise DataError(f"{path}: expected a name like 0_9.txt, the review's number and its rating")
    return int(number)


def _films(folder: Path, reviews: list[Review]) -> Array | None:
    """Find the film of each review by its line in urls_pos.txt and urls_neg.txt; None without the files."""
    lines: dict[int, list[str]] = {}
    for label, side in enumerate(_SIDES):
        path = folder / f"urls_{side}.txt"
        if not path.is_file():
            return None
        lines[label] = path.read_text("utf-8", "replace").splitlines()
    films = []
    for _, label, number in reviews:
        found = _FILM.search(lines[label][number]) if number < len(lines[label]) else None
        if found is None:
            file = folder / f"urls_{_SIDES[label]}.txt"
            raise DataError(f"{file}, line {number + 1}: expected an address with /title/tt…")
        films.append(int(found[1]))
    return np.array(films, np.int64)
