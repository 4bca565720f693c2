"""Libraries that print from C++ past Python's streams: their output would end up between the bytes of `--json`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silence(*descriptors: int) -> Iterator[None]:
    """Send file descriptors (1 is standard output, 2 is standard error) to nowhere for a while."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in descriptors]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in descriptors:
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip(descriptors, saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
