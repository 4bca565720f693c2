"""What travels: bytes and messages, layer by layer, FedLAMA's communication cost, and how long it takes on a link.

Counted are the parameters themselves, as the papers do; headers of messages and of the network are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from federation.errors import InputError

Elements = Mapping[str, int]  # layer -> how many of its elements
Bytes = Mapping[str, int]  # layer -> bytes

FLOAT32 = 4  # bytes
_BITS = 8


@dataclass(frozen=True)
class Traffic:
    """Sums, so that the traffic of devices, and of rounds, adds up."""

    up: Bytes = field(default_factory=dict)  # from devices to the server
    down: Bytes = field(default_factory=dict)
    messages: int = 0  # each is a request that waits for its answer

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(_added(self.up, other.up), _added(self.down, other.down), self.messages + other.messages)

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values())

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values())

    @property
    def total(self) -> int:
        return self.bytes_up + self.bytes_down


def traffic_of(sent: Elements, received: Elements, *, tracks: int = 1, item: int = FLOAT32) -> Traffic:
    """One task of one device. A message goes each way, unless it would be empty.

    `tracks` counts vectors that travel side by side: 1 the model alone, 2 with SCAFFOLD's control variates or with
    local momenta that are averaged.
    """
    if tracks < 1 or item < 1:
        raise InputError(f"traffic: expected at least 1 track of at least 1 byte, got {tracks} of {item}")
    up, down = (_in_bytes(elements, tracks * item) for elements in (sent, received))
    return Traffic(up, down, sum(1 for way in (up, down) if any(way.values())))


def total_of(traffic: Iterable[Traffic]) -> Traffic:
    """Everything together; of nothing: no traffic."""
    return sum(traffic, Traffic())


def communication_cost(sizes: Elements, synchronised: Mapping[str, int]) -> int:
    """FedLAMA's C = Σ dim(u_l) · κ_l: elements of each layer, times how often it was synchronised."""
    if unknown := sorted(set(synchronised) - set(sizes)):
        raise InputError(f"communication cost: expected layers of the model, got {', '.join(unknown)}")
    if min(synchronised.values(), default=0) < 0:
        raise InputError("communication cost: expected counts of 0 or more")
    return sum(sizes[layer] * count for layer, count in synchronised.items())


def relative_cost(sizes: Elements, synchronised: Mapping[str, int], full: int) -> float:
    """The cost beside that of synchronising the whole model `full` times, as FedLAMA's tables give it."""
    if full < 1 or not sum(sizes.values()):
        raise InputError(f"communication cost: expected a model and at least 1 full synchronisation, got {full}")
    return communication_cost(sizes, synchronised) / (full * sum(sizes.values()))


@dataclass(frozen=True)
class Link:
    """What connects a device: bits per second each way, and seconds until an answer begins to arrive."""

    up: float
    down: float
    round_trip: float = 0.0

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0 and 0 <= self.round_trip < math.inf):
            raise InputError(
                f"link: expected bits per second above 0 and a round trip of 0 or more seconds, got {self!r}"
            )

    def seconds(self, traffic: Traffic) -> float:
        """One message after the other: each waits a round trip, and every byte takes its time."""
        moving = _BITS * (traffic.bytes_up / self.up + traffic.bytes_down / self.down)
        return traffic.messages * self.round_trip + moving


def round_seconds(devices: Sequence[tuple[Traffic, Link]], server: Link | None = None) -> float:
    """How long the exchange of a round takes if all devices begin together: as long as the slowest.

    A server whose own link carries all of it (its `up` is the devices' up) cannot be quicker than that.
    """
    slowest = max((link.seconds(traffic) for traffic, link in devices), default=0.0)
    if server is None or not devices:
        return slowest
    together = total_of(traffic for traffic, _ in devices)
    # Devices wait for their round trips side by side, not one after the other.
    return max(slowest, server.seconds(Traffic(together.up, together.down, 0)))


def _in_bytes(elements: Elements, each: int) -> Bytes:
    for layer, count in elements.items():
        if count < 0:
            raise InputError(f"traffic: expected 0 or more elements of {layer!r}, got {count}")
    return {layer: each * count for layer, count in elements.items()}


def _added(left: Bytes, right: Bytes) -> Bytes:
    """Layers in the order of their first appearance."""
    return {layer: left.get(layer, 0) + right.get(layer, 0) for layer in dict.fromkeys((*left, *right))}
