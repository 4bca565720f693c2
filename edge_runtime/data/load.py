"""What the user named: arrays, an archive, images, a table, texts or a function. All become `Samples`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from edge_runtime.data.archive import read_named
from edge_runtime.data.input_adapter import Array
from edge_runtime.data.named_inputs import Inputs
from edge_runtime.data.pictures import folder_classes, read_folder
from edge_runtime.data.samples import Samples, from_arrays
from edge_runtime.data.table import read_table, table_classes
from edge_runtime.data.text import is_text, read_texts, text_classes, text_form
from edge_runtime.data.token_file import ANYWHERE, TokenSpace
from edge_runtime.data.user_file import read_user_file
from edge_runtime.data_reference import JSON_LINES, file_of
from federation.errors import DataError, InputError
from federation.manifest import Manifest

# A reference, or inputs and labels; several inputs by name.
Data = str | Path | tuple[ArrayLike | Mapping[str, ArrayLike], ArrayLike]
FORMS = "FILE.npz, FILE.csv, FILE.jsonl, FILE.txt, FILE.py:NAME or a folder with one sub-folder of images per class"


def load_classes(reference: str, label: str | None = None) -> list[str]:
    """Read names of classes from data: sub-folders, labels of a table or of texts, in the order of their numbers."""
    path = Path(reference)
    if path.is_dir():
        return folder_classes(path)
    if path.suffix.lower() == ".csv":
        return table_classes(path, reference, label)
    if JSON_LINES in reference.lower():
        return text_classes(reference)
    raise DataError(
        f"{reference} has no names of classes; expected a folder with a sub-folder for each, FILE.csv or FILE.jsonl"
    )


def load_samples(
    data: Data,
    manifest: Manifest,
    *,
    label: str | None = None,
    tokenizer: Path | None = None,
    space: TokenSpace = ANYWHERE,
) -> Samples:
    """Open local data and check all of it against the model.

    `label` is a .csv file's column, by name or number; `tokenizer` makes token ids of texts, which
    are written in a `space`.
    """
    names = [item.name for item in manifest.inputs or ()]
    wanted = [item.name for item in manifest.loss.labels or ()]
    inputs: Inputs
    labels: Array | dict[str, Array]
    if isinstance(data, tuple):
        return from_arrays(_as_arrays(data[0]), _as_arrays(data[1]), manifest)
    reference = str(data)
    path, ending = Path(reference), Path(reference).suffix.lower()
    if label is not None and ending != ".csv":
        raise InputError(f"{reference}: only .csv files have a label column to choose; of texts FILE.jsonl:TEXT:LABEL")
    if ".py:" in reference:
        inputs, labels = read_user_file(reference, names, wanted)
        return from_arrays(inputs, labels, manifest, name=reference, about={"stored": "in memory"})
    if is_text(reference) and file_of(reference).exists() and (text_form(manifest) or not path.is_dir()):
        inputs, labels, classes, about = read_texts(reference, manifest, tokenizer, space)
        return from_arrays(inputs, labels, manifest, name=reference, about=about, class_names=classes)
    if path.is_dir() and names:
        raise DataError(
            f"{reference} has images alone, the model {manifest.name!r} takes {', '.join(names)}; use FILE.npz"
        )
    if path.is_dir():
        pictures, numbers, folders = read_folder(path, reference, manifest)
        return from_arrays(pictures, numbers, manifest, name=reference, about=pictures.about, class_names=folders)
    if not file_of(reference).exists():
        raise DataError(f"no such file: {file_of(reference)}")
    if ending not in (".npz", ".csv"):
        raise DataError(f"cannot tell what {reference!r} is: expected {FORMS}")
    if not path.is_file():
        raise DataError(f"no such file: {reference}")
    if ending == ".npz":
        inputs, labels, stored = read_named(path, reference, names, wanted)
        return from_arrays(inputs, labels, manifest, name=reference, about={"stored": stored})
    inputs, labels, classes, column = read_table(path, reference, manifest, label)
    about = {"stored": "csv, read into memory", "label": column}
    return from_arrays(inputs, labels, manifest, name=reference, about=about, class_names=classes)


def _as_arrays(given: Any) -> Any:
    """Convert what numpy understands, one by one if there are several by name."""
    return (
        {name: np.asarray(value) for name, value in given.items()} if isinstance(given, Mapping) else np.asarray(given)
    )
