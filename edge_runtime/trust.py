"""Decide whose bundles a device trains: those of given keys, or of the key that it met first.

Without keys the signer of the first bundle of a coordinator is remembered (`trust.json` in the work folder), as ssh
does with hosts. From then on another signer, or none, is refused. A coordinator whose first bundle has no signature
may bring one later: that is remembered, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from edge_runtime.files import replacing
from edge_runtime.logs import get_logger
from federation.errors import BundleError, InputError, Untrusted
from federation.signature import signer_of

log = get_logger("embrace.trust")
FILE_NAME = "trust.json"
UNSIGNED = "unsigned"


class Trust:
    """What one device trusts of one coordinator."""

    def __init__(self, server: str, work: Path, keys: Collection[str] = ()) -> None:
        self._server = server.rstrip("/")
        self._file = work / FILE_NAME
        self._keys = frozenset(keys)

    def check(self, digest: str, signature: bytes | None) -> None:
        """Refuse a bundle unless the right key signed it; remember the first key."""
        try:
            signer = UNSIGNED if signature is None else signer_of(signature, digest)
        except BundleError as error:
            raise Untrusted(f"the bundle is refused: {error}") from None
        if self._keys:
            if signer not in self._keys:
                raise Untrusted(f"the bundle is refused: it is {_words(signer)}, and --trust names other keys only")
            return
        known = self._known()
        pinned = known.get(self._server)
        if pinned in (None, UNSIGNED) and pinned != signer:
            log.info("bundles of %s are %s from now on", self._server, _words(signer))
            with replacing(self._file, mode=0o600) as draft:
                draft.write(json.dumps({**known, self._server: signer}).encode())
        elif pinned != signer:
            raise Untrusted(
                f"the bundle is refused: it is {_words(signer)}, and earlier ones of {self._server} were "
                f"{_words(str(pinned))}; if that is right, start the agent with --trust KEY or remove {self._file}"
            )

    def _known(self) -> dict[str, str]:
        try:
            known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        except (ValueError, OSError):
            known = None
        if not isinstance(known, dict):
            raise InputError(f"{self._file} is damaged: expected keys as JSON; remove it to trust anew")
        return known


def _words(signer: str) -> str:
    return "not signed" if signer == UNSIGNED else f"signed by {signer}"
