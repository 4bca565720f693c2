"""Width reduction (HeteroFL, FjORD): a narrow model keeps the first channels of every layer."""

from __future__ import annotations

import math
from fractions import Fraction


def channels(count: int, ratio: float) -> int:
    """How many of `count` channels or units are kept: rounded down, at least one; a ratio of 1 keeps them all.

    Rounding down is what gives the sizes EmbracingFL tabulates for 45 % and 20 % of ResNet20 (HeteroFL's own code
    rounds up). The ratio is meant as it is written: 0.29 of 100 is 29, not the 28 of binary arithmetic.
    """
    return max(1, math.floor(count * Fraction(str(ratio))))
