"""A Python file that the user wrote: imported, with the files beside it in reach; what it raises becomes one line."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from federation.errors import InputError

_LOADED_FROM = "__loaded_from__"


def import_file(path: Path, refusal: type[InputError] = InputError) -> ModuleType:
    """Import the file as a module; `refusal` says why there is none."""
    if not path.is_file():
        raise refusal(f"no such file: {path}")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]  # files of one name in several folders
    spec = importlib.util.spec_from_file_location(f"embrace_user_{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise refusal(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    with neighbours(path):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever the user's file raises
            raise refusal(f"{path} cannot be imported: {one_line(error)}") from error
    return module


def load_class(reference: str, folder: Path) -> type[Any]:
    """Load the class of `file.py:Name`, the file seen from a folder."""
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        raise InputError(f"{reference}: expected file.py:Name")
    kind = getattr(import_file(folder / file), name, None)
    if not isinstance(kind, type):
        raise InputError(f"{reference}: there is no class {name!r} in the file")
    setattr(kind, _LOADED_FROM, f"{(folder / file).resolve()}:{name}")
    return kind


def loaded_from(kind: type[Any]) -> str | None:
    """Return the reference with which any process of this machine loads the class again; None: it was no file's."""
    found: str | None = vars(kind).get(_LOADED_FROM)
    return found


@contextlib.contextmanager
def neighbours(path: Path) -> Iterator[None]:
    """Let the file import those beside it, also later, in a function."""
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have changed it
            sys.path.remove(folder)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
