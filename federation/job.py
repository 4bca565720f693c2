"""A job, as its file describes it: which bundle, which devices join, what they do, how updates count, for how long.

`job.toml` has one table for each axis; every key has a default but the bundle.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from federation.algorithm import Algorithm
from federation.algorithms import published
from federation.axes.cover import COVER, Cover, DeviceProfile, OutputSide
from federation.axes.local import LOCAL, LocalRule, Momentum
from federation.axes.participate import Participation
from federation.axes.serve import SERVE, Average, ServeRule
from federation.axes.sync import SYNC, Sync, When, WholeModel
from federation.axes.weigh import Weigh
from federation.best_version import Metric, StopRule
from federation.decode import Resolve, decode, encode
from federation.errors import FieldError, InputError
from federation.exchange import Exchange
from federation.manifest import Manifest
from federation.messages import Task
from federation.reuse import MOST_CHANGE
from federation.robust import Combining
from federation.rounds import MAX_TASK
from federation.schedule import Schedule, parse_schedule
from federation.toml_lines import line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# How a job that a coordinator has names its evaluation data; in a job file it is a path, which the client uploads.
UPLOADED = "sha256:"  # and the digest of uploaded data
ON_COORDINATOR = "coordinator:"  # and a name in the operator's folder


@dataclass(frozen=True)
class LocalWork:
    """What a device does in a round."""

    steps: int = 10
    epochs: int | None = None  # passes over a device's own data instead
    batch: int = 32
    rate: str = "0.05"  # a schedule over rounds: federation/schedule.py
    rules: tuple[Annotated[LocalRule, LOCAL], ...] = (Momentum(0.9),)
    refresh_every: int = 1
    refresh_change: float | None = None  # stored activations are made anew when a layer in front changed by more
    activations: Literal["float32", "float16"] = "float32"
    crop: int = 0
    flip: bool = False
    clip_norm: float | None = None  # longer gradients are shortened to this
    micro_batch: int | None = None  # samples that go through the graph at once; None: the whole batch

    def __post_init__(self) -> None:
        self.task("strong", 0, 0)  # says what is wrong
        if self.refresh_change is not None:
            if not 0 < self.refresh_change < MOST_CHANGE:
                raise FieldError("refresh_change", f"expected a change such as 0.05, got {self.refresh_change}")
            if self.refresh_every == 1:
                raise FieldError(
                    "refresh_change", "activations are made anew in every round; expected refresh_every > 1"
                )

    @property
    def keeps_activations(self) -> bool:
        """Whether devices may use what their frozen layers gave in an earlier round."""
        return self.refresh_every > 1 or self.epochs is not None

    @cached_property
    def schedule(self) -> Schedule:
        try:
            return parse_schedule(self.rate)
        except InputError as error:
            raise FieldError("rate", str(error)) from None

    @cached_property
    def load(self) -> tuple[int, int]:
        """What decides about memory: the samples that go through at once, and the vectors that a step holds."""
        task = self.task("strong", 0, 0)
        return task.at_once, task.buffers

    def load_of(self, profile: DeviceProfile, manifest: Manifest) -> tuple[int, int]:
        """Return the load of a device, which may take fewer samples at once than the job says."""
        if profile.micro_batch is None:
            return self.load
        task = self.task("strong", 0, 0).in_parts(profile.micro_batch, manifest)
        return task.at_once, task.buffers

    def check_parts(self, manifest: Manifest) -> None:
        """Refuse parts of a batch that a model's loss or its batch norm does not take."""
        try:
            self.task("strong", 0, 0).check_parts(manifest)
        except FieldError as error:
            raise error.below("local") from None

    def task(self, boundary: str, round_number: int, seed: int, exchange: Exchange | None = None) -> Task:
        """Write a device's task in a round."""
        return Task(
            boundary,
            self.steps,
            self.batch,
            self.schedule.at(round_number),
            self.rules,
            seed,
            round_number,
            self.refresh_every,
            self.activations,
            self.crop,
            self.flip,
            self.epochs,
            exchange or Exchange(),
            clip_norm=self.clip_norm,
            micro_batch=self.micro_batch,
        )


@dataclass(frozen=True)
class Serve:
    """How the server moves, and how the updates of a round become one."""

    rule: Annotated[ServeRule, SERVE] = field(default_factory=Average)
    combine: Combining = "mean"
    trim: float = 0.1  # trimmed mean: share that is left out at either end
    clip_norm: float | None = None  # mean: longer updates are shortened to this
    devices: int | None = None  # SCAFFOLD's N; None: as many as have taken part so far

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise FieldError("trim", f"expected a share in [0, 0.5), got {self.trim}")
        if self.clip_norm is not None and (self.combine != "mean" or not 0 < self.clip_norm < 1e30):
            raise FieldError("clip_norm", "expected a number above 0, together with combine = 'mean'")
        if self.devices is not None and not 1 <= self.devices <= 1_000_000_000:
            raise FieldError("devices", f"expected a number of devices, got {self.devices}")


@dataclass(frozen=True)
class Bounds:
    """What is waited for and what is accepted."""

    lease: float = 30.0  # seconds for a task; a device at work renews it, and one that is gone loses it
    offer: float = 10.0  # seconds to come for one
    max_task: float = MAX_TASK  # seconds for a task in all, however often its lease is renewed; at least a lease
    max_value: float = 64.0  # magnitude of any element of an update
    max_other_value: float = 65536.0  # ... of its control variates and momenta, which are gradients in size
    max_norm: float | None = None  # of a whole update
    max_samples: int = 1 << 20  # that a device may claim

    def __post_init__(self) -> None:
        for name, value in (("lease", self.lease), ("offer", self.offer), ("max_task", self.max_task)):
            if not 0.1 <= value <= 30 * 86400:
                raise FieldError(name, f"expected seconds from 0.1 to 30 days, got {value}")
        for name, value in (("max_value", self.max_value), ("max_other_value", self.max_other_value)):
            if not 2**-20 <= value <= 2**20:
                raise FieldError(name, f"expected a number from 2^-20 to 2^20, got {value}")
        if not 1 <= self.max_samples <= 2**32:
            raise FieldError("max_samples", f"expected a number from 1 to 2^32, got {self.max_samples}")
        if self.max_norm is not None and not 0 < self.max_norm < 1e30:
            raise FieldError("max_norm", f"expected a number above 0, got {self.max_norm}")


@dataclass(frozen=True)
class Evaluate:
    """Scoring new versions: on data that the coordinator has, and by devices on data that they hold out."""

    data: str | None = None  # as `embrace train --data`, "coordinator:NAME" or "sha256:DIGEST"; None: no scores
    every: int = 1  # versions
    # Of batch norm: as averaged, or computed for the new weights from data (static, HeteroFL's).
    statistics: Literal["global", "static"] = "global"
    metric: Metric | None = None  # that says which version is best; None: accuracy if there is one, else the loss
    target: float | None = None  # a value of the metric at which the job is done
    stop_after: int | None = None  # evaluations without a better version after which it is done
    min_delta: float = 0.0  # by which a version has to be better to count
    on_devices: bool = False  # every device scores the version that it received, before it trains
    holdout: float = 0.1  # ... on this share of its data, which it never trains on

    def __post_init__(self) -> None:
        if self.every < 1:
            raise FieldError("every", f"expected at least 1, got {self.every}")
        if not 0 < self.holdout < 1:
            raise FieldError("holdout", f"expected a share between 0 and 1, got {self.holdout}")
        if self.on_devices and self.statistics != "global":
            raise FieldError("statistics", "devices score with averaged statistics; expected 'global' with on_devices")
        self.stop_rule  # noqa: B018 - says what is wrong

    @property
    def stop_rule(self) -> StopRule:
        return StopRule(self.target, self.stop_after, self.min_delta)


@dataclass(frozen=True)
class Plan:
    """A whole job: a choice on every axis, typed. A rule may be of the user's own, for simulations."""

    bundle: str  # directory, as seen from the job file
    name: str = ""
    algorithm: str = ""  # the published one whose tables were filled in
    num_rounds: int = 10
    seed: int = 0
    participate: Participation = field(default_factory=Participation)
    cover: Annotated[Cover, COVER] = field(default_factory=OutputSide)
    sync: Annotated[Sync, SYNC] = field(default_factory=WholeModel)
    local: LocalWork = field(default_factory=LocalWork)
    weigh: Weigh = field(default_factory=Weigh)
    serve: Serve = field(default_factory=Serve)
    evaluate: Evaluate = field(default_factory=Evaluate)
    bounds: Bounds = field(default_factory=Bounds)
    simulate: dict[str, Any] = field(default_factory=dict)  # for `embrace simulate`; the coordinator has no use for it

    def __post_init__(self) -> None:
        if not 1 <= self.num_rounds <= 10_000_000:
            raise FieldError("num_rounds", f"expected a number from 1 to 10000000, got {self.num_rounds}")
        if not 0 <= self.seed < 2**32:
            raise FieldError("seed", f"expected a number from 0 to 2^32 - 1, got {self.seed}")
        if len(self.name) > 200 or not self.name.isprintable():
            raise FieldError("name", f"expected at most 200 characters that can be printed, got {self.name[:200]!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        algorithm, combine = self.choices, self.serve.combine
        if combine != "mean" and (algorithm.tracks or algorithm.weigh.normalise or not self.cover.by_layer):
            raise FieldError(
                ("serve", "combine"),
                f"{combine!r} looks at whole parameters of the model alone; expected 'mean' beside control variates, "
                "averaged momenta, FedNova or reduced widths",
            )
        if combine != "mean" and algorithm.sync.measures:
            raise FieldError(
                ("serve", "combine"),
                f"FedLAMA measures how far devices are from their mean; expected 'mean', got {combine!r}",
            )
        if isinstance(self.cover, OutputSide) and self.cover.frozen_statistics and self.local.refresh_every > 1:
            raise FieldError(
                ("cover", "frozen_statistics"),
                "statistics are measured when frozen layers run; expected local.refresh_every = 1 beside it",
            )
        if self.local.epochs is not None and algorithm.fuses:
            raise FieldError(("local", "epochs"), "DOMO divides by the number of local steps; expected local.steps")
        window = self.participate.window
        if self.draws_some and window % algorithm.sync.window and window != 1:
            raise FieldError(
                ("participate", "window"),
                f"expected a multiple of the {algorithm.sync.window} rounds that sync needs, got {window}",
            )

    @cached_property
    def choices(self) -> Algorithm:
        """What device and server have to agree on."""
        return Algorithm(self.local.rules, self.sync, self.weigh, self.serve.rule)

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
        """Tell the rules of synchronisation about a round."""
        window = self.participation.window
        ends = self.draws_some and window > 1 and (round_number + 1) % window == 0
        return When(round_number, ends, round_number + 1 >= self.num_rounds)

    def window_from(self, round_number: int) -> int:
        """Find the round in which the cohort of a round was drawn."""
        return round_number - round_number % self.participation.window if self.draws_some else 0


def plan_from(data: Any, resolve: Resolve | None = None) -> Plan:
    """Read a plan from parsed JSON or TOML; a FieldError leads to the key that is wrong.

    `resolve` finds rules of the user's own (`rule = "mine.py:MyRule"`), as simulations do; without it they are refused.
    """
    name = data.get("algorithm", "") if isinstance(data, Mapping) else ""
    return decode(Plan, data if name == "" else published(name).fill(data), defaults=True, resolve=resolve)


def plan_to(plan: Plan, *, own_rules: bool = False) -> dict[str, Any]:
    """Turn a plan into JSON: every key, also those of the algorithm, so that a new version of it changes no job.

    `own_rules`: also rules that were written in Python, for the processes of a simulation.
    """
    found: dict[str, Any] = encode(plan, own_rules=own_rules)
    return found


def parse_plan(text: str, resolve: Resolve | None = None) -> Plan:
    """Read the plan of a job file; an error says on which line."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise InputError(f"the job file is no TOML: {error}") from None
    try:
        return plan_from(data, resolve)
    except FieldError as error:
        raise error.on_line(line_of(text, error.path)) from None
