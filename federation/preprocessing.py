"""How stored values become inputs of a model: (value × scale − mean) / std, wherever it trains, is scored or runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import FieldError

BYTES_SCALE = 1 / 255  # bytes are brightness from 0 to 255; a model of floats takes 0 to 1
_LEAST, _MOST = 1e-12, 1e12


@dataclass(frozen=True)
class Preprocessing:
    """Numbers that travel with the model. Without any of them values stay as they are, and bytes become 0 to 1."""

    scale: float | None = None  # None: bytes are divided by 255, other numbers stay
    mean: tuple[float, ...] = ()  # one for all, or one for each place of the first axis: a channel, a feature
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scale is not None and not _LEAST <= self.scale <= _MOST:
            raise FieldError("scale", f"expected a number above 0, got {self.scale}")
        if not all(math.isfinite(value) and abs(value) <= _MOST for value in self.mean):
            raise FieldError("mean", f"expected finite numbers, got {list(self.mean)}")
        if not all(_LEAST <= value <= _MOST for value in self.std):
            raise FieldError("std", f"expected numbers above 0, got {list(self.std)}")

    def check(self, shape: tuple[int, ...], dtype: str) -> None:
        """Refuse what does not fit the input of a model."""
        if not dtype.startswith("float"):
            raise FieldError((), f"the model takes {dtype}, which is not scaled; expected none")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) > 1 and (not shape or len(values) != shape[0]):
                each = f" or {shape[0]}, one for each place of the first axis" if shape else ""
                raise FieldError(name, f"expected one number{each}, got {len(values)}")

    def factor(self, stored: np.dtype[Any]) -> float:
        """Return what stored values are multiplied by."""
        if self.scale is not None:
            return self.scale
        return BYTES_SCALE if stored == np.uint8 else 1.0

    def normalise(self, values: NDArray[Any]) -> NDArray[Any]:
        """Subtract the mean and divide by the deviation, in new memory; the first axis counts samples."""
        along = (-1, *[1] * (values.ndim - 2))
        for numbers, apply in ((self.mean, np.subtract), (self.std, np.divide)):
            if numbers:
                values = apply(values, np.array(numbers, values.dtype).reshape(along))
        return values

    def describe(self) -> str:
        """Describe it for people: × 0.00392, − 0.485 0.456 0.406, ÷ 0.229 0.224 0.225."""
        parts = [] if self.scale is None else [f"× {self.scale:.6g}"]
        for sign, numbers in (("−", self.mean), ("÷", self.std)):
            parts += [f"{sign} {' '.join(f'{value:g}' for value in numbers)}"] if numbers else []
        return ", ".join(parts)


PLAIN = Preprocessing()  # of a bundle that says nothing
