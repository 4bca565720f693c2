"""Everything this project raises on purpose. The type says whose fault it was.

    EmbraceError            500, exit 1   something went wrong that this project can name
    ├── InputError          400, exit 2   the caller asked for something that cannot be done as asked
    │   ├── FieldError      400, exit 2   ... because of one value; says where it stands
    │   ├── BundleError     400, exit 2   ... because the bundle cannot be read or contradicts itself
    │   └── DataError       400, exit 2   ... because the local data does not fit the model
    │       ├── EmptyData                 ... there is none
    │       └── SingleClass               ... all of it has one label
    ├── TaskFailed          500, exit 1   a device could not finish its task
    │   ├── NonFiniteLoss                 ... the loss or the parameters stopped being numbers
    │   ├── OutOfMemory                   ... the boundary does not fit this device's memory
    │   │   └── TooLarge                  ... which it measured and has told the coordinator
    │   ├── DiskFull                      ... there is no room for stored activations or state
    │   ├── UnsafeGraph                   ... the bundle's graphs do other things than training
    │   ├── Untrusted                     ... the bundle is signed by another key than this device trusts
    │   └── OverLimit                     ... the task wants more than this device gives to any
    ├── VerificationError   500, exit 1   a result differs from the reference it was compared with
    └── MissingPackage      501, exit 3   this installation lacks an optional package

Any other exception is a bug: it is never caught to be made pretty, and its traceback is shown. A message says
what was found and what was expected, and names the file, layer or node.
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar

FieldPath = tuple[str | int, ...]  # keys of tables and places in lists, from the outside in
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError


class EmbraceError(Exception):
    """Base of the tree: catch this to catch whatever the project raises on purpose."""

    status: ClassVar[int] = 500  # hint for an HTTP answer
    exit_code: ClassVar[int] = 1  # of the `embrace` command


class InputError(EmbraceError):
    """The caller's mistake: repeating the same call cannot succeed."""

    status = 400
    exit_code = 2


class FieldError(InputError):
    """A value that is wrong: `path` leads to it, `line` is its line in a file, if it came from one.

    A value object names its own field; whatever decodes the table around it adds the keys in front.

    >>> print(FieldError("trim", "expected a share in [0, 0.5), got 0.7").below("serve"))
    serve.trim: expected a share in [0, 0.5), got 0.7
    """

    def __init__(self, path: str | FieldPath, message: str, line: int | None = None) -> None:
        self.path: FieldPath = (path,) if isinstance(path, str) else path
        self.message = message
        self.line = line
        place = [f"line {line}"] * (line is not None) + [dotted(self.path)] * bool(self.path)
        super().__init__(": ".join([*place, message]))

    def below(self, *keys: str | int) -> FieldError:
        """Return the same error, seen from further outside."""
        return FieldError((*keys, *self.path), self.message, self.line)

    def on_line(self, line: int | None) -> FieldError:
        """Return the same error with a line."""
        return FieldError(self.path, self.message, line)

    def __reduce__(self) -> tuple[type[FieldError], tuple[FieldPath, str, int | None]]:
        """Rebuild from all arguments: worker processes send exceptions back pickled."""
        return FieldError, (self.path, self.message, self.line)


def dotted(path: FieldPath) -> str:
    """Write a path as TOML does, with places in lists.

    >>> dotted(("local", "rules", 0, "mu")), dotted(("tiers", "very weak"))
    ('local.rules[0].mu', "tiers.'very weak'")
    """
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key[:80]}" if re.fullmatch(r"[\w-]+", key) else f".{key[:80]!r}"
    return text.removeprefix(".")


class BundleError(InputError):
    """A bundle that cannot be read, is incomplete, or whose parts do not belong together."""


class DataError(InputError):
    """Local data that cannot be read or does not fit the model."""

    reason: ClassVar[str] = "data"


class EmptyData(DataError):
    """A data set without a single sample."""

    reason = "empty_data"


class SingleClass(DataError):
    """A data set whose labels are all the same."""

    reason = "single_class"


class TaskFailed(EmbraceError):
    """A device could not finish its task; `reason` is what its report says."""

    reason: ClassVar[str] = "failed"


class NonFiniteLoss(TaskFailed):
    """Training diverged."""

    reason = "non_finite_loss"


class OutOfMemory(TaskFailed):
    """Less memory than the boundary needs."""

    reason = "out_of_memory"


class TooLarge(OutOfMemory):
    """A boundary that the device tried and that does not fit; its profile has the measured need."""

    reason = "too_large"


class DiskFull(TaskFailed):
    """Less disk than the task needs."""

    reason = "disk_full"


class UnsafeGraph(TaskFailed):
    """A graph that could give a device's data away, or that reaches beyond its bundle."""

    reason = "unsafe_graph"


class Untrusted(TaskFailed):
    """A bundle whose signature this device does not trust."""

    reason = "untrusted"


class OverLimit(TaskFailed):
    """A task that wants more steps or time than the device's own limits allow."""

    reason = "over_limit"


class VerificationError(EmbraceError):
    """A computed result does not agree with its reference within tolerance."""


class MissingPackage(EmbraceError):
    """An optional package is not installed here; says which extra brings it."""

    status = 501
    exit_code = 3

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"the package '{package}' is not installed: pip install 'embrace-fl[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingPackage], tuple[str, str]]:
        """Rebuild from both arguments: worker processes send exceptions back pickled."""
        return type(self), (self.package, self.extra)
