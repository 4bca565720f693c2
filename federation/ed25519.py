"""Ed25519 signatures (RFC 8032, section 5.1), in Python's own integers.

A device verifies public keys and public bytes: there is no secret that the time of it could tell, and no package to
install on a small board. Signing is done by a person at an export, not by a service that strangers can time; a key that
needs more care signs with openssl (docs/guides/signing.md), which gives the same bytes.
"""

from __future__ import annotations

import hashlib

KEY_BYTES, SIGNATURE_BYTES = 32, 64
_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)  # of -1

Point = tuple[int, int, int, int]  # extended coordinates X, Y, Z, T with x = X/Z, y = Y/Z, x·y = T/Z


def public_key(secret: bytes) -> bytes:
    """Derive the public key of 32 secret bytes."""
    return _compress(_times(_scalar(secret)[0], _BASE))


def sign(secret: bytes, message: bytes) -> bytes:
    """Sign a message; the same key and message always give the same signature."""
    scalar, prefix = _scalar(secret)
    own = _compress(_times(scalar, _BASE))
    nonce = _hash(prefix, message)
    point = _compress(_times(nonce, _BASE))
    answer = (nonce + _hash(point, own, message) * scalar) % _ORDER
    return point + answer.to_bytes(32, "little")


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether a signature of a message was made with the secret of a public key."""
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    owner, point = _decompress(public), _decompress(signature[:32])
    answer = int.from_bytes(signature[32:], "little")
    if owner is None or point is None or answer >= _ORDER or _is_small(owner):
        return False
    challenge = _hash(signature[:32], public, message)
    return _same(_times(answer, _BASE), _add(point, _times(challenge, owner)))


def _scalar(secret: bytes) -> tuple[int, bytes]:
    if len(secret) != KEY_BYTES:
        raise ValueError(f"expected {KEY_BYTES} secret bytes, got {len(secret)}")
    digest = hashlib.sha512(secret).digest()
    number = int.from_bytes(digest[:32], "little")
    return number & ((1 << 254) - 8) | 1 << 254, digest[32:]


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _add(a: Point, b: Point) -> Point:
    first = (a[1] - a[0]) * (b[1] - b[0]) % _P
    second = (a[1] + a[0]) * (b[1] + b[0]) % _P
    third = 2 * a[3] * b[3] * _D % _P
    fourth = 2 * a[2] * b[2] % _P
    e, f, g, h = second - first, fourth - third, fourth + third, second + first
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(number: int, point: Point) -> Point:
    found: Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            found = _add(found, point)
        point = _add(point, point)
        number >>= 1
    return found


def _same(a: Point, b: Point) -> bool:
    return (a[0] * b[2] - b[0] * a[2]) % _P == 0 and (a[1] * b[2] - b[1] * a[2]) % _P == 0


def _is_small(point: Point) -> bool:
    """Whether a point has one of the eight orders for which signatures prove nothing."""
    return _same(_times(8, point), (0, 1, 1, 0))


def _compress(point: Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _decompress(data: bytes) -> Point | None:
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    x = _P - x if x & 1 != sign else x
    return x, y, 1, x * y % _P


def _base() -> Point:
    found = _decompress((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))
    assert found is not None
    return found


_BASE = _base()
