"""The address of a coordinator and the token for it, as people type them; checked before anything is sent."""

from __future__ import annotations

from urllib.parse import urlsplit

from federation.errors import InputError


def check_address(server: str) -> str:
    """The same text, if it can be the address of a server."""
    try:
        parts = urlsplit(server)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        good = False
    if not good or not server.isascii() or not server.isprintable() or " " in server:
        raise InputError(f"{server!r} is no address of a server: expected something like http://HOST:8470")
    return server


def bearer(token: str) -> dict[str, str]:
    """The header with a token."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError("the token cannot be right: expected something like embrace_…, without blanks or line ends")
    return {"Authorization": f"Bearer {token}"}
