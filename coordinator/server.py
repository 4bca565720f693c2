"""A coordinator as a process: its directory, its application, uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import cast

import uvicorn

from coordinator.api.app import create_app
from coordinator.api.limits import HEADER_BYTES, ClientLimits
from coordinator.http import PatientProtocol
from coordinator.logs import configure_logging
from coordinator.registry import Registry
from coordinator.service import Coordinator
from coordinator.settings import LOOPBACK, Settings, is_exposed, without_secrets
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.files import Files
from federation.errors import InputError
from federation.round_sums import Reached

log = logging.getLogger("embrace.server")
LAST_REQUESTS = 30  # seconds for requests that are under way when the process is asked to end
WANTED_FILES = 65_536  # open ones: every upload has a socket and a file


class Server:
    """Everything put together."""

    def __init__(self, directory: Path, settings: Settings, *, reached: Reached = lambda point: None) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files = Files(directory)
        except OSError as error:
            raise InputError(f"cannot use {directory}: {error.strerror}") from None
        self.settings = settings
        sessions = open_database(settings.database or sqlite_url(directory))
        self.registry = Registry(sessions, time.time)
        self.coordinator = Coordinator(files, sessions, reached=reached)
        same = {field.name for field in fields(ClientLimits)} & {field.name for field in fields(Settings)}
        limits = ClientLimits(**{name: getattr(settings, name) for name in same})
        self.app = create_app(self.coordinator, self.registry, limits)

    def run(self, listening: Callable[[str], None] = lambda url: None) -> None:
        """Serve until SIGINT or SIGTERM; requests that are under way are finished, those that wait are sent home."""
        configure_logging(self.settings.log_level)
        _allow_many_files()
        config, bound = self._config(), self._listen()
        url = self._url(bound)
        log.info("listening", extra={"facts": {"url": url, **asdict(without_secrets(self.settings))}})
        if is_exposed(self.settings):
            log.warning("without TLS: whoever is on the way between a device and this address can read its token")
        listening(url)
        gc.freeze()  # what is there now stays: nobody has to look through it again and again
        with _quiet_signals():
            _Uvicorn(config, self._leave).run(sockets=[bound])
        log.info("ended")

    def _leave(self) -> None:
        self.app.state.leaving.set()
        self.coordinator.release()

    def _config(self) -> uvicorn.Config:
        settings = self.settings
        config = uvicorn.Config(
            self.app,
            http=cast(type[asyncio.Protocol], PatientProtocol),
            ws="none",
            loop="asyncio",
            h11_max_incomplete_event_size=HEADER_BYTES,
            log_config=None,
            access_log=False,
            timeout_keep_alive=max(1, round(settings.slow_client)),
            backlog=1024,
            timeout_graceful_shutdown=LAST_REQUESTS,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            server_header=False,
            proxy_headers=False,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"cannot use {settings.tls_certificate} with {settings.tls_key}: {error}") from None
        return config

    def _listen(self) -> socket.socket:
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            bound = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        # asyncio sets this only for sockets made with proto=IPPROTO_TCP; without it every small answer takes 40 ms.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # whoever takes nothing of its answer for so long is cut off
            seconds = max(1.0, self.settings.slow_client)
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
        return bound

    def _url(self, bound: socket.socket) -> str:
        host = self.settings.host if self.settings.host in LOOPBACK else socket.getfqdn()
        scheme = "http" if self.settings.tls_certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


class _Uvicorn(uvicorn.Server):
    """Says when it begins to end, so that nobody waits for those who wait."""

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None]) -> None:
        super().__init__(config)
        self._leave = leave

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._leave)
        await super().shutdown(sockets)


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn ends cleanly on a signal and then raises it again; it has done its work by then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_many_files() -> None:
    """As many open files as the system lets us have: often 1024 are the default, and 512 uploads take that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
