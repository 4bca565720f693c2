"""Connect to a coordinator, and say in one line why that cannot work.

A connection that breaks may work a moment later. A certificate that is not trusted, or TLS on one side only, stays
wrong until an administrator mends it: `mend` finds these, so that no caller tries again for minutes.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx

from federation.address import bearer, check_address
from federation.errors import EmbraceError, InputError

_LATER = 5.0  # seconds for a server to say whether it speaks TLS
# OpenSSL's numbers (x509_vfy.h) of what may be wrong with a certificate.
_NOT_YET, _EXPIRED = 9, 10
_OTHER_HOST = (62, 64)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL")


class Unreachable(EmbraceError):
    """The coordinator did not answer for longer than was allowed."""

    status = 503


class WrongConnection(Unreachable):
    """The coordinator cannot be reached this way: another attempt meets the same certificate or protocol."""


def open_http(
    server: str,
    token: str,
    *,
    certificate: str | Path | None = None,
    timeout: httpx.Timeout,
    transport: httpx.BaseTransport | None = None,
) -> httpx.Client:
    """Open a client that sends the token to this server only: it follows no redirect.

    `certificate` is a PEM file of the authority to trust, in place of the system's.
    """
    base, headers = check_address(server), bearer(token)
    try:
        trusted = True if certificate is None else ssl.create_default_context(cafile=str(certificate))
        return httpx.Client(
            base_url=base,
            headers=headers,
            transport=transport,
            timeout=timeout,
            verify=trusted,
            follow_redirects=False,
        )
    except httpx.InvalidURL as error:
        raise InputError(f"{server!r} is no address of a server: {error}") from None
    except OSError as error:  # ssl.SSLError is one: no such file, or no certificate in it
        raise InputError(f"cannot use the certificate {certificate}: {error.strerror or error}") from None


def mend(error: httpx.TransportError, base: httpx.URL, *, probe: bool = True) -> str:
    """Say what has to be mended before another attempt can succeed; empty if it may succeed as it is.

    `probe`: ask a server that hangs up on plain http whether it speaks TLS.
    """
    found = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)
    if isinstance(found, ssl.SSLCertVerificationError):
        return f"{base}: {_untrusted(found, base.host)}"
    if found is not None and found.reason in _NO_TLS:
        return f"{base} does not speak TLS: give --server http://… or start the coordinator with --tls-certificate"
    hung_up = isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
    if probe and base.scheme == "http" and hung_up and _speaks_tls(base):
        return f"{base} speaks TLS: give --server https://…, and --certificate if its authority is your own"
    return ""


def redirect(answer: httpx.Response) -> str:
    """Say where a redirect leads; empty for any other answer. It is not followed: the token is for one server."""
    if not 300 <= answer.status_code < 400 or answer.status_code == 304:
        return ""
    target = answer.headers.get("location", "nowhere")[:200]
    where = target if target.isprintable() else repr(target)
    base = answer.url.copy_with(path="/", query=None)
    return f"{base} redirects to {where}; give the coordinator's own address with --server"


def _untrusted(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return "the certificate has expired: check this machine's clock, or renew the coordinator's certificate"
    if error.verify_code == _NOT_YET:
        return "the certificate is not valid yet: check this machine's clock, and the coordinator's certificate"
    if error.verify_code in _OTHER_HOST:
        return f"the certificate is for another host than {host}: give --server the name that is in the certificate"
    return (
        f"the certificate is not trusted ({error.verify_message}): "
        "give --certificate FILE, a PEM file of the authority that signed it"
    )


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def _speaks_tls(base: httpx.URL) -> bool:
    """Whether a handshake succeeds. Nothing is sent over it, so nothing is checked."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((base.host, base.port or 80), timeout=_LATER) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except OSError:
        return False
