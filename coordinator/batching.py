"""Share one call among many callers: one transaction and one wait for the disk for all of them.

Calls that come while one is under way wait for it and are made together. A single caller is served at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from anyio.to_thread import run_sync

Item = TypeVar("Item")
Answer = TypeVar("Answer")
MOST = 64  # at a time: the first does not wait for the work of hundreds


class Batched(Generic[Item, Answer]):
    """A function of many as a coroutine of one. For each item it answers with a result, or with an error to raise."""

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Answer | Exception]], most: int = MOST) -> None:
        """`most` items are taken at a time."""
        self._function = function
        self._most = most
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                answers: Sequence[Answer | Exception]
                try:
                    answers = await run_sync(self._function, [item for item, _ in taken])
                except Exception as error:
                    answers = [error] * len(taken)
                for (_, future), answer in zip(taken, answers):
                    if future.done():  # the caller has gone
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        finally:
            self._worker = None
