"""Everything that is raised on purpose. Catch `EmbraceError` to catch all of it; `federation/errors.py` draws the tree.

>>> import embrace
>>> try:
...     embrace.load("no/such/folder")
... except embrace.errors.BundleError as error:
...     print("refused:", type(error).__name__)
refused: BundleError
"""

from __future__ import annotations

from federation.errors import (
    BundleError,
    DataError,
    DiskFull,
    EmbraceError,
    EmptyData,
    FieldError,
    InputError,
    MissingPackage,
    NonFiniteLoss,
    OutOfMemory,
    SingleClass,
    TaskFailed,
    VerificationError,
)

__all__ = [
    "BundleError",
    "DataError",
    "DiskFull",
    "EmbraceError",
    "EmptyData",
    "FieldError",
    "InputError",
    "MissingPackage",
    "NonFiniteLoss",
    "OutOfMemory",
    "SingleClass",
    "TaskFailed",
    "VerificationError",
]
