"""A coordinator as a process: its directory, its application, uvicorn."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from coordinator.api.app import create_app
from coordinator.job_runner import Reached
from coordinator.logs import configure_logging
from coordinator.registry import Registry
from coordinator.service import Coordinator
from coordinator.settings import LOOPBACK, Settings
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.files import Files
from federation.errors import InputError

SLOW_CLIENT = 15  # seconds in which a request must have begun, and between two requests of a connection


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
        self.app = create_app(self.coordinator, self.registry)

    def run(self, listening: Callable[[str], None] = lambda url: None) -> None:
        """Serve until SIGINT or SIGTERM; requests that are being answered are finished."""
        configure_logging(self.settings.log_level)
        settings = self.settings
        try:
            bound = socket.create_server((settings.host, settings.port), backlog=1024)
        except OSError as error:
            raise InputError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
        secure = settings.tls_certificate is not None
        name = settings.host if settings.host in LOOPBACK else socket.getfqdn()
        listening(f"{'https' if secure else 'http'}://{name}:{bound.getsockname()[1]}")
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, timeout_keep_alive=SLOW_CLIENT, timeout_graceful_shutdown=10,
            ssl_certfile=settings.tls_certificate, ssl_keyfile=settings.tls_key, server_header=False,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[bound])
