"""Who made a bundle: an Ed25519 signature over the sha256 of its manifest, which names every other file by its own.

`signature.json` lies beside the manifest and is no part of it: the digest of a bundle is the same with it and without.

    {"key": "ed25519:…", "signature": "…"}      base64url without padding

What is signed is the text `embrace bundle\\nSHA256\\n`, with the digest in hexadecimal digits.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from federation.ed25519 import KEY_BYTES, SIGNATURE_BYTES, public_key, sign, verify
from federation.errors import BundleError, InputError

SIGNATURE_NAME = "signature.json"
MAX_SIGNATURE_BYTES = 4096
PREFIX = "ed25519:"
# PKCS #8 (RFC 8410): a private key in DER is these bytes and the secret.
_DER = bytes.fromhex("302e020100300506032b657004220420")
_BEGIN, _END = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"


@dataclass(frozen=True)
class SigningKey:
    """A private key. Its text form is PEM, as openssl writes it."""

    secret: bytes

    @property
    def public(self) -> str:
        """The public key as people pass it on."""
        return PREFIX + _encode(public_key(self.secret))

    def sign(self, digest: str) -> str:
        """Sign the bundle with this digest; return the content of its `signature.json`."""
        made = sign(self.secret, _message(digest))
        return json.dumps({"key": self.public, "signature": _encode(made)}) + "\n"

    def to_pem(self) -> str:
        return f"{_BEGIN}\n{base64.b64encode(_DER + self.secret).decode()}\n{_END}\n"

    @classmethod
    def from_pem(cls, text: str) -> SigningKey:
        """Read a key that `to_pem` or openssl wrote."""
        _, begin, rest = text.partition(_BEGIN)
        try:
            der = base64.b64decode("".join(rest.partition(_END)[0].split()), validate=True)
        except (binascii.Error, ValueError):
            der = b""
        if not begin or len(der) != len(_DER) + KEY_BYTES or not der.startswith(_DER):
            raise InputError(
                "this is no private Ed25519 key (PEM, not encrypted): make one with 'embrace key new FILE'"
            )
        return cls(der[len(_DER) :])


def check_public(text: str) -> str:
    """Return a public key as it was given, if it is one."""
    _public_bytes(text)
    return text


def signer_of(content: bytes, digest: str) -> str:
    """Return the public key that signed a bundle; BundleError unless the signature is right."""
    try:
        data: dict[str, str] = json.loads(content) if len(content) <= MAX_SIGNATURE_BYTES else {}
        key, made = data["key"], _decode(data["signature"], SIGNATURE_BYTES)
        public = _public_bytes(key)
    except (ValueError, TypeError, KeyError, RecursionError, InputError):
        raise BundleError(f"{SIGNATURE_NAME} is no signature: expected a key and a signature; sign again") from None
    if not verify(public, _message(digest), made):
        raise BundleError(f"{SIGNATURE_NAME} is not a signature of this bundle by {key}; sign it again")
    return str(key)


def _message(digest: str) -> bytes:
    return f"embrace bundle\n{digest}\n".encode()


def _public_bytes(text: str) -> bytes:
    if isinstance(text, str) and text.startswith(PREFIX):
        try:
            return _decode(text.removeprefix(PREFIX), KEY_BYTES)
        except ValueError:
            pass
    raise InputError(
        f"{str(text)[:80]!r} is no public key: expected {PREFIX} and 43 letters, as 'embrace key' shows it"
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str, size: int) -> bytes:
    """Decode base64url; ValueError unless this is the one way to write so many bytes."""
    found = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(found) != size or _encode(found) != text:
        raise ValueError(text)
    return found
