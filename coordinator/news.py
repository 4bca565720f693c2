"""What a process tells the others that share its database."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from coordinator.store.postgresql import MOST_NEWS


@dataclass(frozen=True)
class News:
    """What has happened. A process that missed some (`lost`) has to read everything again."""

    sender: str = ""  # which knows already
    jobs: tuple[str, ...] = ()  # that there may be something to do for
    summed: tuple[str, ...] = ()  # jobs of which a partial sum was stored
    devices: bool = False  # there may be something to do for devices that wait
    shut_out: tuple[str, ...] = ()  # devices
    signed_out: tuple[str, ...] = ()  # hashes of the tokens of sessions
    lost: bool = False

    def encode(self) -> str:
        """Write a message; what is too long for one becomes the advice to read everything."""
        told = json.dumps(vars(self), separators=(",", ":"))
        return told if len(told) <= MOST_NEWS else json.dumps(vars(News(self.sender, devices=True, lost=True)))


def decode(told: str) -> News:
    """Read a message; what is none of ours is taken as a reason to read everything."""
    try:
        found: dict[str, Any] = json.loads(told)
        found |= {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return News(**found)
    except (AttributeError, TypeError, ValueError):
        return News(devices=True, lost=True)
