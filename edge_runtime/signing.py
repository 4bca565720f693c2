"""Keys and signatures as files: make a key, sign a bundle, find out who signed one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from edge_runtime.bundle_files import file_ref
from edge_runtime.files import replacing
from federation.ed25519 import KEY_BYTES
from federation.errors import BundleError, InputError
from federation.manifest import MANIFEST_NAME
from federation.signature import MAX_SIGNATURE_BYTES, SIGNATURE_NAME, SigningKey, check_public, signer_of

_MOST_KEY = 4096  # bytes of a file


def new_key(path: Path) -> SigningKey:
    """Make a key: PATH for its owner alone, PATH.pub to pass on."""
    public = path.with_name(path.name + ".pub")
    if path.exists() or public.exists():
        raise InputError(f"{path} or {public} exists; choose another name: a key that is lost cannot be made again")
    key = SigningKey(secrets.token_bytes(KEY_BYTES))
    try:
        for file, text, mode in ((path, key.to_pem(), 0o600), (public, f"{key.public}\n", 0o644)):
            with replacing(file, mode=mode) as draft:
                draft.write(text.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return key


def read_key(path: Path) -> SigningKey:
    """Read a private key, which must be its owner's alone."""
    text = _read(path)
    if hasattr(os, "getuid") and path.stat().st_mode & 0o077:
        raise InputError(f"{path} can be read by other users of this machine: chmod 600 {path}")
    try:
        return SigningKey.from_pem(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_public(given: str) -> str:
    """Return a public key: the text itself, or the name of a file with it."""
    path = Path(given)
    is_file = not given.startswith("ed25519:") and path.is_file()
    return check_public(_read(path).strip() if is_file else given)


def sign_bundle(directory: Path, key: SigningKey) -> None:
    """Put a signature beside the manifest of a bundle."""
    digest = file_ref(directory, MANIFEST_NAME).sha256
    with replacing(directory / SIGNATURE_NAME) as draft:
        draft.write(key.sign(digest).encode())


def read_signer(directory: Path) -> str | None:
    """Return the key that signed a bundle, None if no key did; BundleError if its signature is wrong."""
    path = directory / SIGNATURE_NAME
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_SIGNATURE_BYTES:
        raise BundleError(f"{path} is larger than {MAX_SIGNATURE_BYTES} bytes; this is no signature of ours")
    try:
        return signer_of(path.read_bytes(), file_ref(directory, MANIFEST_NAME).sha256)
    except BundleError as error:
        raise BundleError(f"{directory}: {error}") from None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_KEY:
            raise InputError(f"{path} is no key: it has more than {_MOST_KEY} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the key {path}: {getattr(error, 'strerror', None) or error}") from None
