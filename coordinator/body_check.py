"""What a body is: its contents are checked and hashed, as it comes or once it is there.

Small bodies are looked at piece by piece while they come: to involve another thread would take longer than the work. A
large one is written first and then read by a thread beside the event loop, which goes on with the next.
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
_threads = ThreadPoolExecutor(2, "examine")
_own = threading.local()  # the buffer of a thread


class Examination:
    """Of one body."""

    def __init__(self, decoder: UpdateDecoder) -> None:
        self._decoder = decoder
        self._sha256 = hashlib.sha256()

    def feed(self, piece: memoryview) -> None:
        self._decoder.feed(piece)
        self._sha256.update(piece)

    def read(self, body: Path) -> None:
        """All of it from a file."""
        if not hasattr(_own, "buffer"):
            _own.buffer = memoryview(bytearray(READ))
        with body.open("rb", buffering=0) as file:
            while count := file.readinto(_own.buffer):
                self.feed(_own.buffer[:count])

    async def read_beside(self, body: Path) -> None:
        await asyncio.get_running_loop().run_in_executor(_threads, self.read, body)

    def finish(self) -> tuple[CheckedUpdate, bytes]:
        """What is known about it, and its sha256; WireError if it is not what it has to be."""
        return self._decoder.finish(), self._sha256.digest()
