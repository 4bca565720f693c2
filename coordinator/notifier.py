"""Wake coroutines from any thread. Waiting takes no thread."""

from __future__ import annotations

import asyncio
import threading


class Notifier:
    """Notifications are counted, so that a coroutine that looked before it began to wait misses none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self.count = 0

    def notify(self) -> None:
        """Wake every coroutine that waits."""
        with self._lock:
            self.count += 1
            waiting, self._waiting = self._waiting, set()
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)

    async def wait(self, since: int, seconds: float, other: asyncio.Future[None] | None = None) -> None:
        """Wait until there were more notifications than `since`, so many seconds have passed, or `other` is done."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.count != since:
                return
            self._waiting.add((loop, future))
        try:
            awaited = [future] if other is None else [future, other]
            await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            with self._lock:
                self._waiting.discard((loop, future))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
