"""A coordinator as a process: its directory, its application, uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.api import pages
from coordinator.api.app import create_app
from coordinator.api.limits import HEADER_BYTES, ClientLimits
from coordinator.connections import Connections, parse_networks
from coordinator.coordinator import Coordinator
from coordinator.evaluation import EvaluationLimits
from coordinator.lan import Names, names_of_this_machine
from coordinator.logs import configure_logging
from coordinator.registry import Registry
from coordinator.retention import Keep
from coordinator.settings import AUTO, LOOPBACK, Settings, is_exposed, without_secrets
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.open import open_blobs
from coordinator.store.repository import Repository
from edge_runtime.files import make_folder
from edge_runtime.system import HERE
from federation.errors import EmbraceError, InputError
from federation.pace import Pace
from federation.round_sums import Reached

if TYPE_CHECKING:
    from coordinator.lan_certificate import LanCertificate

log = logging.getLogger("embrace.server")
CACHE = "cache"  # in the directory, of blobs that are elsewhere
HEAD, BODY = 1 << 12, 1 << 16  # bytes that are read at once: of headers, of a body
TICKS = 10  # of uvicorn's: a second
RENEWAL = 3600 * TICKS  # how often the certificate is looked at
GOODBYE = 2.0  # seconds for a client to answer that TLS ends
LAST_REQUESTS = 30  # seconds for requests that are under way when the process is asked to end
WANTED_FILES = 65_536  # open ones: every upload has a socket and a file, and often 1024 are the default


class Server:
    """Everything put together."""

    def __init__(self, directory: Path, settings: Settings, *, reached: Reached = lambda point: None) -> None:
        try:
            make_folder(directory)
            blobs = open_blobs(settings.blobs, directory, directory / CACHE, settings.storage_url)
        except OSError as error:
            raise InputError(f"cannot use {settings.blobs or directory}: {error.strerror or error}") from None
        self.settings = settings
        self._folder = directory / "tls"
        self.lan = self.ensure_certificate() if settings.tls == AUTO else None
        repository = Repository(open_database(settings.database or sqlite_url(directory)))
        self.registry = Registry(repository, time.time)
        limits = EvaluationLimits(**_shared(settings, EvaluationLimits))
        keep, pace = Keep(**_shared(settings, Keep)), Pace(**_shared(settings, Pace))
        if not settings.workers and not repository.is_shared:
            raise InputError("--workers 0 leaves folding to others, who need --database postgresql+psycopg://…")
        self.coordinator = Coordinator(
            repository, blobs, reached=reached, limits=limits, keep=keep, pace=pace, workers=settings.workers
        )
        limits_of_clients = ClientLimits(**_shared(settings, ClientLimits))
        self.app = create_app(self.coordinator, self.registry, limits_of_clients, settings.allow_origin)
        if self.lan is not None:
            pages.offer_authority(self.app, self.lan.authority)

    def run(self, listening: Callable[[str], None] = lambda url: None) -> None:
        """Serve until SIGINT or SIGTERM; requests that are under way are finished, those that wait are sent home."""
        configure_logging(self.settings.log_level)
        config, bound = self._config(), self._listen()
        url = self._url(bound)
        log.info("listening", extra={"facts": {"url": url, **asdict(without_secrets(self.settings))}})
        if is_exposed(self.settings):
            log.warning("without TLS: machines between a device and this address can read the device's token")
        listening(url)
        gc.freeze()  # what is there now stays: the collector need not look through it again and again
        with _quiet_signals():
            renewed = self.renewed_certificate if self.lan else lambda: None
            _Uvicorn(config, self.settings.slow_client, self.coordinator.release, renewed).run(sockets=[bound])
        log.info("ended")

    def ensure_certificate(self) -> LanCertificate:
        """Make or renew the certificate for the private network."""
        try:
            from coordinator.lan_certificate import ensure_certificate
        except ModuleNotFoundError as error:
            raise InputError(
                f"--tls auto needs the package {error.name}: pip install 'embrace-fl[coordinator]', or give "
                "--tls-certificate and --tls-key"
            ) from None
        return ensure_certificate(self._folder, self._names())

    def _names(self) -> Names:
        public = urlsplit(self.settings.public_url).hostname if self.settings.public_url else None
        return names_of_this_machine(self.settings.host, public)

    def renewed_certificate(self) -> Path | None:
        """Return a certificate that had to be made anew."""
        try:
            found = self.ensure_certificate()
        except EmbraceError as error:
            log.error("the certificate could not be renewed: %s", error)
            return None
        return found.certificate if found.is_renewed else None

    def _config(self) -> uvicorn.Config:
        files, settings = HERE.allow_open_files(WANTED_FILES), self.settings
        connections = Connections(files, settings.concurrent_requests, settings.proxy or "")
        certificate = settings.tls_certificate if self.lan is None else self.lan.certificate
        config = uvicorn.Config(
            self.app,
            http=functools.partial(_Protocol, connections),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            h11_max_incomplete_event_size=HEADER_BYTES,
            log_config=None,
            access_log=False,
            timeout_keep_alive=max(1, round(settings.slow_client)),
            backlog=1024,
            timeout_graceful_shutdown=LAST_REQUESTS,
            ssl_certfile=certificate,
            ssl_keyfile=settings.tls_key,
            server_header=False,
            proxy_headers=settings.proxy is not None,
            forwarded_allow_ips=parse_networks(settings.proxy or ""),
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"cannot use {certificate} with {settings.tls_key}: {error}") from None
        return config

    def _listen(self) -> socket.socket:
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            bound = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        # Connections inherit both. asyncio sets the first only for sockets made with proto=IPPROTO_TCP; without it a
        # small answer takes 40 ms. The second cuts off a client that takes nothing of its answer for so long.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            seconds = max(1.0, self.settings.slow_client)
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
        return bound

    def _url(self, bound: socket.socket) -> str:
        settings = self.settings
        if settings.public_url is not None:
            return settings.public_url
        host = settings.host if settings.host in LOOPBACK else socket.getfqdn()
        if self.lan is not None:
            host = self._names().link
        scheme = "http" if settings.tls_certificate is None and self.lan is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


class _Protocol(H11Protocol):
    """uvicorn's protocol, but for how much it reads: it would hold 320 KiB of every body that waits for a place.

    h11, which bounds headers: with httptools a client can send headers until there is no memory left.
    """

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self._address: str | None = None  # that is counted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if not self._all.enter(address):
            transport.abort()
            return
        self._address = address
        super().connection_made(transport)
        self._read_at_once(HEAD)
        transport.set_write_buffer_limits(BODY // 2)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._all.leave(self._address)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began = self.cycle
        super().data_received(data)
        if self.cycle is not began and self.cycle.more_body:
            self.flow.pause_reading()  # until the application asks for the body
            self._read_at_once(BODY)
        elif self.cycle is not None and self.cycle.response_complete:
            self._read_at_once(HEAD)

    def _read_at_once(self, size: int) -> None:
        self.transport.max_size = size  # type: ignore[attr-defined]


class _Uvicorn(uvicorn.Server):
    """uvicorn, but for connections that it would keep for ever.

    Its own keep-alive timeout ends with the first byte of a request. Here a connection is closed that has had no
    request under way for too long: it says nothing, sends half of its headers, or goes on with a body that was refused.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        slow_client: float,
        release: Callable[[], None],
        renewed: Callable[[], Path | None],
    ) -> None:
        super().__init__(config)
        self._renewed = renewed
        self._renewal: asyncio.Task[None] | None = None
        self._slow_client = slow_client
        self._release = release
        self._idle: dict[Any, tuple[Any, float]] = {}  # connection -> its last request, since when there is none

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            self._close_idle(time.monotonic())
        if counter % RENEWAL == TICKS:
            self._renewal = asyncio.create_task(self._take_renewed())
        return await super().on_tick(counter)

    async def _take_renewed(self) -> None:
        """Take a new certificate into use: new connections get it, others go on."""
        certificate = await asyncio.to_thread(self._renewed)
        if certificate is not None and self.config.ssl is not None:
            self.config.ssl.load_cert_chain(certificate)
            log.info("renewed the certificate")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; a TLS handshake has as long as the headers of a request, where asyncio would wait for a minute."""
        loop: Any = asyncio.get_running_loop()
        if self.config.is_ssl:
            loop.create_server = functools.partial(loop.create_server, ssl_handshake_timeout=self._slow_client)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._release)  # devices that wait for a task are told that there is none
        hanging_up = asyncio.create_task(self._hang_up())
        await super().shutdown(sockets)
        hanging_up.cancel()

    def _close_idle(self, now: float) -> None:
        connections: set[Any] = set(self.server_state.connections)
        idle = {}
        for connection in connections:
            last = connection.cycle
            if last is None or last.response_complete:
                known, since = self._idle.get(connection, (last, now))
                idle[connection] = (last, since if known is last else now)
                if now - since >= self._slow_client and known is last and not connection.transport.is_closing():
                    connection.transport.close()
        self._idle = idle

    async def _hang_up(self) -> None:
        """Cut off TLS clients that do not answer its goodbye: asyncio would wait for half a minute."""
        while True:
            await asyncio.sleep(GOODBYE)
            for connection in list(self.server_state.connections):
                if connection.transport.is_closing():
                    connection.transport.abort()


def _shared(settings: Settings, kind: type[Any]) -> dict[str, Any]:
    """Take the settings that a class has fields of the same names for."""
    same = {field.name for field in fields(kind)} & {field.name for field in fields(Settings)}
    return {name: getattr(settings, name) for name in same}


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
