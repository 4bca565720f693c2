"""HTTP/1.1 between sockets and the application, for uvicorn: large bodies, in and out, take no memory of their own.

- A body that the application pours (inflow.py) goes from one buffer, which all connections share, straight to where it
  belongs. Whatever is not asked for yet stays in the socket, and the sender waits.
- A file goes from the page cache to the socket (`http.response.pathsend`): nobody copies it, unless TLS has to.
- Requests take turns (turns.py): a connection that waits for its turn costs the few bytes of its headers.
- A client has so many seconds to send the headers of a request, or the rest of a body that was refused. Then its
  connection is closed: a few clients who send a byte now and then could take all connections otherwise.

Parsing, and every byte around the bodies, is h11's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from coordinator.inflow import Inflow
from coordinator.turns import Turn, Turns

log = logging.getLogger("embrace.http")
INFLOW, YIELD = "embrace.inflow", "embrace.yield"  # extensions of the scope: the body; gives up the turn
HEAD, BODY = 1 << 12, 1 << 17  # bytes that are read at once: of headers, of a body
GOODBYE = 2.0  # seconds in which a client can answer that TLS ends
ENCRYPTED = 1 << 15  # bytes of a file that are encrypted at once; a client that reads slowly has as many wait for it
_SHARED = memoryview(bytearray(BODY))  # used up before anybody else gets it: an event loop does one thing at a time

_TURNS = Turns()


class Exchange:
    """A request and its answer."""

    def __init__(self, protocol: PatientProtocol, head: h11.Connection, request: h11.Request) -> None:
        self._protocol = protocol
        self._head = head
        self._transport = protocol.transport
        headers = [(name.lower(), value) for name, value in request.headers]
        self.chunked = any(name == b"transfer-encoding" for name, _ in headers)
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)
        self.inflow = Inflow(self._transport, None if self.chunked else length, self._proceed)
        self.method = request.method.decode("ascii")
        self._started = False
        self.complete = False
        target, _, query = request.target.partition(b"?")
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode("ascii"),
            "server": protocol.server,
            "client": protocol.client,
            "scheme": protocol.scheme,
            "method": self.method,
            "root_path": "",
            "path": unquote(target.decode("ascii")),
            "raw_path": target,
            "query_string": query,
            "headers": headers,
            "state": protocol.app_state.copy(),
            "extensions": {"http.response.pathsend": {}, INFLOW: self.inflow, YIELD: protocol.give_way},
        }

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.inflow_or_end, self.send)
        except BaseException as error:
            if self.complete or not self.inflow.gone:
                log.error("an error outside of the application's own handling", exc_info=error)
            if not isinstance(error, Exception):
                raise
        finally:
            if not self.complete:
                self._break_off()
            self.scope.clear()  # it and this exchange refer to each other: nobody should have to search for that

    async def inflow_or_end(self) -> Message:
        if self.inflow.waits:  # for a client that nobody knows yet, perhaps: somebody else's turn
            self._protocol.give_way()
        return {"type": "http.disconnect"} if self.complete else await self.inflow.next_message()

    async def send(self, message: Message) -> None:
        if self.inflow.gone:
            return  # to nobody
        match message["type"]:
            case "http.response.start":
                headers = [*self._protocol.default_headers, *message.get("headers", [])]
                if not self._protocol.keep_alive or self._unasked:
                    headers = [*headers, (b"connection", b"close")]
                answer = h11.Response(status_code=message["status"], headers=headers, reason=_phrase(message["status"]))
                self._transport.write(self._head.send(answer) or b"")
                self._started = True
            case "http.response.body":
                await self._protocol.drain()
                data = b"" if self.method == "HEAD" else message.get("body", b"")
                self._transport.write(self._head.send(h11.Data(data=data)) or b"")
                if not message.get("more_body", False):
                    self._finish()
            case "http.response.pathsend":
                await self._send_file(Path(message["path"]))
                self._finish()

    async def _send_file(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            size = _Length(os.fstat(file.fileno()).st_size)
            self._head.send_with_data_passthrough(h11.Data(data=size))  # type: ignore[arg-type]
            try:
                if self._protocol.scheme == "https":
                    await self._encrypt(file)
                else:
                    await asyncio.get_running_loop().sendfile(self._transport, file, 0, len(size))
            except (ConnectionError, TimeoutError, RuntimeError):  # the client has gone, before or while it was sent
                self._transport.close()

    async def _encrypt(self, file: FileIO) -> None:
        """A file through TLS. asyncio would hand every 16 KiB of it to a thread."""
        self._transport.set_write_buffer_limits(ENCRYPTED)
        while (piece := file.read(ENCRYPTED)) and not self.inflow.gone:
            self._transport.write(piece)
            await self._protocol.drain()
            await asyncio.sleep(0)  # a client that reads quickly is not the only one

    def _finish(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._head.send(h11.EndOfMessage()) or b"")
        self.complete = True
        self.inflow.lose()
        self._protocol.answered(close=self._head.our_state is h11.MUST_CLOSE)

    @property
    def _unasked(self) -> bool:
        """The client waits to be asked for its body. If it is answered instead, nobody knows whether it still comes."""
        return self._head.they_are_waiting_for_100_continue and not self.inflow.received

    def _proceed(self) -> None:
        """Somebody wants the body now: a client that asked first is told to send it."""
        if self._unasked and not self._started:
            go = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._transport.write(self._head.send(go) or b"")

    def _break_off(self) -> None:
        """An answer that will not come, or not to its end."""
        if not self._started and not self._transport.is_closing():
            self._transport.write(_plain(500, b"Internal Server Error"))
        self.complete = True
        self._protocol.give_way()
        self._transport.close()


class PatientProtocol(asyncio.BufferedProtocol):
    """One connection, request after request."""

    __slots__ = (
        "_config",
        "_deadline",
        "_early",
        "_exchange",
        "_head",
        "_loop",
        "_state",
        "_turn",
        "_writable",
        "app_state",
        "client",
        "keep_alive",
        "scheme",
        "server",
        "transport",
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._state = server_state
        self.app_state = app_state
        self._loop = _loop or asyncio.get_event_loop()
        self._head: h11.Connection | None = None
        self._exchange: Exchange | None = None
        self._early = b""  # of the next request, while this one is being answered or waits for its turn
        self._turn: Turn | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._writable: asyncio.Event | None = None
        self.keep_alive = True

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._state.default_headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.server, self.client = get_local_addr(transport), get_remote_addr(transport)
        self.scheme = "https" if is_ssl(transport) else "http"
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._watch()

    def connection_lost(self, _: Exception | None) -> None:
        self._state.connections.discard(self)
        self._stop_watching()
        self.resume_writing()
        if self._exchange is not None:
            self._exchange.inflow.lose()

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        """Until the client has taken most of what was sent."""
        if self._writable is not None:
            await self._writable.wait()

    def give_way(self) -> None:
        """This request takes its time: somebody else's turn."""
        if self._turn is not None:
            self._turn.end()

    def shutdown(self) -> None:
        """The process is about to end: whoever is being answered gets the answer."""
        self.keep_alive = False
        if self._exchange is None or self._exchange.complete:
            self._hang_up()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SHARED if self._exchange is not None and not self._exchange.inflow.whole else _SHARED[:HEAD]

    def buffer_updated(self, count: int) -> None:
        self._take(_SHARED[:count])

    def _take(self, data: memoryview) -> None:
        exchange = self._exchange
        if exchange is None:
            self._early += data
            self.transport.pause_reading()
            if self._turn is None:
                self._turn = Turn(_TURNS, self._enter)
                _TURNS.queue(self._turn)
        elif exchange.inflow.whole:
            self._early += data
            self.transport.pause_reading()
        elif exchange.chunked:
            self._parse(bytes(data))
        else:
            most = exchange.inflow.missing
            exchange.inflow.take(data[:most])
            self._early += data[most:]
            self._go_on()

    def _enter(self) -> None:
        """It is this connection's turn, with what has come of a request."""
        early, self._early = self._early, b""
        if self.transport.is_closing():
            self._leave()
            return
        self.transport.resume_reading()
        self._parse(early)
        if self._exchange is None:  # more of the headers has to come first
            self._leave()

    def _leave(self) -> None:
        self.give_way()
        self._turn = None

    def _parse(self, data: bytes) -> None:
        """Headers; or a body in chunks, which only h11 can tell the end of."""
        if self._head is None:
            self._head = h11.Connection(h11.SERVER, self._config.h11_max_incomplete_event_size or HEAD)
        try:
            self._head.receive_data(data)
            while (event := self._head.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self._begin(event)
                    if self._exchange is not None and not self._exchange.chunked:
                        rest, _ = self._head.trailing_data
                        if rest:
                            self._take(memoryview(rest))
                        return
                elif isinstance(event, h11.Data) and self._exchange is not None:
                    self._exchange.inflow.take(memoryview(bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage) and self._exchange is not None:
                    self._early += self._head.trailing_data[0]
                    self._exchange.inflow.missing = 0
                    self._exchange.inflow.take(memoryview(b""))
                    self._go_on()
                    return
        except h11.RemoteProtocolError as error:
            self._refuse(error)

    def _begin(self, request: h11.Request) -> None:
        self._stop_watching()
        assert self._head is not None
        self._exchange = Exchange(self, self._head, request)
        if not self._exchange.inflow.whole:
            self.transport.pause_reading()  # until somebody wants the body
        task = self._loop.create_task(self._exchange.run(self._config.loaded_app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """What is no HTTP. If it is the body of a request that is being answered, that is as good as cut off."""
        log.warning("no HTTP: %s", error)
        if self._exchange is None:
            self.transport.write(_plain(400, b"Invalid HTTP request received."))
        self.transport.close()

    def answered(self, *, close: bool) -> None:
        """The answer is out."""
        self._state.total_requests += 1
        self._leave()
        if self.transport.is_closing():
            return
        if close or not self.keep_alive:
            self.transport.close()
        else:
            self._watch()
            self.transport.resume_reading()
            self._go_on()

    def _go_on(self) -> None:
        """To the next request, once this one is answered and its body, wanted or not, is past."""
        if self._exchange is not None and self._exchange.complete and self._exchange.inflow.whole:
            self._head = self._exchange = None
            early, self._early = self._early, b""
            self._watch()
            if early and not self.transport.is_closing():
                self._take(memoryview(early))

    def _watch(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self._loop.call_later(self._config.timeout_keep_alive, self._time_is_up)

    def _time_is_up(self) -> None:
        self._deadline = None
        if self._turn is not None and self._exchange is None:  # it waits for its turn, which is not its fault
            self._watch()
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        if not self.transport.is_closing():  # a second time would make TLS forget that it is still at it
            self.transport.close()
        if self.scheme == "https":  # which waits for an answer to its goodbye; a client that is idle gives none
            self._loop.call_later(GOODBYE, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _phrase(status: int) -> bytes:
    return HTTPStatus(status).phrase.encode() if status in HTTPStatus._value2member_map_ else b""


def _plain(status: int, words: bytes) -> bytes:
    """An answer without the application; the connection ends with it."""
    headers = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d" % len(words)
    return b"HTTP/1.1 %d %s\r\n%s\r\n\r\n%s" % (status, _phrase(status), headers, words)


class _Length:
    """As long as a file, for h11 to count."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size
