"""Tokens: random, shown once, kept as hashes.

A token has 256 bits of randomness, so a plain hash is enough: there is nothing to guess from a list of words.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets


def new_token(kind: str) -> str:
    """A token whose beginning says what it is for, so that a person who finds one knows what to revoke."""
    return f"embrace_{kind}_{secrets.token_urlsafe(32)}"


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def matches(token: str, known_hash: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(token_hash(token), known_hash)


def new_id() -> str:
    return secrets.token_hex(8)
