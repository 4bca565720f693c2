"""FILE.py:NAME: data from a function, or an object, in the user's own Python file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.data.archive import choose_names
from edge_runtime.data.input_adapter import Array, shape_text
from edge_runtime.user_module import import_file, neighbours, one_line
from federation.errors import DataError

MOST_BYTES = 2 << 30  # of batches that are put together in memory


Inputs = Array | dict[str, Array]  # one input, or several by name


def read_user_file(
    reference: str, names: Sequence[str] = (), labels: Sequence[str] = ()
) -> tuple[Inputs, Array | dict[str, Array]]:
    """Get inputs and labels: arrays, or batches that are put together; several inputs have `names`, `labels` too."""
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text)
    found = _find(path, name)
    with neighbours(path):
        try:
            given = found() if callable(found) else found
            pair = _as_pair(given, names, labels)
            return _arrays(pair) if pair is not None else _together(given, names, labels)
        except DataError as error:
            raise DataError(f"{reference}: {error}") from error.__cause__
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise DataError(f"{reference} failed: {one_line(error)}") from error


def _find(path: Path, name: str) -> Any:
    module = import_file(path, DataError)
    if not hasattr(module, name):
        names = sorted(each for each in vars(module) if not each.startswith("_"))
        raise DataError(f"{path} has no {name!r}; it has: {', '.join(names)[:200] or 'nothing'}")
    return getattr(module, name)


def _as_pair(given: Any, names: Sequence[str], labels: Sequence[str]) -> tuple[Any, Any] | None:
    """Take it as (inputs, labels) if that is what it is; two batches are not."""
    if isinstance(given, Mapping):
        own, wanted = choose_names("the mapping", given, names, labels)
        return (
            {name: given[name] for name in own} if list(own) == list(names) else given[own[0]],
            {name: given[name] for name in wanted} if list(wanted) == list(labels) else given[wanted[0]],
        )
    if isinstance(given, (tuple, list)) and len(given) == 2 and not all(map(_is_batch, given)):
        return given[0], given[1]
    return None


def _is_batch(given: Any) -> bool:
    """Recognise what data loaders give: a tuple, or a list of two arrays."""
    return isinstance(given, tuple) or (isinstance(given, list) and len(given) == 2 and hasattr(given[0], "shape"))


def _arrays(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Convert to numpy; tensors of other packages do that by themselves."""
    one, other = (
        {str(name): np.asarray(value) for name, value in each.items()}
        if isinstance(each, Mapping)
        else np.asarray(each)
        for each in pair
    )
    return one, other


def _together(given: Any, names: Sequence[str], wanted: Sequence[str]) -> tuple[Inputs, Array | dict[str, Array]]:
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise DataError(f"expected (x, y), a mapping with x and y, or batches of them, got {type(given).__name__}")
    parts: dict[str, list[Array]] = {}
    size = 0
    for number, item in enumerate(iter(given)):
        pair = _as_pair(item, names, wanted)
        if pair is None:
            raise DataError(f"batch {number} is {type(item).__name__}, expected (x, y)")
        batch = _batch(number, *_arrays(pair))
        if parts and set(batch) != set(parts):
            raise DataError(f"batch {number} has the arrays {', '.join(batch)}, the first one {', '.join(parts)}")
        for name, values in batch.items():
            known = parts.setdefault(name, [])
            if known:
                _check_alike(number, values, known[0], "labels" if name.startswith(_LABELS) else "inputs")
            known.append(values)
            size += values.nbytes
        if size > MOST_BYTES:
            raise DataError(
                f"the batches have more than {MOST_BYTES >> 20} MiB, too much to keep in memory; write them to an "
                ".npz file with numpy.savez, or return numpy.memmap arrays: both are read in place"
            )
    if not parts:
        return np.zeros((0,)), np.zeros((0,))
    whole = {name: np.concatenate(values) for name, values in parts.items()}
    labels = {name.removeprefix(_LABELS): whole.pop(name) for name in list(whole) if name.startswith(_LABELS)}
    return whole.pop(_INPUT) if _INPUT in whole else whole, labels.get(_INPUT, labels)


_INPUT, _LABELS = "", "\0labels"  # names that no input has; labels of several have their name behind it


def _batch(number: int, inputs: Any, labels: Any) -> dict[str, Array]:
    """The arrays of one batch by name, a single sample made a batch of one."""
    arrays = inputs if isinstance(inputs, dict) else {_INPUT: inputs}
    given = {
        f"{_LABELS}{name}": own for name, own in (labels if isinstance(labels, dict) else {_INPUT: labels}).items()
    }
    if all(values.ndim == 0 for values in given.values()):  # as data sets of other packages give them
        arrays = {name: values[None] for name, values in arrays.items()}
        given = {name: values[None] for name, values in given.items()}
    count = len(next(iter(given.values())))
    for values in arrays.values():
        if not values.shape or len(values) != count:
            raise DataError(f"batch {number} has {len(values) if values.shape else 'no'} inputs but {count} labels")
    return {**arrays, **given}


def _check_alike(number: int, batch: Array, first: Array, what: str) -> None:
    if batch.dtype != first.dtype or batch.shape[1:] != first.shape[1:]:
        raise DataError(
            f"batch {number} has {what} of {shape_text(batch.shape[1:])} ({batch.dtype}), the first batch of "
            f"{shape_text(first.shape[1:])} ({first.dtype})"
        )
