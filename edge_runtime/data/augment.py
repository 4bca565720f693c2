"""Random changes of images during training: shifted (pad and crop) and mirrored.

What happens to a sample depends on the seed, the epoch and its number alone, not on the batch that it happens to be
in, so that devices, engines and batch sizes can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.prng import below, sample_bits, shuffled
from federation.errors import InputError

__all__ = ["Augmentation", "parse_augmentation", "shuffled"]

_TOP, _LEFT, _FLIP = range(3)  # the draws of one sample


@dataclass(frozen=True)
class Augmentation:
    """What may happen to an image; without arguments: nothing."""

    crop: int = 0  # pad by so many zero pixels on every side, crop back at a random place
    flip: bool = False  # mirror left and right with probability 1/2

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise InputError(f"augmentation crop={self.crop}: expected a number of pixels, 0 or more")

    def __bool__(self) -> bool:
        return self.crop > 0 or self.flip

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse samples of a shape that this cannot be applied to."""
        if not self:
            return
        if len(shape) != 3:
            said = "×".join(map(str, shape)) or "single numbers"
            raise InputError(f"augmentation is for images of shape C×H×W, the model takes {said}")
        if self.crop >= min(shape[1:]):
            raise InputError(f"augmentation crop={self.crop} can push an image of {shape[1]}×{shape[2]} out of sight")

    def apply(self, batch: NDArray[Any], indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[Any]:
        """Change every sample of a batch (N×C×H×W, floats) in its own way; the argument stays as it is."""
        if not self:
            return batch
        self.check(batch.shape[1:])
        if batch.dtype.kind != "f":
            raise InputError(f"augmentation is for images of floats, the batch has {batch.dtype}")
        if len(indices) != len(batch):
            raise InputError(f"augmentation of {len(batch)} samples got {len(indices)} numbers of samples")
        if self.crop:
            batch = self._cropped(batch, indices, seed, epoch)
        if self.flip:
            mirrored = sample_bits(seed, epoch, indices, _FLIP) >> np.uint64(63) == 1
            batch = np.where(mirrored[:, None, None, None], batch[..., ::-1], batch)
        return batch

    def _cropped(self, batch: NDArray[Any], indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[Any]:
        count, channels, height, width = batch.shape
        pad = self.crop
        padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), batch.dtype)
        padded[:, :, pad : pad + height, pad : pad + width] = batch
        top = below(sample_bits(seed, epoch, indices, _TOP), 2 * pad + 1)
        left = below(sample_bits(seed, epoch, indices, _LEFT), 2 * pad + 1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        chosen: NDArray[Any] = np.ascontiguousarray(windows[np.arange(count), :, top, left])
        return chosen


def parse_augmentation(text: str) -> Augmentation:
    """Parse what a command line says: "crop=4,flip"; nothing or "none" is none."""
    found: dict[str, Any] = {}
    for part in [] if text.strip() in ("", "none") else text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in ("crop", "flip"):
            raise InputError(f"augmentation {text!r}: {name!r} is unknown; expected crop=PIXELS, flip or both")
        if name in found:
            raise InputError(f"augmentation {text!r}: {name} is given twice")
        if name == "flip" and equals:
            raise InputError(f"augmentation {text!r}: flip takes no value")
        if name == "crop" and not (value.isascii() and value.isdigit() and len(value) < 7):
            raise InputError(f"augmentation {text!r}: crop needs a number of pixels, for example crop=4")
        found[name] = True if name == "flip" else int(value)
    return Augmentation(**found)
