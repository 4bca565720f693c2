"""How a coordinator runs. Read once: `serve.toml` in its directory, then the environment, then the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from coordinator.connections import parse_networks
from coordinator.lan import EVERY_ADDRESS
from federation.decode import decode
from federation.errors import FieldError, InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "serve.toml"
PREFIX = "EMBRACE_"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
AUTO = "auto"
NO_URL = "none"  # in place of an address: devices do not reach the object storage
MOST_ORIGINS = 100
_ORIGIN = re.compile(r"https?://(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True)
class Settings:
    """Everything but the directory itself."""

    host: str = "127.0.0.1"
    port: int = 8470
    public_url: str | None = None  # under which devices reach it, if that is another: a proxy's, a container's host
    tls: str | None = None  # auto: a certificate for the private network, made and renewed in the directory
    tls_certificate: str | None = None
    tls_key: str | None = None
    insecure: bool = False  # serve other machines without TLS
    allow_origin: tuple[str, ...] = ()  # of pages elsewhere that may call this API
    proxy: str | None = None  # addresses or networks whose X-Forwarded-For is believed, with commas between
    database: str | None = None  # an SQLAlchemy URL; None: SQLite in the directory
    blobs: str | None = None  # s3://BUCKET/PREFIX, or the path of a folder that processes share; None: in the directory
    workers: int = 1  # that fold updates in this process, where processes share the database; 0: others do
    storage_url: str | None = None  # where devices reach the bucket's server, if that is elsewhere; none: nowhere
    admin_token_file: str | None = None  # with the administrator's token; None: made once, kept in the directory
    requests_per_second: float = 50.0  # of one device
    concurrent_requests: int = 1024  # that are answered at the same time
    waiting_requests: int = 8192  # ... that wait for a task or for events
    long_polls: int = 1000  # devices that wait for a task in a request; those of a larger fleet are told to come back
    check_ins_per_second: float = 100.0  # of the devices that were told to come back, all together
    longest_away: float = 900.0  # seconds that a device is told, unless the rate above takes more
    slow_client: float = 15.0  # seconds for the headers of a request, and for every KiB of its body
    evaluation_data: str | None = None  # a folder; jobs name what is in it: coordinator:NAME
    evaluation_bytes: int = 2 << 30  # of uploaded samples, at most
    evaluation_memory: int = 0  # bytes of the process that scores a version; 0: by the size of model and data
    evaluation_seconds: float = 3600.0  # ... and how long it may take
    keep_versions: int = 2  # of each job; its best one stays in any case
    keep_events: int = 100_000  # of each job; 0: all
    keep_days: float = 0.0  # older versions and events go; 0: none for its age
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise FieldError("port", f"expected a number from 0 to 65535, got {self.port}")
        if self.workers not in (0, 1):
            raise FieldError("workers", f"expected 0 or 1, got {self.workers}; more are started with embrace worker")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InputError("TLS needs both a certificate and a key: --tls-certificate FILE --tls-key FILE")
        if self.tls not in (None, AUTO):
            raise FieldError(
                "tls", f"expected auto, got {self.tls!r}; files are given with --tls-certificate and --tls-key"
            )
        if self.tls is not None and self.tls_certificate is not None:
            raise InputError("expected either --tls auto or --tls-certificate and --tls-key, got both")
        if is_exposed(self) and not self.insecure:
            raise InputError(
                f"{self.host} is visible to other machines, and without TLS the tokens can be read on the way and "
                "phones do not train: give --tls auto in a private network, --tls-certificate and --tls-key, or "
                "--insecure behind a proxy that has them"
            )
        if len(self.allow_origin) > MOST_ORIGINS:
            raise FieldError("allow_origin", f"expected at most {MOST_ORIGINS}, got {len(self.allow_origin)}")
        for number, origin in enumerate(self.allow_origin):
            _check_origin(("allow_origin", number), origin)
        if self.public_url is not None:
            _check_origin(("public_url",), self.public_url)
        if self.storage_url not in (None, NO_URL):
            _check_origin(("storage_url",), str(self.storage_url))
        try:
            if self.proxy is not None and not parse_networks(self.proxy):
                raise ValueError
        except ValueError:
            example = "10.0.0.2 or networks such as 10.0.0.0/8, with commas between"
            raise FieldError("proxy", f"expected addresses such as {example}, got {self.proxy!r}") from None
        for name in (
            "requests_per_second",
            "concurrent_requests",
            "waiting_requests",
            "long_polls",
            "check_ins_per_second",
            "longest_away",
            "slow_client",
            "evaluation_seconds",
        ):
            if not 0 < getattr(self, name) <= 1e9:
                raise FieldError(name, f"expected a number above 0, got {getattr(self, name)}")
        for name, least in (("evaluation_bytes", 1), ("evaluation_memory", 0)):
            if not least <= getattr(self, name) <= 1 << 50:
                raise FieldError(name, f"expected a number of bytes from {least}, got {getattr(self, name)}")
        for name, least in (("keep_versions", 2), ("keep_events", 0), ("keep_days", 0)):
            if not least <= getattr(self, name) <= 1e9:
                raise FieldError(name, f"expected a number from {least}, got {getattr(self, name)}")
        if self.evaluation_data is not None and not Path(self.evaluation_data).is_dir():
            raise FieldError("evaluation_data", f"expected a folder, there is none at {self.evaluation_data!r}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise FieldError("log_level", f"expected debug, info, warning or error, got {self.log_level!r}")


def load_settings(directory: Path, environment: Mapping[str, str], given: Mapping[str, Any]) -> Settings:
    """Read the settings; later sources win: file, environment (EMBRACE_PORT=...), options that were given."""
    file = directory / FILE_NAME
    written: dict[str, Any] = {}
    if file.is_file():
        try:
            written = tomllib.loads(file.read_text("utf-8"))
        except ValueError as error:  # no TOML, no UTF-8
            raise InputError(f"{file} is no TOML: {error}") from None
    told = {
        field.name: _typed(name, str(field.type), environment[name])
        for field in fields(Settings)
        if (name := PREFIX + field.name.upper()) in environment
    } | {name: value for name, value in given.items() if value is not None}
    everything = {**written, **told}
    if everything.get("tls") == AUTO:  # which is for other machines
        everything = {"host": EVERY_ADDRESS[0], **everything}
    try:
        return decode(Settings, everything, defaults=True)
    except FieldError as error:
        from_file = any(key in written and key not in told for key in error.path[:1])
        raise InputError(f"{file}: {error}") if from_file else error from None


_READERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a number"),
    "float": (float, "a number"),
    "tuple[str, ...]": (lambda text: tuple(text.split()), "words"),
    "bool": (lambda text: {"0": False, "1": True, "false": False, "true": True}[text.lower()], "true or false"),
}


def _typed(name: str, kind: str, text: str) -> Any:
    read, expected = _READERS.get(kind, (str, "text"))
    try:
        return read(text)
    except (KeyError, ValueError):
        raise InputError(f"{name}: expected {expected}, got {text!r}") from None


def _check_origin(path: tuple[str | int, ...], origin: str) -> None:
    """Refuse what is not, letter by letter, what a browser says of a page: another would never be answered."""
    usual = _USUAL_PORTS.get(origin.partition(":")[0], "")
    if _ORIGIN.fullmatch(origin) is None or (usual and origin.endswith(usual)):
        raise FieldError(
            path,
            "expected one origin as browsers write it, such as https://lab.example or http://192.168.1.7:8080 (lower "
            f"case, no path, no usual port, no *), got {origin[:80]!r}",
        )


def is_exposed(settings: Settings) -> bool:
    """Whether other machines can reach it, and those between them and it can read along."""
    return settings.host not in LOOPBACK and settings.tls is None and settings.tls_certificate is None


def without_secrets(settings: Settings) -> Settings:
    """For logs: a database URL may have a password in it."""
    return replace(settings, database="(given)" if settings.database else None)
