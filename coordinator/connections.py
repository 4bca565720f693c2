"""Bound how many connections there are: all together, and of one address.

Each takes a file descriptor, and so does each body on its way to the disk: without a bound, clients that only connect
would leave none for updates. A connection beyond the bound is closed before anything of it is read. With TLS it counts
when its handshake is over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address, ip_network

log = logging.getLogger("embrace.server")
RESERVED = 256  # descriptors for the database, logs, files that are read
PAUSE = 60.0  # seconds between two lines about refused connections


def parse_networks(text: str) -> list[str]:
    """Split addresses and networks at commas; ValueError if one is neither."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    return [str(ip_network(part)) if "/" in part else str(ip_address(part)) for part in found]


class Connections:
    """Count the connections of each address. An address may have half of all; a trusted proxy, which brings many
    clients, as many as there are."""

    def __init__(
        self, open_files: int | None, bodies: int, proxies: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_files` is the limit of the process; `bodies` may be received at once."""
        self.most = None if open_files is None else max(open_files - bodies - RESERVED, open_files // 2, 1)
        self._proxies = [ip_network(part) for part in parse_networks(proxies)]
        self._open: Counter[str] = Counter()  # of each address
        self._all = 0
        self._clock = clock
        self._told = -PAUSE

    def enter(self, address: str) -> bool:
        """Count a connection, or refuse it."""
        if self.most is not None and (self._all >= self.most or self._has_its_share(address)):
            self._tell(address)
            return False
        self._open[address] += 1
        self._all += 1
        return True

    def leave(self, address: str) -> None:
        self._all -= 1
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]

    def _has_its_share(self, address: str) -> bool:
        return self.most is not None and self._open[address] >= (self.most + 1) // 2 and not self._is_proxy(address)

    def _is_proxy(self, address: str) -> bool:
        try:
            return any(ip_address(address) in network for network in self._proxies)
        except ValueError:  # a socket of another kind
            return False

    def _tell(self, address: str) -> None:
        if self._clock() - self._told >= PAUSE:
            self._told = self._clock()
            facts = {"address": address, "connections": self._all, "of_address": self._open[address]}
            log.warning("connections are refused", extra={"facts": facts})
