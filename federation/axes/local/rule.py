"""The vocabulary of local rules. A rule is a frozen value, and says both halves of what it does, in one file:

    begin                    how a step's direction changes, on the device
    tracks, keeps            what travels beside the model, and whether a device keeps something between its tasks
    begin_task, finish_task  what a device starts from, sends and keeps
    move_track               how the server moves, given what devices sent
    pace, fuses, stands_last what FedNova, the server and the chain have to know
    buffers                  what a prediction of memory has to know

All but `begin` has a default: a rule without state has nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from federation.accumulate import Accumulator, Doubles
from federation.device_task import DeviceTask, Handover, LocalModel, LocalResult
from federation.errors import FieldError, InputError
from federation.space import Vector

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Start:
    """What a rule may need when a task begins; every vector covers the trained suffix."""

    x: Vector  # the parameters as received, moved in place by the steps, and by a rule's `begin` if it has to
    steps: int  # P, the number of local steps
    rate: float  # the local learning rate
    received: Vector | None = None  # the same as x, kept unchanged by the caller (a mapped file); None: it is copied
    brought: Mapping[str, Vector] = field(default_factory=dict)  # by name: what the rules' `begin_task` gave
    steps_before: int = 0  # that the device has taken with what it brings
    _origin: Vector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.x.ndim != 1 or self.x.dtype != np.float32 or not self.x.flags.writeable:
            kind = "" if self.x.flags.writeable else "read-only "
            raise InputError(f"x: expected a flat, writable float32 vector, got {kind}{self.x.dtype} {self.x.shape}")
        check_like("received", self.received, self.x)
        for name, vector in self.brought.items():
            check_like(name, vector, self.x)
        object.__setattr__(self, "_origin", self.x.copy() if self.received is None else self.received)
        if self.steps < 1:
            raise InputError(f"steps: expected at least 1, got {self.steps}")
        if self.steps_before < 0:
            raise InputError(f"steps_before: expected at least 0, got {self.steps_before}")
        check_constant("rate", self.rate)

    @property
    def origin(self) -> Vector:
        """The parameters as received; they stay as they are while x moves."""
        return self._origin


@dataclass(frozen=True)
class Track:
    """A vector that devices send beside the model; the server has a state vector of the same name, zero at first."""

    name: str
    counts_once: bool = False  # in the sum, however often its device was drawn


@dataclass(frozen=True)
class TrackBlock:
    """What devices sent of a track in a round, for a block of the weights of one layer."""

    total: Accumulator
    at: slice
    devices: int  # that have taken part in the job so far, or that the job is said to have

    @property
    def sum(self) -> Doubles:
        return self.total.sum(self.at)

    @property
    def mean(self) -> Doubles:
        """Over the devices that trained each element."""
        return self.total.mean(self.at)


@dataclass(frozen=True)
class Pace:
    """How a rule changes how far one gradient takes the weights in a task; the default is SGD."""

    inertia: float = 0.0  # share of the velocity that goes on into the next step
    nesterov: bool = False
    pull: float = 0.0  # back to the start, in every step, times the rate


class Running(Protocol):
    """A rule at work on one task; it holds its buffers."""

    def begin_step(self) -> None:
        """Count a step; its blocks follow."""

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        """Change the direction `g` of one block in place, without allocating.

        `g` and `x` are the block's views, `at` says where it lies in the suffix, `scratch` is as long as the block.
        """

    def state(self) -> dict[str, Vector]:
        """Buffers to keep or to send."""

    def unreported(self, rates: float) -> Vector | None:
        """The movement of x that is the server's and not the device's, after steps whose rates sum up to `rates`."""


class LocalRule(ABC):
    """The constants of a rule: a frozen dataclass. Names of tracks and vectors are the rule's own."""

    @property
    def tracks(self) -> tuple[Track, ...]:
        """What updates have beside the model."""
        return ()

    @property
    def keeps(self) -> bool:
        """Whether a device keeps vectors of this rule from one task to the next."""
        return False

    @property
    def fuses(self) -> bool:
        """Whether devices use the server's last move, whose scale a task then has (`Exchange.fuse`)."""
        return False

    @property
    def stands_last(self) -> bool:
        """Whether no rule may follow in the chain."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether the direction of a step is no longer a gradient in size, however large that was."""
        return False

    @property
    def measures_steps(self) -> bool:
        """Whether what the rule adds is as large as a step's direction: it stands behind a rule that rescales."""
        return False

    @property
    def buffers(self) -> int:
        """How many vectors, as long as the parameters, the rule holds while it works."""
        return 0

    @property
    def pace(self) -> Pace:
        """What FedNova has to know."""
        return Pace()

    @abstractmethod
    def begin(self, start: Start) -> Running:
        """Set the rule to work; may move `start.x` in place."""

    def begin_task(self, task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
        """Collect the vectors that the rule starts from; `begin` finds them in `Start.brought`."""
        return {}

    def finish_task(self, task: DeviceTask, result: LocalResult) -> Handover:
        """Hand over the rule's tracks, and the vectors that the device keeps under names of its own."""
        return Handover()

    def move_track(self, name: str, old: Vector, sent: TrackBlock) -> Doubles:
        """Compute new values of the server's vector of a track, a block at a time; by default the mean."""
        return sent.mean


class Plain:
    """A rule at work that changes nothing: what a rule is when its constant is zero, and the base of the others."""

    def begin_step(self) -> None:
        pass

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        pass

    def state(self) -> dict[str, Vector]:
        return {}

    def unreported(self, rates: float) -> Vector | None:
        return None


def check_constant(name: str, value: float, *, below: float = LARGEST) -> None:
    """Refuse what is negative, not finite as a float32, or not below the bound."""
    if not 0 <= value < below:
        raise FieldError(name, f"expected a number in [0, {below:.3g}), got {value}")


def check_like(name: str, vector: Vector | None, x: Vector) -> None:
    """Refuse a vector that is not as long as the parameters."""
    if vector is not None and (vector.shape != x.shape or vector.dtype != np.float32):
        raise InputError(f"{name}: expected float32 {x.shape} like x, got {vector.dtype} {vector.shape}")
