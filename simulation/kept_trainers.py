"""Trainers of simulated devices that stay from round to round, because they hold activations that are used again.

Bounded by what they hold: where there is no room, a device's trainer goes, and computes its activations anew when they
are wanted, from the weights of their round, to the same bits. So neither the bound nor which process has which device
changes a result. What is kept makes no room for others: where devices take turns, each would displace the one that
comes next.
"""

from __future__ import annotations

from edge_runtime.trainer import Trainer

MOST_BYTES = 512 << 20  # of activations in one process


class KeptTrainers:
    """The trainers of one process, by device."""

    def __init__(self) -> None:
        self._kept: dict[str, Trainer] = {}
        self._bytes = 0

    def take(self, device: str) -> Trainer | None:
        """Take out the trainer of a device, if it is there."""
        trainer = self._kept.pop(device, None)
        if trainer is not None:
            self._bytes -= trainer.stored_bytes
        return trainer

    def put(self, device: str, trainer: Trainer) -> None:
        """Keep the trainer of a device, which was taken out before, if it has activations and there is room."""
        size = trainer.stored_bytes
        if size and self._bytes + size <= MOST_BYTES:
            self._kept[device] = trainer
            self._bytes += size
