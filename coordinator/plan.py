"""A job, as its file describes it: which bundle, who joins, what a device does, how updates count, for how long.

`job.toml` has one table for each axis; every key has a default but the bundle.
"""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from coordinator.robust import Combine
from federation.axes.cover import Cover, Everything, OutputSide
from federation.axes.local import LocalRule, decode_rules, encode_rules
from federation.axes.participate import Participation
from federation.decode import decode
from federation.errors import InputError
from federation.messages import Task
from federation.schedule import Schedule, parse_schedule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class CoverChoice:
    """What a device trains."""

    rule: Literal["output_side", "everything"] = "output_side"

    def build(self, batch: int) -> Cover:
        return OutputSide(batch) if self.rule == "output_side" else Everything(batch)


@dataclass(frozen=True)
class LocalWork:
    """What a device does in a round."""

    steps: int = 10
    batch: int = 32
    rate: str = "0.05"  # a schedule over rounds: federation/schedule.py
    rules: tuple[dict[str, Any], ...] = ({"rule": "momentum", "factor": 0.9},)
    refresh_every: int = 1
    activations: Literal["float32", "float16"] = "float32"
    crop: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        self.task("strong", 0, 0)  # says what is wrong

    @property
    def schedule(self) -> Schedule:
        return parse_schedule(self.rate)

    def task(self, boundary: str, round_number: int, seed: int) -> Task:
        """A device's task in a round."""
        rules: tuple[LocalRule, ...] = tuple(decode_rules(list(self.rules)))
        return Task(
            boundary, self.steps, self.batch, self.schedule.at(round_number), rules, seed, round_number,
            self.refresh_every, self.activations, self.crop, self.flip,
        )  # fmt: skip


@dataclass(frozen=True)
class Weigh:
    """How much an update counts."""

    by: Literal["uniform", "samples"] = "uniform"

    def weight(self, samples: int) -> float:
        return float(samples) if self.by == "samples" else 1.0


@dataclass(frozen=True)
class Serve:
    """How the server moves: x ← x + rate · combined update. rate = 1 and the mean is FedAvg."""

    rate: float = 1.0
    combine: Combine = "mean"
    trim: float = 0.1  # trimmed mean: share that is left out at either end
    clip_norm: float | None = None  # mean: longer updates are shortened to this

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise InputError(f"serve.trim: expected a share in [0, 0.5), got {self.trim}")
        if self.clip_norm is not None and (self.combine != "mean" or not 0 < self.clip_norm < 1e30):
            raise InputError("serve.clip_norm: expected a number above 0, together with combine = 'mean'")
        if not 0 < self.rate <= 1000:
            raise InputError(f"serve.rate: expected a number in (0, 1000], got {self.rate}")


@dataclass(frozen=True)
class Bounds:
    """What is waited for and what is accepted."""

    lease: float = 3600.0  # seconds for a task
    offer: float = 120.0  # seconds to come for one
    max_value: float = 64.0  # magnitude of any element of an update
    max_norm: float | None = None  # of a whole update
    max_samples: int = 1 << 20  # that a device may claim

    def __post_init__(self) -> None:
        for name, value in (("lease", self.lease), ("offer", self.offer)):
            if not 0.1 <= value <= 30 * 86400:
                raise InputError(f"bounds.{name}: expected seconds from 0.1 to 30 days, got {value}")
        if not 2**-20 <= self.max_value <= 2**20 or not 1 <= self.max_samples <= 2**32:
            raise InputError("bounds: expected max_value from 2^-20 to 2^20 and max_samples from 1 to 2^32")
        if self.max_norm is not None and not 0 < self.max_norm < 1e30:
            raise InputError(f"bounds.max_norm: expected a number above 0, got {self.max_norm}")


@dataclass(frozen=True)
class Evaluate:
    """Scoring new versions on the coordinator's machine."""

    data: str | None = None  # as `embrace train --data`; None: no scores
    every: int = 1  # versions

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"evaluate.every: expected at least 1, got {self.every}")


@dataclass(frozen=True)
class Plan:
    """A whole job."""

    bundle: str  # directory, as the one who creates the job sees it
    name: str = ""
    num_rounds: int = 10
    seed: int = 0
    participate: Participation = field(default_factory=Participation)
    cover: CoverChoice = field(default_factory=CoverChoice)
    local: LocalWork = field(default_factory=LocalWork)
    weigh: Weigh = field(default_factory=Weigh)
    serve: Serve = field(default_factory=Serve)
    evaluate: Evaluate = field(default_factory=Evaluate)
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        if not 1 <= self.num_rounds <= 10_000_000:
            raise InputError(f"num_rounds: expected a number from 1 to 10000000, got {self.num_rounds}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: expected a number from 0 to 2^32 - 1, got {self.seed}")
        if len(self.name) > 200 or not self.name.isprintable():
            raise InputError(f"name: expected at most 200 characters that can be printed, got {self.name[:200]!r}")


def plan_from(data: Any) -> Plan:
    """A plan from parsed JSON or TOML; InputError names the key and what it expects."""
    return decode(Plan, data, "job", defaults=True)


def plan_to(plan: Plan) -> dict[str, Any]:
    """For JSON."""
    found = asdict(plan)
    found["local"]["rules"] = encode_rules(decode_rules(list(plan.local.rules)))
    return found


def parse_plan(text: str) -> Plan:
    """The plan of a job file; an error says on which line."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the job file is no TOML: {error}") from None
    try:
        return plan_from(data)
    except InputError as error:
        line = _line_of(text, str(error))
        raise InputError(f"line {line}: {error}" if line else str(error)) from None


def _line_of(text: str, message: str) -> int | None:
    """The line that an error is about: where the last key that its place names is written, rather in its own table."""
    place = message.partition(":")[0].replace("participation", "participate")
    unknown = re.search(r"got \"?\[['\"](\w+)", message)
    keys = re.findall(r"[A-Za-z_]+", place) if place != "task" else message.split()[:2]
    for key in reversed([*keys, *(unknown.groups() if unknown else ())]):
        found, table = [], ""
        for number, line in enumerate(text.splitlines(), 1):
            header = re.match(r"\s*\[\s*([A-Za-z_]+)", line)
            table = header[1] if header else table
            if re.match(rf"\s*\[?\s*{re.escape(key)}\b", line):
                found.append((table not in keys, number))
        if found:
            return min(found)[1]
    return None
