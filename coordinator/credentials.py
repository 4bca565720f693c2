"""Tokens: random, shown once, kept as hashes.

A token has 256 bits of randomness, so a plain hash is enough: there is nothing to guess from a list of words.
The administrator may give a token of their own in a file; it is long, and plain enough for a header.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Final

from federation.errors import InputError

FEWEST, MOST = 32, 512  # characters of a token that is given
_GIVEN: Final = re.compile(rf"[A-Za-z0-9._~+/=-]{{{FEWEST},{MOST}}}")
_OTHERS: Final = ("embrace_enrol_", "embrace_device_", "embrace_session_")  # which others have seen


def new_token(kind: str) -> str:
    """A token whose beginning says what it is for, so that a person who finds one knows what to revoke."""
    return f"embrace_{kind}_{secrets.token_urlsafe(32)}"


def read_token(file: Path) -> str:
    """Read the administrator's token from a file; no message repeats what is in it."""
    try:
        with file.open("rb") as opened:
            token = opened.read(2 * MOST).decode("ascii", "replace").strip()
    except OSError as error:
        raise InputError(f"admin_token_file: cannot read {file}: {error.strerror}") from None
    if _GIVEN.fullmatch(token) is None:
        raise InputError(
            f"admin_token_file: expected one token of {FEWEST} to {MOST} letters, digits and ._~+/=- in {file}, got "
            f"{len(token)} characters or others; make one: openssl rand -hex 32"
        )
    if token.startswith(_OTHERS):
        raise InputError(f"admin_token_file: {file} has a token of devices or pages; make one: openssl rand -hex 32")
    return token


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def matches(token: str, known_hash: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(token_hash(token), known_hash)


def new_id() -> str:
    return secrets.token_hex(8)
