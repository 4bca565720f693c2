"""Trainers of simulated devices that stay from round to round, because they hold activations that are used again.

Bounded by what they hold: the devices that were longest ago at work go first, and compute theirs anew, to the same
bits. So neither the bound nor which process has which device changes a result.
"""

from __future__ import annotations

from collections import OrderedDict

from edge_runtime.trainer import Trainer

MOST_BYTES = 512 << 20  # of activations in one process


class KeptTrainers:
    """The trainers of one process, by device."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Trainer] = OrderedDict()

    def take(self, device: str) -> Trainer | None:
        """Take out the trainer of a device, if it is there."""
        return self._kept.pop(device, None)

    def put(self, device: str, trainer: Trainer) -> None:
        """Keep a trainer, and close those that there is no room for."""
        self._kept[device] = trainer
        held = sum(kept.stored_bytes for kept in self._kept.values())
        while held > MOST_BYTES:
            _, oldest = self._kept.popitem(last=False)
            held -= oldest.stored_bytes
            oldest.close()
