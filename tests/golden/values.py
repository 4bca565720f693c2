"""Numbers that Python and TypeScript make alike, and how arrays stand in the files."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.space import Vector


def pattern(size: int, salt: int, scale: float = 1.0) -> Vector:
    """Numbers between -scale/2 and scale/2 in no visible order; whole numbers and one division, rounded once."""
    numbers = (np.arange(size, dtype=np.float64) * 7919 + salt * 104729) % 2003
    return ((numbers / 2003 - 0.5) * scale).astype(np.float32)


def base64_of(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def floats(text: str) -> Vector:
    return np.frombuffer(base64.b64decode(text), np.float32)


def sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
