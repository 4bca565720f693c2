"""The vocabulary of local rules: a rule is a frozen value, `begin` sets it to work on one task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from federation.errors import FieldError, InputError
from federation.space import Vector

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Start:
    """What a rule may need when a task begins; every vector covers the trained suffix."""

    x: Vector  # the parameters as received, moved in place by the steps, and by a rule's `begin` if it has to
    steps: int  # P, the number of local steps
    rate: float  # the local learning rate
    received: Vector | None = None  # the same as x, kept unchanged by somebody (a mapped file); None: a copy is made
    momentum: Vector | None = None  # where the local momentum starts; None: at zero
    control: Vector | None = None  # c − c_i; None: zero, as in the first round
    server_momentum: Vector | None = None  # m_r; None: zero, as in the first round
    _origin: Vector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.x.ndim != 1 or self.x.dtype != np.float32 or not self.x.flags.writeable:
            kind = "" if self.x.flags.writeable else "read-only "
            raise InputError(f"x: expected a flat, writable float32 vector, got {kind}{self.x.dtype} {self.x.shape}")
        for name in ("received", "momentum", "control", "server_momentum"):
            check_like(name, getattr(self, name), self.x)
        object.__setattr__(self, "_origin", self.x.copy() if self.received is None else self.received)
        if self.steps < 1:
            raise InputError(f"steps: expected at least 1, got {self.steps}")
        check_constant("rate", self.rate)

    @property
    def origin(self) -> Vector:
        """The parameters as received; they stay as they are while x moves."""
        return self._origin


class Running(Protocol):
    """A rule at work on one task; it holds its buffers."""

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        """Change the direction `g` of one block in place, without allocating.

        `g` and `x` are the block's views, `at` says where it lies in the suffix, `scratch` is as long as the block.
        """

    def state(self) -> dict[str, Vector]:
        """Buffers to keep or to send."""

    def unreported(self, rates: float) -> Vector | None:
        """The movement of x that is the server's and not the device's, after steps whose rates sum up to `rates`."""


class LocalRule(Protocol):
    """The constants of a rule."""

    def begin(self, start: Start) -> Running:
        """Set the rule to work; may move `start.x` in place."""


class Plain:
    """A rule at work that changes nothing: what a rule is when its constant is zero, and the base of the others."""

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
