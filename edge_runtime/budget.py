"""From a memory budget to a boundary: predicted from the manifest, corrected by trial steps, remembered per bundle.

The budget bounds the anonymous memory of the whole process (memory.py). What the idle process has is taken off first;
the rest is for training, or, before it, for the frozen layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edge_runtime.engine.choose import EngineName, choose_engine
from edge_runtime.engine.session import RUNTIME, Profile, RuntimeSettings
from edge_runtime.files import replacing
from edge_runtime.forward import ForwardPlan
from edge_runtime.measure import Case, measure
from edge_runtime.memory import available_memory, current_memory
from federation.capacity import FLOAT_BYTES, predicted_memory
from federation.errors import InputError, OutOfMemory
from federation.manifest import MANIFEST_NAME, Boundary, Manifest

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?B?)\s*", re.IGNORECASE)
IDLE_GUESS = 45_000_000  # anonymous memory of the idle process where the system does not say
# Beyond the papers' formula: the runtime's own structures, about so many bytes for each byte of a graph, and what its
# arena cannot use.
GRAPH_BYTES, ARENA = 24, 1.15
LARGEST_FORWARD_BATCH = 64


def parse_size(text: str | int) -> int:
    """Parse '64MB', '1.5 GiB' or '500000' into bytes. Units without an i are powers of ten."""
    found = _SIZE.fullmatch(str(text))
    unit = found.group(2).upper() if found else "?"
    unit = unit + "B" if unit in ("K", "M", "G") else unit
    if not found or unit not in _UNITS or not 0 < float(found.group(1)) * _UNITS[unit] < 2**60:
        raise InputError(f"{text!r} is no size: expected something like 64MB, 1.5GB or 256MiB")
    return int(float(found.group(1)) * _UNITS[unit])


@dataclass(frozen=True)
class Trial:
    """What a trial step from a boundary took."""

    anonymous: int
    forward_share: float | None
    step_seconds: float


@dataclass(frozen=True)
class Allowance:
    """What a device will do with its memory."""

    boundary: Boundary
    engine: EngineName
    settings: RuntimeSettings
    plan: ForwardPlan
    budget: int
    budget_from: str  # 'asked for', or where the limit is written
    idle: int
    needed: int  # by training from the boundary, measured if there was a trial
    trial: Trial | None

    @property
    def tight(self) -> bool:
        """Whether training leaves less than it takes: then evaluation has to wait until its session is gone."""
        return 2 * self.needed > self.budget - self.idle


Trials = Callable[[Boundary], Trial]


def predicted_peak(manifest: Manifest, boundary: Boundary, batch: int) -> int:
    """Predict the anonymous bytes that training from a boundary takes."""
    graph = boundary.train.bytes if boundary.train else sum(f.bytes for f in boundary.ort_training[:1])
    return int(ARENA * (predicted_memory(manifest, boundary, batch).total + GRAPH_BYTES * graph))


def largest_fitting(
    manifest: Manifest, batch: int, room: int, trials: Trials | None
) -> tuple[Boundary, int, Trial | None]:
    """Find the boundary nearest to the input that fits, and what it needs; each candidate is tried before it is taken.

    Narrow ones are no candidates: whether a device trains fewer channels instead of fewer layers is the job's choice.
    """
    candidates = [boundary for boundary in manifest.boundaries if boundary.narrow is None]
    known: dict[str, Trial | None] = {}
    correction = 1.0
    while True:
        fitting = [boundary for boundary in candidates if _need(manifest, boundary, batch, correction, known) <= room]
        if not fitting:
            smallest = min(candidates, key=lambda b: _need(manifest, b, batch, correction, known))
            need = _need(manifest, smallest, batch, correction, known)
            raise OutOfMemory(
                f"no boundary of {manifest.name!r} fits: the smallest, {smallest.name!r}, needs about {_mb(need)} at "
                f"batch {batch}, and {_mb(max(room, 0))} are left beside the idle process; give it more memory or use "
                "a smaller batch"
            )
        best = fitting[0]
        if trials is None or best.name in known:
            return best, _need(manifest, best, batch, correction, known), known.get(best.name)
        try:
            known[best.name] = trial = trials(best)
            correction = trial.anonymous / predicted_peak(manifest, best, batch)
        except OutOfMemory:
            known[best.name] = None


def _need(manifest: Manifest, boundary: Boundary, batch: int, correction: float, known: dict[str, Trial | None]) -> int:
    if boundary.name in known:
        trial = known[boundary.name]
        return trial.anonymous if trial else 2**62
    return int(correction * predicted_peak(manifest, boundary, batch))


def allow(
    directory: Path,
    manifest: Manifest,
    *,
    batch: int,
    samples: int,  # to be trained on or evaluated with, whichever are more
    memory: str | int | None = None,
    boundary: str | None = None,
    engine: str = "auto",
    profile: str = "auto",
    settings: RuntimeSettings | None = None,
    activations: str = "float32",
    work: Path,
    try_out: bool = True,
) -> Allowance:
    """Decide: boundary (unless told), engine, profile, how many layers at a time, where activations are kept."""
    settings = settings or RuntimeSettings()
    budget, budget_from = _budget(memory)
    now = current_memory()
    idle = now.anonymous if now else IDLE_GUESS
    room = budget - idle
    if room <= 0:
        raise OutOfMemory(
            f"the budget is {_mb(budget)}, and the idle process alone has {_mb(idle)}; give it more than that"
        )
    trials = remembered(directory, manifest, batch, engine, settings, work) if try_out else None
    if boundary is None:
        chosen, needed, trial = largest_fitting(manifest, batch, room, trials)
    else:
        chosen = manifest.boundary(boundary)
        needed, trial = _check_told(manifest, chosen, batch, room, budget, idle, trials)
    spare = max(room - needed, room // 8)
    plan, picked = _forward_plan(manifest, chosen, spare, samples, profile, activations, work)
    return Allowance(
        chosen,
        choose_engine(chosen, engine),
        replace(settings, profile=picked),
        plan,
        budget,
        budget_from,
        idle,
        needed,
        trial,
    )


def _budget(memory: str | int | None) -> tuple[int, str]:
    if memory is not None:
        return parse_size(memory), "asked for"
    now, rest = current_memory(), available_memory()
    if rest is None:
        raise InputError("this system does not say how much memory is free; say how much to use with --memory")
    return rest[0] + (now.anonymous if now else 0), rest[1]


def _check_told(
    manifest: Manifest, boundary: Boundary, batch: int, room: int, budget: int, idle: int, trials: Trials | None
) -> tuple[int, Trial | None]:
    """Refuse a named boundary that does not fit, and say which one would."""
    needed, trial = predicted_peak(manifest, boundary, batch), None
    # The prediction may be off by half; what is hopeless is not tried.
    if trials is not None and needed < 2 * room:
        try:
            trial = trials(boundary)
            needed = trial.anonymous
        except OutOfMemory:
            needed = max(needed, room + 1)
    if needed <= room:
        return needed, trial
    problem = (
        f"training from {boundary.name!r} needs about {_mb(needed)} at batch {batch}, and of the {_mb(budget)} allowed "
        f"{_mb(max(room, 0))} are left beside the idle process"
    )
    try:
        other, need, _ = largest_fitting(manifest, batch, room, trials)
    except OutOfMemory:
        raise OutOfMemory(f"{problem}; no other boundary fits either: use a smaller batch or more memory") from None
    raise OutOfMemory(f"{problem}; {other.name!r} would fit ({_mb(need)}): --boundary {other.name}")


def check_profile(profile: str) -> None:
    if profile not in ("auto", "fast", "low_memory"):
        raise InputError(f"no profile is called {profile!r}: expected auto, fast or low_memory")


def _forward_plan(
    manifest: Manifest, boundary: Boundary, spare: int, samples: int, profile: str, activations: str, work: Path
) -> tuple[ForwardPlan, Profile]:
    """Plan how to run the frozen layers in what training leaves: the runtime keeps the memory that it once had.

    Half of it is for weights, a quarter for the batch that passes through, a quarter for stored activations; what does
    not fit there goes to a file.
    """
    frozen = manifest.layers[: boundary.layer]
    weights = [FLOAT_BYTES * sum(p.size for p in layer.parameters) for layer in frozen]
    check_profile(profile)
    picked: Profile = "fast" if profile == "fast" else "low_memory"
    if profile == "auto" and 2 * max(weights, default=0) <= spare // 2:
        picked = "fast"
    # Evaluation takes the trained layers the same way, so all of them decide how much goes through at once.
    through = max(FLOAT_BYTES * max(layer.activations, math.prod(layer.output.shape)) for layer in manifest.layers)
    batch = max(1, min(LARGEST_FORWARD_BATCH, spare // 4 // (2 * through)))
    # A group reads one store and writes the next: two of the largest are there at once.
    largest = max(math.prod(layer.output.shape) for layer in manifest.layers)
    stored = 2 * samples * largest * (2 if activations == "float16" else 4)
    folder = None if stored <= spare // 4 else work / "activations"
    return ForwardPlan(batch=batch, memory=spare // 2, folder=folder), picked


def remembered(
    directory: Path, manifest: Manifest, batch: int, engine: str, settings: RuntimeSettings, work: Path
) -> Trials:
    """Make trial steps, each once for a bundle, a batch size, an engine and a runtime; results are kept in a file."""
    digest = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()[:16]
    file = work / "trials" / f"{digest}.json"

    def trial(boundary: Boundary) -> Trial:
        used = choose_engine(boundary, engine)
        key = f"{boundary.name} {used} batch={batch} threads={settings.threads} {RUNTIME}"
        known = _read_trials(file)
        if key not in known:
            case = Case(str(directory), boundary.name, used, batch, settings.threads)
            found = measure(case)
            made = Trial(
                found.memory.get("anonymous", predicted_peak(manifest, boundary, batch)),
                found.forward_share,
                min(found.training),
            )
            known = {**_read_trials(file), key: made}
            _write_trials(file, known)
        return known[key]

    return trial


def _read_trials(file: Path) -> dict[str, Trial]:
    """Read the trials of before; a file that cannot be read is as good as none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(key): Trial(**value) for key, value in json.loads(file.read_text()).items()}
    return {}


def _write_trials(file: Path, trials: dict[str, Trial]) -> None:
    with contextlib.suppress(OSError):  # remembering is a convenience
        text = json.dumps({key: asdict(value) for key, value in trials.items()}, indent=1)
        with replacing(file, durable=False, draft=file.with_suffix(f".{os.getpid()}.new")) as draft:
            draft.write(text.encode())


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 10**7 else f"{count / 1e6:.1f} MB"
