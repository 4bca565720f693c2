"""Share one call among many callers: one transaction and one wait for the disk for all of them.

Calls that come while one is under way wait for it and are made together. They also wait a moment for others that are on
their way, if it is known that there are some. A single caller is served at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from anyio.to_thread import run_sync

Item = TypeVar("Item")
Answer = TypeVar("Answer")
MOST = 64  # at a time: the first does not wait for the work of hundreds
_LOOKS = 0.005  # seconds until it is looked again what has come


class Batched(Generic[Item, Answer]):
    """A function of many as a coroutine of one. For each item it answers with a result, or with an error to raise."""

    def __init__(
        self,
        function: Callable[[Sequence[Item]], Sequence[Answer | Exception]],
        most: int = MOST,
        pause: float = 0.0,
    ) -> None:
        """`most` items are taken at a time; while more are on their way, none until `pause` seconds after a call."""
        self._function = function
        self._most = most
        self._pause = pause
        self._ended = -math.inf  # when a call last did
        self._expected = 0
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await future

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Count an item as on its way while the block runs."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    async def _gather(self) -> None:
        while self._expected and len(self._waiting) < self._most and time.monotonic() < self._ended + self._pause:
            await asyncio.sleep(_LOOKS)

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._gather()
                taken, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                answers: Sequence[Answer | Exception]
                try:
                    answers = await run_sync(self._function, [item for item, _ in taken])
                except Exception as error:
                    answers = [error] * len(taken)
                self._ended = time.monotonic()
                for (_, future), answer in zip(taken, answers):
                    if future.done():  # the caller has gone
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        finally:
            self._worker = None
