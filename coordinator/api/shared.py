"""Give many clients one answer: made by one thread, and kept for a few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from fastapi.concurrency import run_in_threadpool

T = TypeVar("T")


class Shared(Generic[T]):
    """Make an answer when a client asks; others that ask meanwhile, and a little later, get the same."""

    def __init__(self, make: Callable[[], T], seconds: float) -> None:
        self._make = make
        self._kept = seconds
        self._answer: asyncio.Future[T] | None = None  # the newest, or one on its way

    async def latest(self) -> T:
        """Return an answer that is a few seconds old at most, or raise what went wrong just now."""
        if self._answer is None:
            self._answer = asyncio.ensure_future(run_in_threadpool(self._make))
            self._answer.add_done_callback(self._made)
        return await asyncio.shield(self._answer)

    def _made(self, done: asyncio.Future[T]) -> None:
        kept = 0.0 if done.cancelled() or done.exception() else self._kept
        asyncio.get_running_loop().call_later(kept, self._forget)

    def _forget(self) -> None:
        self._answer = None
