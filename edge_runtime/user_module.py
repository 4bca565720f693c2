"""A Python file that the user wrote: imported, with the files beside it in reach; what it raises becomes one line."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from federation.errors import InputError


def import_file(path: Path, refusal: type[InputError] = InputError) -> ModuleType:
    """Import the file as a module; `refusal` says why there is none."""
    if not path.is_file():
        raise refusal(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"embrace_user_{path.stem}", path)
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
