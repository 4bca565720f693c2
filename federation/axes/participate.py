"""Who joins a round: all available devices, some of them, with or without replacement, the same ones for a window.

A draw is a sorting of hashes: numpy promises the bits of its generators, not what `Generator` makes of them, and a hash
of the device's own name does not depend on which others are there or in which order devices are listed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from federation.errors import FieldError, InputError

OnMissingQuorum = Literal["wait", "fail"]

_ROUNDING = 1e-9  # 0.29 · 100 is 28.999999999999996, and means 29


@dataclass(frozen=True)
class Slot:
    """One place of a cohort. Its number is the order of drawing, and the order in which updates are summed."""

    number: int
    device: str
    count: int = 1  # how many times the device was drawn, which is how many times its one update counts

    def __post_init__(self) -> None:
        if self.number < 0 or self.count < 1 or not self.device:
            raise InputError(f"slot: expected a number from 0, a device and a count from 1, got {self!r}")


@dataclass(frozen=True)
class Participation:
    """How many of the available devices join, and how long the others wait for them.

    By default every device joins, and a round ends when all have answered; or when half have, and the rest is late by
    the measure of those that came. A device that is merely slower than the others is not late, so that a low quorum
    costs no updates while devices are well. `quorum = 1.0` waits for every device, whatever happens.

    >>> [slot.device for slot in Participation(count=2).draw(["a", "b", "c", "d"], seed=1, round_number=0)]
    ['d', 'a']
    """

    fraction_train: float = 1.0  # of the available devices, rounded down, at least one
    count: int | None = None  # instead of a fraction; the round does not start before so many are there
    min_available: int = 1  # devices that must be there before a round starts
    replacement: bool = False  # a device may be drawn several times; its update then counts as many times
    window: int = 1  # rounds for which a cohort stays
    over_select: float = 0.0  # invite so much more than wanted; the first that are wanted count
    quorum: float | int = 0.5  # of the wanted: a float is a share, an integer a number
    deadline: float | None = None  # seconds after which a round with a quorum closes; None: when the rest is late
    on_missing_quorum: OnMissingQuorum = "wait"  # what happens without a quorum at the deadline
    balance: bool = True  # swap a device in where a layer would have no trainer; see cover.ensure_coverage
    lateness: float = 3.0  # times the usual duration of the round's tasks, after which a device is late
    grace: float = 0.5  # seconds that no device is late before, however quick the others are

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.count is not None and self.fraction_train != 1:
            raise FieldError("count", "expected either count or fraction_train, got both")
        if self.count is not None and _is_integer(self.quorum) and self.quorum > self.count:
            raise FieldError("quorum", f"expected at most the count of {self.count}, got {self.quorum}")
        if self.replacement and self.over_select:
            raise FieldError(
                "over_select",
                "expected 0 with replacement, where one update may count several times and "
                f"so the first that are wanted cannot be told; got {self.over_select}",
            )
        if self.on_missing_quorum not in ("wait", "fail"):
            raise FieldError("on_missing_quorum", f"expected wait or fail, got {self.on_missing_quorum!r}")
        if self.on_missing_quorum == "fail" and self.deadline is None:
            raise FieldError("on_missing_quorum", "'fail' needs a deadline, got none")

    def _check_numbers(self) -> None:
        for name, value in (("count", self.count), ("min_available", self.min_available), ("window", self.window)):
            if value is not None and (not _is_integer(value) or value < 1):
                raise FieldError(name, f"expected an integer of at least 1, got {value!r}")
        if not 0 < self.fraction_train <= 1:
            raise FieldError("fraction_train", f"expected a share in (0, 1], got {self.fraction_train!r}")
        if not 0 <= self.over_select < math.inf:
            raise FieldError("over_select", f"expected a share of 0 or more, got {self.over_select!r}")
        if isinstance(self.quorum, bool) or not (
            self.quorum >= 1 if _is_integer(self.quorum) else 0 < self.quorum <= 1
        ):
            raise FieldError("quorum", f"expected a share in (0, 1] or an integer of at least 1, got {self.quorum!r}")
        if not 1 <= self.lateness < math.inf:
            raise FieldError("lateness", f"expected a number of at least 1, got {self.lateness!r}")
        if not 0 < self.grace < math.inf:
            raise FieldError("grace", f"expected seconds above 0, got {self.grace!r}")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise FieldError("deadline", f"expected seconds above 0, got {self.deadline!r}")

    @property
    def needed(self) -> int:
        """How many devices must be available before a round starts."""
        return self.least if self.count is None or self.replacement else max(self.least, self.count)

    @property
    def least(self) -> int:
        """How many of them must be fit: a round begins without others that rest, but not without these."""
        if not _is_integer(self.quorum) or (self.count is not None and self.replacement):
            return self.min_available
        share = self.fraction_train if self.count is None else 1.0  # a share of fewer devices could never reach it
        return max(self.min_available, math.ceil(self.quorum / share - _ROUNDING))

    def wanted(self, available: int) -> int:
        """How many draws make a full round."""
        if self.count is not None:
            return self.count if self.replacement else min(self.count, available)
        return min(available, max(1, math.floor(self.fraction_train * available + _ROUNDING)))

    def invited(self, available: int) -> int:
        """How many draws are made: the wanted and the over-selected."""
        wanted = self.wanted(available)
        extra = math.ceil(min(self.over_select * wanted, available) - _ROUNDING)
        return wanted if self.replacement else min(available, wanted + extra)

    def quorum_of(self, wanted: int) -> int:
        """How many of the wanted draws must arrive."""
        return min(int(self.quorum), wanted) if _is_integer(self.quorum) else quorum_of_share(self.quorum, wanted)

    @property
    def share(self) -> float | None:
        """The quorum as a share, which follows the devices that are there; None for one that is waited for."""
        return None if _is_integer(self.quorum) or self.quorum == 1 or self.deadline is not None else self.quorum

    def order(self, devices: Iterable[str], seed: int, round_number: int) -> list[str]:
        """All devices in a random order that is the same for all rounds of a window.

        If a device goes, the others keep their order: the one that comes next takes its place.
        """
        window = self._window_of(round_number)
        return sorted(set(devices), key=lambda device: (_hash(seed, window, f"device {device}"), device))

    def draw(self, devices: Iterable[str], seed: int, round_number: int, away: int = 0) -> list[Slot]:
        """The cohort of a round, uniform over the devices; the same for the same arguments, here and everywhere.

        So many more are `away`: a share of the devices counts them, and they are not drawn.
        """
        listed = sorted(set(devices))
        if not listed:
            return []
        if not self.replacement:
            chosen = self.order(listed, seed, round_number)[: self.invited(len(listed) + away)]
            return [Slot(number, device) for number, device in enumerate(chosen)]
        window = self._window_of(round_number)
        # The remainder of a 256-bit number is even enough for any number of devices.
        draws = (_hash(seed, window, f"draw {k}") % len(listed) for k in range(self.invited(len(listed) + away)))
        counts = Counter(listed[index] for index in draws)  # in order of their first draw
        return [Slot(number, device, count) for number, (device, count) in enumerate(counts.items())]

    def starts_window(self, round_number: int) -> bool:
        """Whether a round draws a new cohort."""
        return round_number % self.window == 0

    def _window_of(self, round_number: int) -> int:
        if round_number < 0:
            raise InputError(f"round_number: expected 0 or more, got {round_number}")
        return round_number // self.window


def quorum_of_share(share: float, wanted: int) -> int:
    """How many of the wanted draws are a share of them."""
    return max(1, min(wanted, math.ceil(share * wanted - _ROUNDING)))


def _is_integer(value: float | int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _hash(seed: int, window: int, what: str) -> int:
    """256 bits that depend on every argument; what comes last may contain anything."""
    text = f"embrace draw {seed} {window} {what}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")
