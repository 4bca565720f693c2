"""Wait for what another thread or process does. The limit is no measurement: a busy machine must pass."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds until something that should happen is given up
PAUSE = 0.02  # seconds between two looks


def wait_until(ready: Callable[[], object], why: Callable[[], object] = lambda: "it never happened") -> None:
    """Look until it is so; `why` is asked for words when patience ends."""
    until = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < until, why()
        time.sleep(PAUSE)
