"""Notice that a client that waits has hung up: the server says so once, and is not asked again and again."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from coordinator.notifier import Notifier


class HangUp:
    """Watch the connection of a request without a body, from the first wait until it is closed."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._watch: asyncio.Task[None] | None = None

    async def wait(self, notifier: Notifier, since: int, seconds: float) -> bool:
        """Wait for a notification; return at once, and True, if the client hangs up."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._until_gone())
        await notifier.wait(since, seconds, self._watch)
        return self._watch.done()

    async def close(self) -> bool:
        """Stop watching, before anything is answered; return whether the client has hung up."""
        if self._watch is None:
            return await self._request.is_disconnected()
        gone = self._watch.done()
        self._watch.cancel()
        return gone

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
