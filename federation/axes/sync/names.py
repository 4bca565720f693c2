"""Rules of synchronisation by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from federation.axes.names import decode_choice, encode_choice
from federation.axes.sync.fedlama import FedLama
from federation.axes.sync.one_part import OnePart
from federation.axes.sync.rotating import Rotating
from federation.axes.sync.rule import Sync
from federation.axes.sync.whole_model import WholeModel

SYNC: Final[Mapping[str, type[Any]]] = {
    "all": WholeModel,
    "rotating": Rotating,
    "fedlama": FedLama,
    "one_part": OnePart,
}


def decode_sync(table: Any) -> Sync:
    choice: Sync = decode_choice(SYNC, table, "sync", "all")
    return choice


def encode_sync(sync: Sync) -> dict[str, Any]:
    return encode_choice(SYNC, sync)
