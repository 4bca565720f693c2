"""Turns: few requests are in the application at once, so that memory does not grow with those who come at once.

A request costs far more memory than a connection that waits. Whoever takes long, because its network is slow or there
is nothing to do for it, gives up its place and goes on without: nobody waits for a slow client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PLACES = 16
PATIENCE = 0.25  # seconds after which a place goes to the next


class Turn:
    """A place in the queue, then in the application."""

    __slots__ = ("_begin", "_held", "_timer", "_turns")

    def __init__(self, turns: Turns, begin: Callable[[], None]) -> None:
        self._turns = turns
        self._begin = begin
        self._held = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._held = True
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self.end)
        self._begin()

    def end(self) -> None:
        """Make room for the next; once."""
        if self._held and self._timer is not None:
            self._held = False
            self._timer.cancel()
            self._turns.leave()


class Turns:
    """One for all connections of a process."""

    def __init__(self, places: int = PLACES) -> None:
        self._free = places
        self._waiting: deque[Turn] = deque()

    def queue(self, turn: Turn) -> None:
        """It begins at once, or later."""
        self._waiting.append(turn)
        self._admit()

    def leave(self) -> None:
        self._free += 1
        asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        while self._free > 0 and self._waiting:
            self._free -= 1
            self._waiting.popleft().start()
