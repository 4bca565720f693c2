"""From a memory budget to a boundary: predicted from the manifest, corrected by trial steps, remembered per bundle.

The budget bounds the anonymous memory of the whole process (memory.py). What the idle process has is taken off first;
the rest is for training, or, before it, for the frozen layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge_runtime.engine.choose import EngineName, check_engine, choose_engine, engines_of
from edge_runtime.engine.session import Profile, RuntimeSettings, give_back_memory, is_untouched, keep_heap_small
from edge_runtime.forward import ForwardPlan
from edge_runtime.memory import Memory, available_memory, current_memory
from edge_runtime.trial import Conditions, Trial, Trials
from federation.axes.cover import DeviceProfile, OutputSide
from federation.capacity import FLOAT_BYTES, MeasuredNeed, megabytes, predicted_peak
from federation.errors import InputError, OutOfMemory
from federation.manifest import Boundary, Manifest

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?B?)\s*", re.IGNORECASE)
IDLE_GUESS = 45_000_000  # anonymous memory of the idle process where the system does not say
LARGEST_FORWARD_BATCH = 64
# Bytes of anonymous memory that a process gains when it begins to work, beside training: connections, buffers of
# downloads, scratch memory of the frozen layers. In agents at the tightest budgets, over twenty rounds, at most 2.3 MB.
AT_WORK = 3_000_000
LEAST_BARE = 10**6  # a bare number below was not meant as bytes
PLENTY = 4  # times what is needed: with so much memory nothing has to be tried
HOPELESS = 1.25  # what passed the limit takes at least so much more than was thought
DOUBT = 1.2  # times the room: what is predicted to need no more may fit
DOUBTED = 2  # boundaries of that kind that are tried


def parse_size(text: str | int) -> int:
    """Parse '64MB', '1.5 GiB' or '500000' into bytes. Units without an i are powers of ten."""
    found = _SIZE.fullmatch(str(text))
    unit = found.group(2).upper() if found else "?"
    unit = unit + "B" if unit in ("K", "M", "G") else unit
    if not found or unit not in _UNITS or not 0 < float(found.group(1)) * _UNITS[unit] < 2**60:
        raise InputError(f"{text!r} is no size: expected something like 64MB, 1.5GB or 256MiB")
    return int(float(found.group(1)) * _UNITS[unit])


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


TryOut = Callable[[Boundary], Trial]


@dataclass(frozen=True)
class Budget:
    """Bytes of anonymous memory that the whole process may have."""

    bytes: int
    origin: str  # 'asked for', or where the limit is written
    idle: Memory | None  # what the process had before it trained anything

    @property
    def idle_bytes(self) -> int:
        return self.idle.anonymous if self.idle else IDLE_GUESS

    @property
    def room(self) -> int:
        """Bytes that are left for training; at work a process has buffers, too, that it lacks when it is idle."""
        return self.bytes - self.idle_bytes - AT_WORK


def open_budget(memory: str | int | None) -> Budget:
    """Take what is allowed, or what the system leaves; refuse what the idle process has already.

    A budget that was asked for changes how this process's heap gives memory back, until the process ends.
    """
    now = current_memory()
    if memory is not None:
        keep_heap_small()
        found = Budget(parse_memory(memory), "asked for", now)
    else:
        rest = available_memory()
        if rest is None:
            raise InputError("this system does not say how much memory is free; say how much to use with --memory")
        found = Budget(rest[0] + (now.anonymous if now else 0), rest[1], now)
    if found.room <= 0:
        raise OutOfMemory(
            f"{megabytes(found.bytes)} allowed, the idle process takes {megabytes(found.idle_bytes)}; "
            "give it more memory"
        )
    return found


def parse_memory(text: str | int) -> int:
    """Parse a memory budget; a bare number is too easily meant as megabytes."""
    size = parse_size(text)
    if size < LEAST_BARE and str(text).strip().isdigit():
        raise InputError(f"memory: {size} bytes? write {size}MB, or {size}B if you mean it")
    return size


def largest_fitting(
    manifest: Manifest, batch: int, room: int, try_out: TryOut | None, engine: str = "auto", buffers: int = 1
) -> tuple[Boundary, int, Trial | None]:
    """Find the boundary nearest to the input that fits, and what it needs; each candidate is tried before it is taken.

    Narrow ones are no candidates: whether a device trains fewer channels instead of fewer layers is the job's choice.
    """
    profile = DeviceProfile(max(1, room), engines=engines_of(engine))
    boundary, profile, trial = search(manifest, batch, profile, try_out, buffers)
    return boundary, profile.need(manifest, boundary, batch, buffers), trial


def search(
    manifest: Manifest, batch: int, profile: DeviceProfile, try_out: TryOut | None, buffers: int = 1
) -> tuple[Boundary, DeviceProfile, Trial | None]:
    """Find what the coordinator would choose for a device, each candidate tried once; return what was learnt, too.

    A prediction may be too high: the boundaries next to the chosen one that it puts just above the room are tried, too.
    """
    trials: dict[str, Trial | None] = {}
    while True:
        best = OutputSide().choose(manifest, profile, batch, buffers)
        if try_out is None:
            return best, profile, None
        doubtful = _just_above(manifest, batch, profile, best, buffers) if best.name in trials else [best]
        untried = next((boundary for boundary in doubtful if boundary.name not in trials), None)
        if untried is None:
            return best, profile, trials[best.name]
        trials[untried.name], profile = tried(manifest, batch, profile, untried, try_out, buffers)


def _just_above(
    manifest: Manifest, batch: int, profile: DeviceProfile, chosen: Boundary, buffers: int
) -> list[Boundary]:
    """List untried boundaries nearer to the input than the chosen one that seem to need a little more than there is."""
    assert profile.memory is not None
    nearer = [b for b in manifest.boundaries if b.narrow is None and b.layer < chosen.layer and profile.can_run(b)]
    nearest = sorted(nearer, key=lambda boundary: -boundary.layer)[:DOUBTED]
    untried = [b for b in nearest if profile.measured(manifest, b, batch) is None]
    return [b for b in untried if profile.need(manifest, b, batch, buffers) <= DOUBT * profile.memory]


def tried(
    manifest: Manifest, batch: int, profile: DeviceProfile, boundary: Boundary, try_out: TryOut, buffers: int = 1
) -> tuple[Trial | None, DeviceProfile]:
    """Try a boundary; return the trial, None if it did not fit, and a profile that knows what it took."""
    assert profile.memory is not None
    try:
        trial = try_out(boundary)
    except OutOfMemory:  # at least so much: it is known only that it passed the limit
        least = max(profile.memory + 1, int(HOPELESS * profile.need(manifest, boundary, batch, buffers)))
        return None, profile.knowing(MeasuredNeed(profile.graph(boundary), batch, least))
    return trial, profile.knowing(MeasuredNeed(profile.graph(boundary), batch, max(1, trial.anonymous)))


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
    buffers: int = 1,
) -> Allowance:
    """Decide: boundary (unless told), engine, profile, how many layers at a time, where activations are kept.

    `batch` is what goes through a graph at once; `buffers` how many vectors the local rules hold.
    """
    settings = settings or RuntimeSettings()
    check_engine(engine)
    give_back_memory()
    found = open_budget(memory)
    limit, idle = found.bytes if memory is not None else None, found.idle if is_untouched() else None
    conditions = Conditions(directory, manifest, batch, engine, settings, buffers - 1, limit, idle)
    try_one = Trials(conditions, work) if try_out else None
    if boundary is None:
        chosen, needed, trial = largest_fitting(manifest, batch, found.room, try_one, engine, buffers)
    else:
        chosen = manifest.boundary(boundary)
        needed, trial = _check_told(manifest, chosen, batch, found, try_one, engine, buffers)
    plan, picked = forward_plan(
        manifest, chosen, found.room, needed, samples, profile, memory is not None, activations, work
    )
    return Allowance(
        chosen,
        choose_engine(chosen, engine),
        replace(settings, profile=picked),
        plan,
        found.bytes,
        found.origin,
        found.idle_bytes,
        needed,
        trial,
    )


def _check_told(
    manifest: Manifest,
    boundary: Boundary,
    batch: int,
    budget: Budget,
    try_out: TryOut | None,
    engine: str,
    buffers: int,
) -> tuple[int, Trial | None]:
    """Refuse a named boundary that does not fit, and say which one would."""
    needed, trial = predicted_peak(manifest, boundary, batch, buffers), None
    # The prediction may be off by half; what is hopeless is not tried.
    if try_out is not None and needed < 2 * budget.room:
        try:
            trial = try_out(boundary)
            needed = trial.anonymous
        except OutOfMemory:
            needed = max(needed, budget.room + 1)
    if needed <= budget.room:
        return needed, trial
    problem = (
        f"training from {boundary.name!r} needs about {megabytes(needed)} at batch {batch}, and of the "
        f"{megabytes(budget.bytes)} allowed {megabytes(budget.room)} are left beside the idle process"
    )
    try:
        other, need, _ = largest_fitting(manifest, batch, budget.room, try_out, engine, buffers)
    except OutOfMemory:
        raise OutOfMemory(f"{problem}; no other boundary fits either: use a smaller batch or more memory") from None
    raise OutOfMemory(f"{problem}; {other.name!r} would fit ({megabytes(need)}): --boundary {other.name}")


def check_profile(profile: str) -> None:
    if profile not in ("auto", "fast", "low_memory"):
        raise InputError(f"no profile is called {profile!r}: expected auto, fast or low_memory")


def forward_plan(
    manifest: Manifest,
    boundary: Boundary,
    room: int,
    needed: int,
    samples: int,
    profile: str,
    asked: bool,
    activations: str,
    work: Path,
) -> tuple[ForwardPlan, Profile]:
    """Plan how to run the frozen layers, before training and beside what it keeps.

    `fast` keeps the training session while the layers run, so they have what it leaves. `low_memory` closes it first
    and returns its memory, so they have the whole room. Half of it is for weights, a quarter for the batch that passes
    through, a quarter for stored activations; what does not fit there goes to a file.

    Where no budget was `asked` for and memory is plenty, the layers pass beside training with an eighth of what it
    takes: its own peak is the process's, and a small batch is as quick as a large one.
    """
    if not asked and PLENTY * needed <= room:
        room, profile = needed, "fast" if profile == "auto" else profile
    weights = [FLOAT_BYTES * manifest.elements_of(layer) for layer in manifest.frozen(boundary)]
    check_profile(profile)
    # Evaluation takes the trained layers the same way, so all of them decide how much goes through at once.
    pieces = (*manifest.layers, *manifest.frozen(boundary))
    unmade = None if manifest.loss_chunk is None else manifest.layers[-1]  # whose outputs are never whole
    made = [layer for layer in pieces if layer is not unmade]
    outputs = [math.prod(layer.output.shape) for layer in made] or [math.prod(manifest.input.shape)]
    through = FLOAT_BYTES * max([*(layer.activations for layer in made), *outputs])
    left = max(room - needed, 0)
    # Between the layers' blocks those of the training session come to lie less densely than in a trial.
    roomy = max(4 * max(weights, default=0), 8 * through, needed // 3) <= left
    picked: Profile = "fast" if profile == "fast" or (profile == "auto" and roomy) else "low_memory"
    spare = max(left, room // 8) if picked == "fast" else room
    batch = max(1, min(LARGEST_FORWARD_BATCH, spare // 4 // (2 * through)))
    # A group reads one store and writes the next: two of the largest are there at once. They stay while it trains.
    stored = 2 * samples * max(outputs) * (2 if activations == "float16" else 4)
    folder = None if stored <= left // 4 else work / "activations"
    return ForwardPlan(batch=batch, memory=spare // 2, folder=folder), picked
