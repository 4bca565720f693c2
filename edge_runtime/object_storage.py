"""Read and write object storage by URLs that the coordinator has signed. Neither of the two is trusted.

A URL is a secret: it is in no log and no error. The device's token is never sent along, no redirect is followed, and no
proxy is used. A coordinator on the internet cannot point a device to machines of its private network, nor one that
speaks TLS to a place that does not. What may pass is tried again a few times; then there is one error, after which the
coordinator's own way is taken.
"""

from __future__ import annotations

import ipaddress
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from edge_runtime.own_limits import Deadline
from federation.errors import EmbraceError

TIMEOUT = {"connect": 10.0, "read": 60.0, "write": 60.0, "pool": 10.0}
ATTEMPTS, PAUSE = 3, 0.2  # of a request, and seconds before the second; longer each time
REST = 300.0  # seconds for which storage that failed is not tried again
MOST_URL = 8192  # characters
MOST_ANSWER = 1 << 16  # bytes of an answer to an upload
_CHUNK = 1 << 18
_RANGE = re.compile(r"bytes (\d{1,18})-")


class StorageFailed(EmbraceError):
    """The object storage did not do what was asked of it; the coordinator may."""

    status = 502

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass  # another attempt may succeed


class ObjectStorage:
    """The storage of one coordinator, as a device uses it."""

    def __init__(
        self,
        server: str,
        deadline: Deadline,
        certificate: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`certificate` is a PEM file of an authority to trust beside the system's."""
        self._server = httpx.URL(server)
        self._deadline = deadline
        self._certificate = certificate
        self._clock = clock
        self._sleep = sleep
        self._rests_until = 0.0
        self._transport: httpx.HTTPTransport | None = None  # certificates are loaded when they are needed

    @property
    def is_usable(self) -> bool:
        """Whether it has not failed lately."""
        return self._clock() >= self._rests_until

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def read(self, url: str, start: int, stop: int) -> Iterator[bytes]:
        """Fetch bytes [start, stop) of an object; of a server that sends all of it, what is in front is skipped."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                for part in self._read(url, start, stop):
                    start += len(part)
                    yield part
                return
            except StorageFailed as error:
                self._pause(error, attempt)

    def write(self, url: str, size: int, body: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Put an object of so many bytes, which `body` gives anew for every attempt."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._write(url, size, body)
                return
            except StorageFailed as error:
                self._pause(error, attempt)

    def _pause(self, error: StorageFailed, attempt: int) -> None:
        """Wait before the next attempt, or let the storage rest and raise."""
        if not error.may_pass or attempt == ATTEMPTS:
            self._rests_until = self._clock() + REST
            raise error
        self._sleep(PAUSE * 2**attempt * random.uniform(0.5, 1.5))

    def _read(self, url: str, start: int, stop: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with self._request("GET", url, headers) as answer:
            skipped, left = start - _first_byte(answer), stop - start
            if skipped < 0:
                raise StorageFailed("it answered with another range")
            for chunk in answer.iter_raw(_CHUNK):
                self._deadline.check()
                part = chunk[skipped : skipped + left]
                skipped -= min(skipped, len(chunk))
                left -= len(part)
                if part:
                    yield part
                if not left:
                    return
            raise StorageFailed(f"its answer ended {left} bytes too early", may_pass=True)

    def _write(self, url: str, size: int, body: Callable[[], Iterable[bytes | memoryview]]) -> None:
        with self._request("PUT", url, {"Content-Length": str(size)}, self._checked(body)) as answer:
            came = 0
            for chunk in answer.iter_raw(_CHUNK):
                came += len(chunk)
                if came > MOST_ANSWER:
                    raise StorageFailed("its answer is too long")

    def _checked(self, body: Callable[[], Iterable[bytes | memoryview]]) -> Iterator[bytes]:
        for part in body():
            self._deadline.check()
            yield bytes(part)

    @contextmanager
    def _request(
        self, method: str, url: str, headers: dict[str, str], content: Iterator[bytes] | None = None
    ) -> Iterator[httpx.Response]:
        """Send a request whose answer is a success; whatever fails before the block ends is a StorageFailed."""
        answer = None
        try:
            place = self._allowed(url)
            request = httpx.Request(method, place, headers=headers, content=content, extensions={"timeout": TIMEOUT})
            # The transport itself: a client would log the URL, send headers of its own, and follow the environment.
            self._transport = self._transport or httpx.HTTPTransport(verify=self._trusted(), trust_env=False)
            answer = self._transport.handle_request(request)
            if not 200 <= answer.status_code < 300:
                may_pass = answer.status_code >= 500 or answer.status_code in (408, 429)
                raise StorageFailed(f"it answered {answer.status_code}", may_pass=may_pass)
            yield answer
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise StorageFailed(_words(error), may_pass=isinstance(error, httpx.TransportError)) from None
        finally:
            if answer is not None:
                answer.close()

    def _trusted(self) -> ssl.SSLContext:
        found = ssl.create_default_context()
        if self._certificate is not None:
            found.load_verify_locations(cafile=str(self._certificate))
        return found

    def _allowed(self, url: str) -> httpx.URL:
        """Refuse a URL that a coordinator has no business to send a device to."""
        if len(url) > MOST_URL or not url.isascii() or not url.isprintable():
            raise StorageFailed("its address is no URL")
        place = httpx.URL(url)
        if place.scheme not in ("http", "https") or not place.host or place.userinfo:
            raise StorageFailed("its address is no URL of http or https")
        if place.scheme == "http" and self._server.scheme == "https":
            raise StorageFailed("its address is without TLS, and the coordinator's is with it")
        if _nearness(place.host) > _nearness(self._server.host):
            raise StorageFailed("its address is in a network that is nearer to this device than the coordinator's")
        return place


def _first_byte(answer: httpx.Response) -> int:
    """Find where an answer begins in its object. Some servers send a range with the status of a whole object."""
    found = _RANGE.match(answer.headers.get("Content-Range", ""))
    if found is None and answer.status_code != 200:
        raise StorageFailed("it did not say which range it sends")
    return 0 if found is None else int(found[1])


def _nearness(host: str) -> int:
    """Rank how private the addresses of a host are: of the internet, of a private network, of a link, of this machine.

    >>> [_nearness(host) for host in ("8.8.8.8", "192.168.1.7", "169.254.169.254", "127.0.0.1", "::ffff:10.0.0.1")]
    [0, 1, 2, 3, 1]
    """
    found = {ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in socket.getaddrinfo(host, None)}
    return max(map(_rank, found))


def _rank(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback or address.is_unspecified:
        return 3
    if address.is_link_local:
        return 2
    return 0 if address.is_global else 1


def _words(error: Exception) -> str:
    """Say what kind of error it was: the text of some has the URL in it."""
    why = error.__cause__ or error.__context__ or error
    return (
        f"{type(error).__name__} ({why.strerror})"
        if isinstance(why, OSError) and why.strerror
        else type(error).__name__
    )
