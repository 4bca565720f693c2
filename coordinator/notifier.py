"""A bell: any thread rings it, every coroutine that waits hears it. Waiting takes no thread."""

from __future__ import annotations

import asyncio
import threading


class Bell:
    """Rings are counted, so that whoever looked before it began to wait misses none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self.rings = 0

    def ring(self) -> None:
        with self._lock:
            self.rings += 1
            waiting, self._waiting = self._waiting, set()
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)

    async def heard(self, since: int, seconds: float) -> None:
        """Until there were more rings than `since`, or so many seconds have passed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.rings != since:
                return
            self._waiting.add((loop, future))
        try:
            await asyncio.wait([future], timeout=seconds)
        finally:
            with self._lock:
                self._waiting.discard((loop, future))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
