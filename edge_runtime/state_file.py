"""What a device keeps: named vectors and a few words, in one safetensors file, replaced at once or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_runtime.files import disk_errors, map_part, replacing
from federation.errors import InputError
from federation.safetensors_codec import PREFIX, SafetensorsError, decode_header, encode_header, header_length
from federation.space import Vector

ALIGNMENT = 8
MOST_HEADER_BYTES = 16 << 20  # a round of history takes about two kilobytes


def save_state(path: Path, vectors: Mapping[str, Vector], about: Mapping[str, str], *, durable: bool = True) -> None:
    """Replace the file: after a crash there is the old one or the new one, whole (if `durable`).

    The vectors go to the file as they lie in memory; no copy is made.
    """
    header = encode_header(((name, (vector.size,)) for name, vector in vectors.items()), ALIGNMENT, about)
    if len(header) > PREFIX + MOST_HEADER_BYTES:  # it could not be read again
        raise InputError(f"cannot keep {path}: its description has more than {MOST_HEADER_BYTES >> 20} MiB")
    no_room = f"no room to keep {path}; what was there before is unchanged"
    with disk_errors(no_room=no_room, otherwise=f"cannot write {path}"), replacing(path, durable=durable) as file:
        file.write(header)
        for vector in vectors.values():
            file.write(np.ascontiguousarray(vector, "<f4").data)


def load_state(path: Path) -> tuple[dict[str, Vector], dict[str, str]]:
    """Map the vectors, which are not yet read, and read the words."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(PREFIX), min(MOST_HEADER_BYTES, size - PREFIX))
            header, start = decode_header(file.read(length)), PREFIX + length
            if size != start + header.size:
                raise SafetensorsError(f"{size - start} bytes of data; expected {header.size}")
            # Mapped by the open file, not by its name, which may mean a newer file by now.
            vectors = {
                name: map_part(file, start + offset, math.prod(header.shapes[name]))
                for name, offset in header.offsets.items()
            }
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except SafetensorsError as error:
        raise InputError(f"{path} is no saved state: {error}; remove it to begin anew") from None
    return vectors, dict(header.notes)
