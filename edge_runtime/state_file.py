"""What a device keeps: named vectors and a few words, in one safetensors file, replaced at once or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_runtime.files import disk_errors, replacing
from federation.errors import InputError
from federation.space import Vector

MOST_HEADER_BYTES = 16 << 20  # a round of history takes about two kilobytes


def save_state(path: Path, vectors: Mapping[str, Vector], about: Mapping[str, str], *, durable: bool = True) -> None:
    """Replace the file: after a crash there is the old one or the new one, whole (if `durable`).

    The vectors go to the file as they lie in memory; no copy is made.
    """
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, vector in vectors.items():
        entries[name] = {"dtype": "F32", "shape": [vector.size], "data_offsets": [end, end := end + 4 * vector.size]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:  # it could not be read again
        raise InputError(f"cannot keep {path}: its description has more than {MOST_HEADER_BYTES >> 20} MiB")
    no_room = f"no room to keep {path}; what was there before is unchanged"
    with disk_errors(no_room=no_room, otherwise=f"cannot write {path}"), replacing(path, durable=durable) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for vector in vectors.values():
            file.write(np.ascontiguousarray(vector, "<f4").data)


def load_state(path: Path) -> tuple[dict[str, Vector], dict[str, str]]:
    """The vectors, mapped and not yet read, and the words."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
                raise ValueError("no header")
            entries = json.loads(file.read(length))
            about = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
            vectors: dict[str, Vector] = {}
            for name, entry in entries.items():
                start, stop = map(int, entry["data_offsets"])
                if entry["dtype"] != "F32" or not 0 <= start <= stop <= size - 8 - length or (stop - start) % 4:
                    raise ValueError(f"{name} does not lie in the file")
                shape = ((stop - start) // 4,)
                # Mapped by the open file, not by its name, which may mean a newer file by now.
                vectors[name] = (
                    np.memmap(file, np.dtype("<f4"), "r", offset=8 + length + start, shape=shape)
                    if stop > start
                    else np.zeros(0, np.float32)
                )
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is no saved state: {error}; remove it to begin anew") from None
    return vectors, about
