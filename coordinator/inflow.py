"""The body of a request on its way in: into a sink, without a copy of it, or piece by piece for who asks for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import Message

HELD = 1 << 16  # bytes of a body that wait for an application which asks for them one by one

Sink = Callable[[memoryview], None]


def _nothing() -> None:
    """In place of somebody who is no longer interested."""


class Inflow:
    """What a request says; `missing` bytes of it are still to come."""

    def __init__(self, transport: asyncio.Transport, missing: int | None, proceed: Callable[[], None]) -> None:
        self._transport = transport
        self._proceed = proceed
        self.missing = missing  # None: nobody knows
        self.received = 0
        self._held = bytearray()
        self._sink: Sink | None = None
        self._refused = False
        self._news = asyncio.Event()
        if self.whole:
            self._news.set()
        self._poured: asyncio.Future[None] | None = None
        self.gone = False

    @property
    def whole(self) -> bool:
        return self.missing == 0

    @property
    def waits(self) -> bool:
        """Who asks for the next piece has to wait for the client."""
        return not (self._held or self.whole or self.gone)

    async def pour(self, sink: Sink) -> None:
        """All of it, piece by piece; a piece is good until `sink` returns. What the sink raises ends it."""
        self._proceed()
        self._poured, self._sink = asyncio.get_running_loop().create_future(), sink
        held, self._held = self._held, bytearray()
        self._give(memoryview(held))
        self._end_if_over()
        self._transport.resume_reading()
        try:
            await self._poured
        finally:
            self._sink, self._refused = None, True

    async def next_message(self) -> Message:
        """The same for who asks for each piece."""
        self._proceed()
        if self.waits:
            self._transport.resume_reading()
        await self._news.wait()
        if self.gone:
            return {"type": "http.disconnect"}
        self._news.clear()
        held, self._held = bytes(self._held), bytearray()
        if not self.whole:
            self._transport.resume_reading()
        return {"type": "http.request", "body": held, "more_body": not self.whole}

    def take(self, data: memoryview) -> None:
        """The next bytes."""
        self.received += len(data)
        if self.missing is not None:
            self.missing -= len(data)
        self._give(data)
        self._end_if_over()
        self._news.set()

    def lose(self) -> None:
        """The client has gone, or was answered."""
        self.gone = self._refused = True
        self._proceed = _nothing  # and who made this can go
        self._news.set()
        self._end_if_over()

    def give_up(self) -> None:
        """Whoever pours has waited long enough."""
        self._fail(ClientDisconnect())

    def _give(self, data: memoryview) -> None:
        if self._sink is not None:
            try:
                self._sink(data)
            except Exception as error:
                self._fail(error)
        elif not self._refused:
            self._held += data
            if len(self._held) >= HELD:
                self._transport.pause_reading()

    def _fail(self, error: Exception) -> None:
        self._sink, self._refused = None, True
        if self._poured is not None and not self._poured.done():
            self._poured.set_exception(error)

    def _end_if_over(self) -> None:
        if self._poured is None or self._poured.done():
            return
        if self.whole:
            self._poured.set_result(None)
        elif self.gone:
            self._poured.set_exception(ClientDisconnect())
