"""A job, as its file describes it: which bundle, who joins, what a device does, how updates count, for how long.

`job.toml` has one table for each axis; every key has a default but the bundle.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from federation.algorithm import Algorithm
from federation.algorithms import preset
from federation.axes.cover import Cover, Everything, OutputSide
from federation.axes.input_side import InputSide
from federation.axes.local import LocalRule, decode_rules, encode_rules
from federation.axes.participate import Participation
from federation.axes.serve.names import decode_serve, encode_serve
from federation.axes.sync import When
from federation.axes.sync.names import decode_sync, encode_sync
from federation.axes.weigh import Weigh
from federation.axes.width import TIERS, OrderedDropout, Width
from federation.decode import decode
from federation.errors import InputError
from federation.exchange import Exchange
from federation.messages import Task
from federation.robust import Combining
from federation.schedule import Schedule, parse_schedule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class CoverChoice:
    """What a device trains."""

    rule: Literal["output_side", "everything", "width", "ordered_dropout", "input_side"] = "output_side"
    tiers: dict[str, float] = field(default_factory=lambda: dict(TIERS))  # widths: the share of a tier's channels

    @property
    def by_layer(self) -> bool:
        """Whether devices train whole parameters."""
        return self.rule not in ("width", "ordered_dropout")

    def build(self, batch: int) -> Cover:
        if self.rule == "width":
            return Width(batch, self.tiers)
        if self.rule == "ordered_dropout":
            return OrderedDropout(batch, self.tiers)
        plain: dict[str, Callable[[int], Cover]] = {
            "output_side": OutputSide,
            "everything": Everything,
            "input_side": InputSide,
        }
        return plain[self.rule](batch)


@dataclass(frozen=True)
class LocalWork:
    """What a device does in a round."""

    steps: int = 10
    epochs: int | None = None  # passes over a device's own data instead
    batch: int = 32
    rate: str = "0.05"  # a schedule over rounds: federation/schedule.py
    rules: tuple[dict[str, Any], ...] = ({"rule": "momentum", "factor": 0.9},)
    refresh_every: int = 1
    activations: Literal["float32", "float16"] = "float32"
    crop: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        self.task("strong", 0, 0)  # says what is wrong

    @cached_property
    def schedule(self) -> Schedule:
        return parse_schedule(self.rate)

    @cached_property
    def chain(self) -> tuple[LocalRule, ...]:
        return tuple(decode_rules(list(self.rules)))

    def task(self, boundary: str, round_number: int, seed: int, exchange: Exchange | None = None) -> Task:
        """A device's task in a round."""
        return Task(
            boundary,
            self.steps,
            self.batch,
            self.schedule.at(round_number),
            self.chain,
            seed,
            round_number,
            self.refresh_every,
            self.activations,
            self.crop,
            self.flip,
            self.epochs,
            exchange or Exchange(),
        )


@dataclass(frozen=True)
class Combine:
    """How the updates of a round become one."""

    combine: Combining = "mean"
    trim: float = 0.1  # trimmed mean: share that is left out at either end
    clip_norm: float | None = None  # mean: longer updates are shortened to this
    devices: int | None = None  # SCAFFOLD's N; None: as many as have taken part so far

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise InputError(f"serve.trim: expected a share in [0, 0.5), got {self.trim}")
        if self.clip_norm is not None and (self.combine != "mean" or not 0 < self.clip_norm < 1e30):
            raise InputError("serve.clip_norm: expected a number above 0, together with combine = 'mean'")
        if self.devices is not None and not 1 <= self.devices <= 1_000_000_000:
            raise InputError(f"serve.devices: expected a number of devices, got {self.devices}")


@dataclass(frozen=True)
class Bounds:
    """What is waited for and what is accepted."""

    lease: float = 3600.0  # seconds for a task
    offer: float = 120.0  # seconds to come for one
    max_value: float = 64.0  # magnitude of any element of an update
    max_other_value: float = 65536.0  # ... of its control variates and momenta, which are gradients in size
    max_norm: float | None = None  # of a whole update
    max_samples: int = 1 << 20  # that a device may claim

    def __post_init__(self) -> None:
        for name, value in (("lease", self.lease), ("offer", self.offer)):
            if not 0.1 <= value <= 30 * 86400:
                raise InputError(f"bounds.{name}: expected seconds from 0.1 to 30 days, got {value}")
        for name, value in (("max_value", self.max_value), ("max_other_value", self.max_other_value)):
            if not 2**-20 <= value <= 2**20:
                raise InputError(f"bounds.{name}: expected a number from 2^-20 to 2^20, got {value}")
        if not 1 <= self.max_samples <= 2**32:
            raise InputError(f"bounds.max_samples: expected a number from 1 to 2^32, got {self.max_samples}")
        if self.max_norm is not None and not 0 < self.max_norm < 1e30:
            raise InputError(f"bounds.max_norm: expected a number above 0, got {self.max_norm}")


@dataclass(frozen=True)
class Evaluate:
    """Scoring new versions on the coordinator's machine."""

    data: str | None = None  # as `embrace train --data`; None: no scores
    every: int = 1  # versions
    # Of batch norm: as averaged, or computed for the new weights from data (static, HeteroFL's).
    statistics: Literal["global", "static"] = "global"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"evaluate.every: expected at least 1, got {self.every}")


@dataclass(frozen=True)
class Plan:
    """A whole job. `sync` and `serve` have a rule by name and its constants; `serve` also how updates are combined."""

    bundle: str  # directory, as the one who creates the job sees it
    name: str = ""
    algorithm: str = ""  # the published one whose tables were filled in
    num_rounds: int = 10
    seed: int = 0
    participate: Participation = field(default_factory=Participation)
    cover: CoverChoice = field(default_factory=CoverChoice)
    sync: dict[str, Any] = field(default_factory=dict)
    local: LocalWork = field(default_factory=LocalWork)
    weigh: Weigh = field(default_factory=Weigh)
    serve: dict[str, Any] = field(default_factory=dict)
    evaluate: Evaluate = field(default_factory=Evaluate)
    bounds: Bounds = field(default_factory=Bounds)
    simulate: dict[str, Any] = field(default_factory=dict)  # for `embrace simulate`; the coordinator has no use for it

    def __post_init__(self) -> None:
        if not 1 <= self.num_rounds <= 10_000_000:
            raise InputError(f"num_rounds: expected a number from 1 to 10000000, got {self.num_rounds}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: expected a number from 0 to 2^32 - 1, got {self.seed}")
        if len(self.name) > 200 or not self.name.isprintable():
            raise InputError(f"name: expected at most 200 characters that can be printed, got {self.name[:200]!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        self.cover.build(self.local.batch)  # says what is wrong
        algorithm, combining = self.choices, self.combining
        if combining.combine != "mean" and (algorithm.tracks or algorithm.weigh.normalise or not self.cover.by_layer):
            raise InputError(
                f"serve.combine: {combining.combine!r} looks at whole parameters of the model alone; expected 'mean' "
                "beside control variates, averaged momenta, FedNova or reduced widths"
            )
        if combining.combine != "mean" and algorithm.sync.measures:
            raise InputError(
                f"serve.combine: FedLAMA measures how far devices are from their mean; expected 'mean', "
                f"got {combining.combine!r}"
            )
        if self.local.epochs is not None and algorithm.fuses:
            raise InputError("local.epochs: DOMO divides by the number of local steps; expected local.steps")
        window = self.participate.window
        if self.draws_some and window % algorithm.sync.window and window != 1:
            raise InputError(
                f"participate.window: expected a multiple of the {algorithm.sync.window} rounds that sync needs, "
                f"got {window}"
            )

    @cached_property
    def choices(self) -> Algorithm:
        """What device and server have to agree on."""
        own = {key: value for key, value in self.serve.items() if key not in _COMBINING}
        rules = tuple(decode_rules(list(self.local.rules)))
        return Algorithm(rules, decode_sync(self.sync), self.weigh, decode_serve(own))

    @cached_property
    def combining(self) -> Combine:
        own = {key: value for key, value in self.serve.items() if key in _COMBINING}
        return decode(Combine, own, "serve", defaults=True)

    @property
    def draws_some(self) -> bool:
        """Whether cohorts change although devices stay."""
        return self.participate.count is not None or self.participate.fraction_train < 1

    @cached_property
    def participation(self) -> Participation:
        """As asked for, with cohorts that stay for as long as the synchronisation needs."""
        if self.draws_some and self.participate.window == 1:
            return replace(self.participate, window=self.choices.sync.window)
        return self.participate

    def when(self, round_number: int) -> When:
        """What the rules of synchronisation know about a round."""
        window = self.participation.window
        ends = self.draws_some and window > 1 and (round_number + 1) % window == 0
        return When(round_number, ends, round_number + 1 >= self.num_rounds)

    def window_from(self, round_number: int) -> int:
        """The round in which the cohort of a round was drawn."""
        return round_number - round_number % self.participation.window if self.draws_some else 0


_COMBINING = {field.name for field in fields(Combine)}


def plan_from(data: Any) -> Plan:
    """A plan from parsed JSON or TOML; InputError names the key and what it expects."""
    name = data.get("algorithm", "") if isinstance(data, dict) else ""
    if not isinstance(name, str):
        raise InputError(f"job.algorithm: expected a name, got {str(name)[:80]!r}")
    return decode(Plan, preset(name).fill(data) if name else data, "job", defaults=True)


def plan_to(plan: Plan) -> dict[str, Any]:
    """For JSON: every key, also those of the algorithm, so that a new version of it does not change a job."""
    found = asdict(plan)
    found["algorithm"] = plan.algorithm
    found["local"]["rules"] = encode_rules(plan.choices.rules)
    found["sync"] = encode_sync(plan.choices.sync)
    found["serve"] = {**encode_serve(plan.choices.serve), **asdict(plan.combining)}
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
    keys = re.findall(r"[A-Za-z_]\w*", place) if place != "task" else message.split()[:2]
    for key in reversed([*keys, *(unknown.groups() if unknown else ())]):
        found, table = [], ""
        for number, line in enumerate(text.splitlines(), 1):
            header = re.match(r"\s*\[\s*([A-Za-z_]+)", line)
            table = header[1] if header else table
            if re.match(rf"\s*\[?\s*{re.escape(key)}\b|.*[{{,]\s*{re.escape(key)}\s*=", line):  # or in an inline table
                found.append((table not in keys, number))
        if found:
            return min(found)[1]
    return None
