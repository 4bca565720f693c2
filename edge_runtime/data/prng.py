"""Random choices that are the same on every platform and with every version of numpy.

Numpy promises that for the raw bits of its bit generators, not for what `Generator` makes of them. So an order is the
sorting of Philox's bits, and what happens to one sample is a hash of numbers that name it (SplitMix64: Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def shuffled(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Shuffle the numbers from 0 to n - 1; the order depends on the seed and the epoch."""
    key = np.array([int(seed) & _MASK, int(epoch) & _MASK], np.uint64)
    bits = np.atleast_1d(np.random.Philox(key=key).random_raw(n))
    return np.argsort(bits, kind="stable").astype(np.int64)


def sample_bits(seed: int, epoch: int, indices: NDArray[np.int64], draw: int) -> Bits:
    """Draw 64 random bits for each sample: the hash of (seed, epoch, sample, draw), whatever else is in the batch."""
    prefix = np.uint64(0)
    for number in (seed, epoch, draw):
        prefix = _mix(np.array([(int(prefix) + int(number) + _GOLDEN) & _MASK], np.uint64))[0]
    numbers = np.asarray(indices, np.int64).astype(np.uint64)
    return _mix((numbers + np.uint64(1)) * np.uint64(_GOLDEN) + prefix)


def below(bits: Bits, limit: int) -> NDArray[np.int64]:
    """Turn random bits into equally likely numbers from 0 to limit - 1; `limit` is far below 2^32."""
    numbers: NDArray[np.int64] = (((bits >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)
    return numbers


def _mix(z: Bits) -> Bits:
    """Apply SplitMix64's finaliser; arithmetic of arrays wraps around without a warning."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
