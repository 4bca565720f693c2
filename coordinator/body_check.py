"""Check and hash the body of an update once it is on the disk.

A small body is checked at once: to involve another thread would take longer than the work. A large one is checked by a
thread beside the event loop, which goes on with other requests. Until then a body takes no memory of ours.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from anyio import CapacityLimiter, to_thread

from federation.wire import CheckedUpdate, UpdateDecoder

LARGE = 4 << 20  # bytes
READ = 1 << 18  # bytes at once
AT_ONCE = 2  # large bodies that are checked side by side


def read_body(path: Path, decoder: UpdateDecoder) -> tuple[CheckedUpdate, bytes]:
    """Return what is known about a body and its sha256; WireError if it is not what it has to be."""
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(min(READ, path.stat().st_size) or 1))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            decoder.feed(buffer[:count])
            sha256.update(buffer[:count])
    return decoder.finish(), sha256.digest()


async def check_body(path: Path, decoder: UpdateDecoder, threads: CapacityLimiter) -> tuple[CheckedUpdate, bytes]:
    """Do the same without keeping the event loop from other work for long; `threads` bounds those beside it."""
    if path.stat().st_size <= LARGE:
        return read_body(path, decoder)
    return await to_thread.run_sync(read_body, path, decoder, limiter=threads)
