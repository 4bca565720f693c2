"""Token ids of many texts, in a temporary file that is mapped: made by a process that ends with its tokenizer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from edge_runtime.data.input_adapter import Array
from edge_runtime.data.tokenise import HEADER, REFUSED
from federation.errors import DataError, MissingPackage
from federation.manifest import MAX_TOKENIZER_BYTES

PATIENCE = 120.0  # seconds without any progress
_MEMORY, _MEMORY_PER_BYTE = 192 << 20, 32  # that a tokenizer may take: in any case, and for each byte of its file
_LOOK = 0.2


@dataclass(frozen=True)
class TokenSpace:
    """Where token ids are written, and how many bytes they may take where the system can bound that."""

    folder: Path | None = None  # None: the system's own for temporary files
    most: int | None = None


ANYWHERE = TokenSpace()


def check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer that cannot be used, before anything is read."""
    if importlib.util.find_spec("tokenizers") is None:
        raise MissingPackage("tokenizers", "text")
    if not path.is_file():
        raise DataError(f"no such file: {path}; expected a tokenizer.json")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise DataError(f"{path} has more than {MAX_TOKENIZER_BYTES >> 20} MiB; this is no tokenizer")


def write_ids(
    tokenizer: Path, texts: Iterable[tuple[str, bool]], dtype: Any, length: int | None, space: TokenSpace = ANYWHERE
) -> Array:
    """Make token ids of texts and map them: rows of `length` ids behind their number, or documents one after the other.

    A text that is not marked as an end goes on with the next one.
    """
    check_tokenizer(tokenizer)
    with tempfile.TemporaryFile(prefix="embrace-tokens-", dir=space.folder) as file:
        with _Tokenising(tokenizer, file, np.dtype(dtype), length, space.most) as process:
            for text, ends in texts:
                process.send(text, ends)
        size = file.seek(0, 2)
        ids = np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)
    return ids if length is None else ids.reshape(-1, 1 + length)


class _Tokenising:
    """The process, which is ended when it makes no progress."""

    def __init__(
        self, tokenizer: Path, file: IO[bytes], dtype: np.dtype[Any], length: int | None, most: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._moved = time.monotonic()
        self._over = threading.Event()
        self._late = False
        self._most = _MEMORY + _MEMORY_PER_BYTE * tokenizer.stat().st_size
        request = {"tokenizer": str(tokenizer.resolve()), "dtype": dtype.name, "length": length}
        request |= {"memory": self._most, "disk": most}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edge_runtime.data.tokenise", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        self._watch = threading.Thread(target=self._end_if_late, name="tokenizer", daemon=True)

    def __enter__(self) -> _Tokenising:
        self._watch.start()
        return self

    def send(self, text: str, ends: bool) -> None:
        """Send a text; a process that has ended says why at the end."""
        assert self._process.stdin is not None
        data = text.encode()
        try:
            self._process.stdin.write(HEADER.pack(len(data), ends) + data)
        except OSError:
            self._explain()
        self._moved = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if kind is not None:
            self._process.kill()
        try:
            _, said = self._process.communicate()
        finally:
            self._over.set()
            self._watch.join()
        if kind is None and self._process.returncode:
            self._explain(said)

    def _explain(self, said: bytes = b"") -> None:
        """Raise what the process died of."""
        said = said or self._process.communicate()[1]
        lines = said.decode(errors="replace").strip().splitlines()
        if self._late:
            why = f"it made no progress for {PATIENCE:.0f} s"
        elif self._process.returncode == REFUSED and lines:
            why = lines[-1]
        elif self._process.returncode < 0:
            why = f"it took more than the {self._most >> 20} MiB that a tokenizer of its size may"
        else:
            why = lines[-1] if lines else f"its process ended with exit code {self._process.returncode}"
        raise DataError(f"the tokenizer {self._tokenizer} failed: {why[:300]}")

    def _end_if_late(self) -> None:
        while not self._over.wait(_LOOK):
            if time.monotonic() - self._moved > PATIENCE:
                self._late = True
                self._process.kill()
                return
