"""Make a zip file while it is sent: nothing of it is ever on the disk, and little of it in memory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

PIECE = 1 << 18


class _Sink(io.RawIOBase):
    """Keep what was written until it is taken."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self._pieces.append(piece)
        return len(piece)

    def take(self) -> bytes:
        taken, self._pieces = b"".join(self._pieces), []
        return taken


def zipped(files: Sequence[tuple[str, BinaryIO | Path]]) -> Iterator[bytes]:
    """Yield a zip file of these, uncompressed: weights hardly get smaller. What is open is closed."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in files:
            opened = content.open("rb") if isinstance(content, Path) else content
            with opened as source, archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                while piece := source.read(PIECE):
                    entry.write(piece)
                    yield sink.take()
    yield sink.take()
