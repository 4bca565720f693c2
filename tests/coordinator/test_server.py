"""The process around uvicorn: what it reads of a request before the application asks."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from coordinator.connections import Connections
from coordinator.server import BODY, HEAD, _Protocol


def test_a_body_is_read_when_the_application_asks_for_it() -> None:
    async def play() -> None:
        asked, received = asyncio.Event(), []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await asked.wait()
            received.append(await receive())
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        config, loop = uvicorn.Config(app, log_config=None), asyncio.get_running_loop()
        protocol = _Protocol(Connections(None, 0), config, ServerState(), {}, loop)
        protocol.connection_made(transport)
        assert transport.max_size == HEAD
        protocol.data_received(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        transport.pause_reading.assert_called_once()
        asked.set()
        while not received:
            await asyncio.sleep(0)
        assert received[0]["body"] == b"ab" and transport.max_size == BODY
        transport.resume_reading.assert_called_once()
        protocol.data_received(b"cd")
        transport.pause_reading.assert_called_once()
        protocol.data_received(b"GET")  # of the next request
        assert transport.max_size == HEAD
        protocol.connection_lost(None)

    asyncio.run(play())
