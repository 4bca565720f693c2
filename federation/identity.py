"""A device's id and its seeds: both follow from names, so that two fleets with the same names do the same.

Neither is a secret. What a device may do is decided by its token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from federation.errors import InputError
from federation.printable import printable

ID_DIGITS = 12
MOST_NAME = 100  # characters
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_SEED_BITS = 53  # what a number in JSON holds exactly everywhere


def check_name(name: str) -> str:
    """Refuse a name that cannot be shown as it is."""
    if not name.isprintable() or name != name.strip() or not 1 <= len(name) <= MOST_NAME:
        raise InputError(f"name: expected 1 to {MOST_NAME} printable characters, got '{printable(name, 40)}'")
    return name


def device_id(name: str, taken: Callable[[str], bool]) -> str:
    """Make the id of a new device: the hash of its name; if another device has that, of its name and a counter.

    >>> device_id("kitchen-pi", lambda known: False)
    '83d9012691ea'
    """
    return _first_free(lambda number: _id(name, number), taken)


def free_name(name: str, taken: Callable[[str], bool]) -> str:
    """Return a device's name, with a number behind it if another device has it: the first that is free, as a rule.

    >>> free_name("kitchen", {"kitchen", "kitchen-2"}.__contains__)
    'kitchen-3'
    """
    return _first_free(lambda number: f"{name}-{number + 1}" if number else name, taken)


def _first_free(of: Callable[[int], str], taken: Callable[[str], bool]) -> str:
    """Find a text that is not taken and whose predecessor is, if there is one, and ask for few of them.

    Of ten thousand devices with one name each asks for two dozen, not for all before it.
    """
    most = 1
    if not taken(of(0)):
        return of(0)
    while taken(of(most)):
        most *= 2
    least = most // 2  # is taken
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if taken(of(middle)) else (least, middle)
    return of(most)


def task_seed(plan_seed: int, device: str) -> int:
    """Derive the seed of all tasks of a device in a job: which other devices take part does not change it."""
    return int.from_bytes(_hash(f"embrace task {plan_seed} {device}")[:8], "big") >> (64 - _SEED_BITS)


def is_plain(name: object) -> bool:
    """Whether a name can be part of a path and mean nothing else there."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def _id(name: str, number: int) -> str:
    # Behind a zero byte, which no name that people type has, so that 'a' and a counter is no other name.
    return _hash(name if number == 0 else f"{name}\0{number}").hex()[:ID_DIGITS]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
