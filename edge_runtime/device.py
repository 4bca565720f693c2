"""A device as the coordinator sees it: what its owner decided, and what its memory allows.

`profile.memory` is the room beside the idle process, here and on the coordinator; the budget bounds the whole process.
What fits is decided by DeviceProfile on both sides, from the trial steps of this device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_runtime.budget import PLENTY, TryOut, check_profile, forward_plan, open_budget, search, tried
from edge_runtime.data.load import Data
from edge_runtime.engine.choose import check_engine, choose_engine, engines_of
from edge_runtime.engine.session import RUNTIME, RuntimeSettings, give_back_memory, is_untouched
from edge_runtime.forward import ForwardPlan
from edge_runtime.forward import Report as Progress
from edge_runtime.logs import get_logger
from edge_runtime.memory import Memory
from edge_runtime.own_limits import OwnLimits
from edge_runtime.remote import RemoteBundle
from edge_runtime.trial import Conditions, Trial, Trials, known_needs
from federation.axes.cover import MOST_NEEDS, DeviceProfile, OutputSide
from federation.capacity import beside, megabytes, predicted_peak
from federation.coverage import Coverage, coverage
from federation.errors import InputError, OutOfMemory, TooLarge
from federation.manifest import Boundary, Manifest
from federation.messages import Task

log = get_logger("embrace.agent")
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Device:
    """What the person who starts an agent decides."""

    data: Data  # as `embrace train --data`
    work: Path
    memory: str | None = None
    tier: str | None = None
    engine: str = "auto"
    profile: str = "auto"
    settings: RuntimeSettings = field(default_factory=RuntimeSettings)
    allow_single_class: bool = True  # a fleet has the other classes
    limits: OwnLimits = field(default_factory=OwnLimits)
    trust: tuple[str, ...] = ()  # public keys; none: the signer that is met first
    boundary: str | None = None
    tokenizer: Path | None = None  # makes tokens of texts; None: the bundle's
    micro_batch: int | None = None  # the most samples that go through the graph at once; None: as tasks say

    def __post_init__(self) -> None:
        check_engine(self.engine)
        check_profile(self.profile)
        if self.tier is not None and self.boundary is not None:
            raise InputError("tier and boundary both say where training begins; give one of them")


@dataclass(frozen=True)
class Fitting:
    """How a task is done within the memory."""

    settings: RuntimeSettings
    plan: ForwardPlan
    forward_share: float | None  # of a step's time, if there was a trial


class DeviceMemory:
    """Decides what fits this device, and tells the coordinator what it learns."""

    def __init__(self, device: Device) -> None:
        """Refuse a budget that the idle process has already."""
        self.device = device
        self._budget = open_budget(device.memory) if device.memory is not None else None
        self._settled = False
        self._untouched = False  # when it was settled
        self._refused: set[tuple[str, str]] = set()  # bundles and boundaries that were too large
        self._found: dict[tuple[str, str, int, int], Fitting] = {}
        self.profile = DeviceProfile(
            memory=self._budget.room if self._budget else None,
            tier=device.tier,
            boundary=device.boundary,
            threads=device.settings.threads,
            runtime=RUNTIME,
            engines=engines_of(device.engine),
            needs=known_needs(device.work, device.settings, MOST_NEEDS),
            measures=True,
            micro_batch=device.micro_batch,
        )

    @property
    def idle(self) -> Memory | None:
        """What the process had before it trained anything."""
        return self._budget.idle if self._budget else None

    @property
    def allowed(self) -> int | None:
        """Bytes that the whole process was allowed; None: whatever is free."""
        return self._budget.bytes if self._budget and self.device.memory is not None else None

    def describe(self) -> dict[str, Any]:
        """Return the profile as JSON; what is not used is left out, for an older coordinator."""
        return {key: value for key, value in asdict(self.profile).items() if value not in (None, ())}

    def settle(self) -> None:
        """Measure the idle process with the data loaded and the runtime ready: from now on it trains."""
        give_back_memory()
        if not self._settled:
            self._budget = open_budget(self.device.memory)
            self._untouched = is_untouched()
            self._settled = True

    def fit(
        self, bundle: RemoteBundle, digest: str, samples: int, task: Task, tell: Tell, progress: Progress
    ) -> Fitting:
        """Decide how to do a task, the first time by trial steps; `tell` the coordinator what they took.

        TooLarge if the task does not fit: with what it was told the coordinator finds one that does.
        """
        covered = coverage(bundle.manifest, task.boundary)
        key = (digest, task.boundary, task.at_once, _vectors(task, covered))
        if key not in self._found:
            self._found[key] = self._fit(bundle, digest, samples, task, covered, tell, progress)
        return self._found[key]

    def _fit(
        self,
        bundle: RemoteBundle,
        digest: str,
        samples: int,
        task: Task,
        covered: Coverage,
        tell: Tell,
        progress: Progress,
    ) -> Fitting:
        assert self._budget is not None
        manifest, boundary, batch = bundle.manifest, covered.boundary, task.at_once
        before, more = self.profile, beside(manifest, covered.graphs[1:])
        profile = replace(self.profile, memory=max(1, self._budget.room))
        try_out = self._trials(bundle, task, covered, progress)
        trial, needed = None, predicted_peak(manifest, boundary, batch, task.buffers) + more
        if self.device.memory is not None or PLENTY * needed > self._budget.room:
            trial, profile = tried(manifest, batch, profile, boundary, try_out, task.buffers)
            needed = profile.need(manifest, boundary, batch, task.buffers) + more
        fits = needed <= self._budget.room
        if self._is_free(boundary) and (self.device.memory is not None or not fits):
            profile = self._searched(manifest, task, profile, try_out)
        if self.device.memory is not None or not fits:
            self.profile = profile
            if profile != before:
                tell(self.describe())
        if not fits:
            self._refuse(manifest, digest, boundary, task, needed)
        plan, picked = forward_plan(
            manifest,
            boundary,
            self._budget.room,
            needed,
            samples,
            self.device.profile,
            self.device.memory is not None,
            task.activations,
            self.device.work,
        )
        return Fitting(replace(self.device.settings, profile=picked), plan, trial.forward_share if trial else None)

    def _is_free(self, boundary: Boundary) -> bool:
        """Whether memory decides where training begins."""
        return self.device.tier is None and self.device.boundary is None and boundary.narrow is None

    def _searched(self, manifest: Manifest, task: Task, profile: DeviceProfile, try_out: TryOut) -> DeviceProfile:
        """Try boundaries until the largest that fits is known, so that the next task is from there."""
        try:
            return search(manifest, task.at_once, profile, try_out, task.buffers)[1]
        except OutOfMemory as error:  # the coordinator finds the same
            log.warning("%s", error)
            return profile

    def _trials(self, bundle: RemoteBundle, task: Task, covered: Coverage, progress: Progress) -> TryOut:
        assert self._budget is not None
        conditions = Conditions(
            bundle.directory,
            bundle.manifest,
            task.at_once,
            self.device.engine,
            self.device.settings,
            _vectors(task, covered),
            self._budget.bytes,
            self._budget.idle if self._untouched else None,
        )
        trials = Trials(conditions, self.device.work, lambda name: progress(f"find what fits: try {name}", 0, 1))

        def try_out(boundary: Boundary) -> Trial:
            bundle.training_files(boundary, choose_engine(boundary, self.device.engine))
            return trials(boundary)

        return try_out

    def _refuse(self, manifest: Manifest, digest: str, boundary: Boundary, task: Task, needed: int) -> None:
        """Give a task back. The first time the coordinator learns of it; if it insists, the task has failed."""
        assert self._budget is not None
        problem = (
            f"training from {boundary.name!r} needs {megabytes(needed)} at batch {task.at_once}, and of the "
            f"{megabytes(self._budget.bytes)} allowed {megabytes(self._budget.room)} are left beside the idle process"
        )
        try:
            free = replace(self.profile, tier=None, boundary=None)
            other = OutputSide().choose(manifest, free, task.at_once, task.buffers).name
            problem += f"; {other!r} would fit" + ("" if self._is_free(boundary) else f": --boundary {other}")
        except (InputError, OutOfMemory):
            problem += "; give it more memory"
        again = (digest, boundary.name) in self._refused
        self._refused.add((digest, boundary.name))
        raise (OutOfMemory if again else TooLarge)(problem)


def _vectors(task: Task, covered: Coverage) -> int:
    """Count the vectors, as long as the parameters, that a task has beside what a trial measures.

    The update and the part of it that is sent; what rules hold beside a momentum, and exchange or keep; a model of the
    device's own; and received parameters, where they are not a mapped file.
    """
    rules = sum(2 for rule in task.rules if rule.tracks or rule.keeps)
    own = 2 if task.exchange.keeps_model else 0
    return 1 + task.buffers + rules + own + (1 if covered.boundary.narrow is not None else 0)
