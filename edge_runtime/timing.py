"""Where the time went: every second of a task belongs to exactly one part.

Parts may be nested; the time of an inner part is not counted in the outer one. What no part claims is `other`, so parts
and `other` always add up to the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FORWARD = "forward/"  # + name of a layer: computing it in the multi-step forward pass
PARTS = (
    "download",  # waiting for layers; what was fetched while computing is `hidden_download`
    "load",  # sessions, and whatever else it takes to get ready
    FORWARD,
    "activation_io",  # writing and reading stored activations, reading and preparing local data
    "training",  # becomes training_forward and backward
    "optimiser",
    "upload",
    "state",  # keeping what has to survive
    "evaluation",
)


@dataclass(frozen=True)
class Timings:
    """Seconds of each part of a task."""

    wall: float
    download: float
    hidden_download: float  # fetched while something else was computed; not part of the sum
    load: float
    forward: dict[str, float]  # by layer
    activation_io: float
    training: float  # of which the next two, where the runtime's record divides it
    training_forward: float | None
    backward: float | None
    optimiser: float
    upload: float
    state: float
    evaluation: float
    other: float

    @property
    def accounted(self) -> float:
        """Share of the wall clock that has a name."""
        return 1.0 - self.other / self.wall if self.wall else 1.0


@dataclass
class Stopwatch:
    """Counts seconds by part. The clock is an argument, so that accounting can be tested without waiting."""

    now: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    hidden_download: float = 0.0

    def __post_init__(self) -> None:
        self._began = self._last = self.now()
        self._open: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds inside for `name`, but for those of parts inside it."""
        if name not in PARTS and not name.startswith(FORWARD):
            raise KeyError(name)
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = self.now()
        name = self._open[-1] if self._open else "other"
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def timings(self, forward_share: float | None = None) -> Timings:
        """Return the account so far; `forward_share` of the training steps' time is their forward part."""
        self._charge()
        get = self.seconds.get
        training = get("training", 0.0)
        return Timings(
            wall=self._last - self._began,
            download=get("download", 0.0),
            hidden_download=self.hidden_download,
            load=get("load", 0.0),
            forward={k.removeprefix(FORWARD): v for k, v in self.seconds.items() if k.startswith(FORWARD)},
            activation_io=get("activation_io", 0.0),
            training=training,
            training_forward=None if forward_share is None else training * forward_share,
            backward=None if forward_share is None else training * (1.0 - forward_share),
            optimiser=get("optimiser", 0.0),
            upload=get("upload", 0.0),
            state=get("state", 0.0),
            evaluation=get("evaluation", 0.0),
            other=get("other", 0.0),
        )
