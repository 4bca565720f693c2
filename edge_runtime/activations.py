"""Stored activations: what the frozen layers made of the local data, in memory or on disk.

On disk the file has no name: it is deleted as soon as it is open, so that no kill and no crash leaves the user's data
behind. Its whole size is reserved before anything is written, because a mapped file that outgrows the disk does not
raise an error but ends the process.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_runtime.files import disk_errors
from federation.errors import DiskFull, OutOfMemory
from federation.manifest import TensorSpec

StoredType = Literal["float32", "float16"]


class ActivationStore:
    """Rows of one shape, written in order, read in any. float16 halves the bytes; rows come back as float32."""

    def __init__(
        self,
        count: int,
        row: TensorSpec,
        *,
        stored_as: StoredType = "float32",
        folder: Path | None = None,
        limit: int | None = None,
    ) -> None:
        """`folder`: keep the rows in a nameless file there; None: in memory. `limit`: the most bytes allowed."""
        dtype = np.dtype(stored_as) if row.dtype == "float32" else np.dtype(row.dtype)
        self.row_dtype = np.dtype(row.dtype)
        self.nbytes = count * math.prod(row.shape) * dtype.itemsize
        self.on_disk = folder is not None
        if limit is not None and self.nbytes > limit:
            raise (DiskFull if folder else OutOfMemory)(
                f"{count} activations of {'×'.join(map(str, row.shape))} take {self.nbytes:,} bytes, the limit is "
                f"{limit:,}; use less data{'' if stored_as == 'float16' else ' or --activations float16'}"
            )
        self._rows: NDArray[Any] = (
            _reserve(folder, (count, *row.shape), dtype) if folder else np.empty((count, *row.shape), dtype)
        )

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, start: int, batch: NDArray[Any]) -> None:
        """Store rows from number `start` on."""
        if self._rows.dtype == np.float16:
            batch = np.clip(batch, -65504, 65504)  # the largest float16: infinity would be worse than the edge
        self._rows[start : start + len(batch)] = batch

    def read(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Read some rows into memory that the caller has."""
        if self._rows.dtype == out.dtype:
            np.take(self._rows, indices, axis=0, out=out, mode="clip")  # any other mode makes a copy first
        else:
            for place, index in enumerate(indices):  # converts row by row: no second batch in memory
                out[place] = self._rows[index]

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read consecutive rows as the next layer takes them."""
        return np.asarray(self._rows[start:stop], self.row_dtype)

    def close(self) -> None:
        """Give memory or disk back."""
        self._rows = np.empty((0, *self._rows.shape[1:]), self._rows.dtype)


def _reserve(folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    no_room = f"no room for {size:,} bytes of activations in {folder}; free some or use less data"
    with disk_errors(no_room=no_room, otherwise=f"cannot store activations in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="activations-") as file:
            _allocate(file, size)
            return np.memmap(file, dtype, "r+", shape=shape)


def _allocate(file: IO[bytes], size: int) -> None:
    """Reserve blocks; where the system (macOS, Windows) or the file system (a phone's card) cannot, write zeros."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    zeros = bytes(1 << 20)
    for start in range(0, size, len(zeros)):
        file.write(zeros[: min(len(zeros), size - start)])
    file.flush()
