"""What the demo came to: versions of the weights, devices, and how things stand meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoundResult:
    """A version of the weights. The first is the untrained network."""

    round: int
    accuracy: float | None  # None: the version was gone before it could be fetched
    loss: float | None = None  # of training, mean over the devices
    updates: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class DeviceResult:
    """What one device did in all rounds."""

    name: str
    tier: str | None  # None: its memory decided
    boundary: str
    layers: list[str]
    trained: int  # weights
    samples: int
    classes: list[int]  # how many of each
    rounds: int
    sent: int  # bytes of weights
    received: int
    budget: int
    process_peak: int | None  # anonymous bytes of the whole process, which the budget bounds
    training_peak: int | None  # ... on top of the idle process
    seconds: dict[str, float]
    alone: float | None = None  # accuracy after as many steps without the others, at the best of three rates
    ended: str = ""  # if it did not see the end: why


@dataclass(frozen=True)
class View:
    """The state of the demo, for the screen."""

    doing: str
    rounds: list[RoundResult] = field(default_factory=list)
    seats: list[tuple[str, str, str]] = field(default_factory=list)  # device, boundary, state in the open round
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """What the trained network says of a text."""

    text: str
    label: str
    share: float  # how sure it is, from 0 to 1


@dataclass(frozen=True)
class DemoOutcome:
    """The whole demo."""

    held_out: int
    layers: int  # of the whole network
    rounds: list[RoundResult]
    devices: list[DeviceResult]
    notes: list[str]
    seconds: float
    answers: list[Answer] = field(default_factory=list)  # of texts
