"""Tell the coordinator that a device is at work, from a thread of its own, and hear whether the work is still wanted.

Without this a lease would have to last as long as the longest task, and a device that died would hold its seat as long.
"""

from __future__ import annotations

import threading
from types import TracebackType

from edge_runtime.client import DeviceClient
from federation.errors import EmbraceError

SHARE = 3  # of a lease: so many heartbeats may be sent before it runs out
LEAST, MOST = 0.05, 60.0  # seconds between two of them


class TaskLost(EmbraceError):
    """The task is no longer this device's: its round closed, or another device has it."""

    status = 409


class Heartbeat:
    """Beat while the block runs. `lease` is in seconds; None: an earlier coordinator, which knows no heartbeats."""

    def __init__(self, client: DeviceClient, task: str, lease: float | None) -> None:
        self._client = client
        self._task = task
        self._lease = lease
        self._over = threading.Event()
        self._lost = ""  # why
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._lease is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()  # the thread ends by itself: it may wait for an answer

    def check(self) -> None:
        """Raise TaskLost if the work is of no use any more."""
        if self._lost:
            raise TaskLost(self._lost)

    def _run(self) -> None:
        lease = self._lease or MOST
        while not self._over.wait(min(max(lease / SHARE, LEAST), MOST)):
            try:
                lease = self._client.heartbeat(self._task) or lease
            except EmbraceError as error:
                self._lost = str(error)
                return
