"""Which part of the model is exchanged in a round: all of it, one part in turn, or layers at intervals of their own."""

from typing import Final

from federation.axes.sync.fedlama import FedLama
from federation.axes.sync.one_part import OnePart
from federation.axes.sync.rotating import Rotating
from federation.axes.sync.rule import Sync, SyncFacts, When, after_round, first_facts
from federation.axes.sync.whole_model import WholeModel
from federation.decode import Axis

SYNC: Final = Axis({"all": WholeModel, "rotating": Rotating, "fedlama": FedLama, "one_part": OnePart}, default="all")

__all__ = [
    "SYNC",
    "FedLama",
    "OnePart",
    "Rotating",
    "Sync",
    "SyncFacts",
    "When",
    "WholeModel",
    "after_round",
    "first_facts",
]
