"""Simulated devices: they fetch the weights and send an update, over sockets, and do nothing in between.

One event loop and plain sockets, so that the load costs little beside the server that is measured. A body is one piece
of memory that all devices send.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from federation.errors import EmbraceError

HOST = "127.0.0.1"
WAIT = 30.0  # seconds for a task
_CHUNK = 1 << 18


class LoadError(EmbraceError):
    """The server did not do what it has to."""


@dataclass(frozen=True)
class Answer:
    """A status and a body."""

    status: int
    body: bytes  # of JSON; of weights only the length is of interest
    size: int
    headers: Mapping[str, str]  # by names in small letters

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """HTTP/1.1 to this machine, as far as it is needed here: every answer has a length."""

    def __init__(self, port: int, token: str = "", chunk: int = _CHUNK) -> None:
        """`chunk`: bytes that are read at once."""
        self._port = port
        self._chunk = chunk
        self._common = f"Host: {HOST}:{port}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")

    async def __aenter__(self) -> Connection:
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(self._chunk))
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._loop.sock_connect(self._socket, (HOST, self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def ask(self, what: str, headers: str = "", body: memoryview | None = None) -> Answer:
        """Send a request; `what` is a method and a path. Anything but success is an error."""
        answer = await self.try_to(what, headers, body)
        if answer.status >= 300:
            raise LoadError(f"{what}: the server answered {answer.status}: {answer.body[:300]!r}")
        return answer

    async def try_to(self, what: str, headers: str = "", body: memoryview | None = None) -> Answer:
        """Send a request, and return whatever is answered."""
        length = f"Content-Length: {len(body)}\r\n" if body is not None else "Content-Length: 0\r\n"
        await self._loop.sock_sendall(self._socket, f"{what} HTTP/1.1\r\n{self._common}{headers}{length}\r\n".encode())
        if body is not None:
            await self._loop.sock_sendall(self._socket, body)
        return await self._answer(what)

    async def _answer(self, what: str) -> Answer:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await self._read(what)
        head, _, body = head.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size, kept = len(body), "json" in fields.get("content-type", "")
        while size < int(fields.get("content-length", "0")):
            part = await self._read(what)
            size += len(part)
            if kept:
                body += part
        return Answer(int(first.split(" ")[1]), body, size, fields)

    async def _read(self, what: str) -> memoryview:
        """Read what has come; it is valid until the next call."""
        count = await self._loop.sock_recv_into(self._socket, self._buffer)
        if not count:
            raise LoadError(f"{what}: the server closed the connection")
        return self._buffer[:count]


@dataclass(frozen=True)
class Load:
    """What every device sends, and how many of them are transferring at the same time."""

    body: bytes
    at_once: int


async def baseline_round(port: int, load: Load, devices: int) -> None:
    """Run a round of the baseline, from the first download to the new weights."""
    gate = asyncio.Semaphore(load.at_once)

    async def device() -> None:
        async with gate, Connection(port) as server:
            await server.ask("GET /weights")
            await server.ask("PUT /update", body=memoryview(load.body))

    await _all([device() for _ in range(devices)])
    async with Connection(port) as server:
        await server.ask("POST /close")


async def embrace_round(ports: Sequence[int], load: Load, devices: Sequence[str], headers: str, version: int) -> None:
    """Run a round of a job, from the first request for a task to the first task with a version after `version`.

    Devices are dealt to the ports, one process behind each.
    """
    gate = asyncio.Semaphore(load.at_once)

    async def device(port: int, token: str) -> None:
        task = await _task(port, token)
        async with gate, Connection(port, token) as server:
            found = await server.ask(f"GET /v1/jobs/{task['job']}/versions/{task['version']}/weights")
            if found.size != len(load.body):
                raise LoadError(f"the weights have {found.size} bytes; expected {len(load.body)}")
            await server.ask(f"PUT /v1/tasks/{task['id']}/update", headers, memoryview(load.body))

    await _all([device(ports[number % len(ports)], token) for number, token in enumerate(devices)])
    following = await _task(ports[0], devices[0])  # a lease of the next round, in which it asks again
    if following["version"] != version + 1:
        raise LoadError(f"the next task has version {following['version']}; expected {version + 1}")


async def _task(port: int, token: str) -> Any:
    """Ask for a task on a connection of its own, because a device that waits for its turn would lose it."""
    async with Connection(port, token) as server:
        while (answer := await server.ask(f"POST /v1/tasks/next?wait={WAIT:g}")).status == 204:
            pass
    return answer.json()


async def _all(devices: Sequence[Any]) -> None:
    """Run all devices; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(device) for device in devices]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
