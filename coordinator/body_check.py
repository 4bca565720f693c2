"""Check and hash the body of an update once it is on the disk.

A small body is checked at once: to involve another thread would take longer than the work. A large one is checked by a
thread beside the event loop, which goes on with other requests. Until then a body takes no memory of ours.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from federation.wire import CheckedUpdate, UpdateDecoder

LARGE = 4 << 20  # bytes
READ = 1 << 18  # bytes at once
_threads = ThreadPoolExecutor(2, "body-check")
_own = threading.local()  # the buffer of a thread


def read_body(path: Path, decoder: UpdateDecoder) -> tuple[CheckedUpdate, bytes]:
    """Return what is known about a body and its sha256; WireError if it is not what it has to be."""
    if not hasattr(_own, "buffer"):
        _own.buffer = memoryview(bytearray(READ))
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(_own.buffer):
            decoder.feed(_own.buffer[:count])
            sha256.update(_own.buffer[:count])
    return decoder.finish(), sha256.digest()


async def check_body(path: Path, decoder: UpdateDecoder) -> tuple[CheckedUpdate, bytes]:
    """Do the same without keeping the event loop from other work for long."""
    if path.stat().st_size <= LARGE:
        return read_body(path, decoder)
    return await asyncio.get_running_loop().run_in_executor(_threads, read_body, path, decoder)
