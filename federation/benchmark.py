"""What training costs on a device, boundary by boundary: one document for every kind of agent, so that they compare."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from federation.errors import FieldError
from federation.manifest import Manifest

MOST_COSTS = 256  # boundaries of a bundle that a benchmark tells of
MOST_TIERS = 16  # ... names of one of them
MOST_LETTERS = 200  # of every text
MOST_SECONDS = 1e6
MOST_BYTES = 2**50
MOST_COUNT = 65_536  # of samples, iterations, threads and cores
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _seconds(description: str) -> dict[str, Any]:
    return {"description": description, "ge": 0, "le": MOST_SECONDS}


def _count(description: str) -> dict[str, Any]:
    return {"description": description, "ge": 1, "le": MOST_COUNT}


def _text(description: str, *examples: str) -> dict[str, Any]:
    return {"description": description, "max_length": MOST_LETTERS, "examples": list(examples)}


def _memory(description: str) -> dict[str, Any]:
    return {"description": description, "ge": 0, "le": MOST_BYTES}


# The metadata describes and bounds each field in the coordinator's REST interface.
@dataclass(frozen=True)
class PartSeconds:
    """Where the seconds of one batch go, over the iterations: medians of each part, and quartiles of the whole."""

    load: float = field(metadata=_seconds("To open the graphs, once."))
    frozen_forward: float = field(metadata=_seconds("Running the frozen layers; once per round and sample."))
    activation_io: float = field(metadata=_seconds("Writing stored activations and reading them again."))
    training: float = field(metadata=_seconds("Forward and backward pass of the trained layers."))
    optimiser: float = field(metadata=_seconds("The local rule: weight decay and momentum."))
    batch: float = field(metadata=_seconds("Median of all but `load`: about the sum of the parts."))
    low: float = field(metadata=_seconds("First quartile of the same."))
    high: float = field(metadata=_seconds("Third quartile of the same."))
    backward: float | None = field(
        default=None, metadata=_seconds("Of `training`; null: the runtime does not say how it divides.")
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (math.isfinite(value) and 0 <= value <= MOST_SECONDS):
                raise FieldError(name, f"expected seconds from 0 to {MOST_SECONDS:g}, got {value}")
        if not self.low <= self.batch <= self.high:
            raise FieldError("batch", f"expected from `low`, {self.low}, to `high`, {self.high}, got {self.batch}")
        if self.backward is not None and self.backward > self.training:
            raise FieldError("backward", f"expected at most `training`, {self.training}, got {self.backward}")


@dataclass(frozen=True)
class BoundaryCost:
    """What training from one boundary costs, or why it could not be measured."""

    boundary: str = field(metadata=_text("The first layer that is trained.", "dense"))
    tiers: tuple[str, ...] = field(
        default=(), metadata={"description": "Those that train from there.", "max_length": MOST_TIERS}
    )
    seconds: PartSeconds | None = field(default=None, metadata={"description": "null: see `problem`."})
    memory: int | None = field(
        default=None, metadata=_memory("Peak bytes of a round on top of the idle agent; null: the system does not say.")
    )
    problem: str = field(default="", metadata=_text("Why it could not be measured.", "needs 77 MB, 40 MB are free"))

    def __post_init__(self) -> None:
        _check_texts(self, "boundary", "problem")
        if not self.boundary:
            raise FieldError("boundary", "expected a name")
        if len(self.tiers) > MOST_TIERS or not all(map(_is_short, self.tiers)):
            raise FieldError("tiers", f"expected at most {MOST_TIERS} names of at most {MOST_LETTERS} characters")
        if (self.seconds is None) == (not self.problem):
            raise FieldError("problem", "expected either `seconds` or a `problem`")
        _check_memory("memory", self.memory)


@dataclass(frozen=True)
class Benchmark:
    """A measurement of a bundle on a device. A newer one replaces that of the same bundle, batch, runtime, threads."""

    bundle: str = field(
        metadata={"description": "sha256 of its manifest", "pattern": "^[0-9a-f]{64}$", "examples": ["5f70bf18…"]}
    )
    model: str = field(metadata=_text("Its name.", "resnet20"))
    batch: int = field(metadata=_count("Samples of a step."))
    iterations: int = field(metadata=_count("Over which medians were taken."))
    runtime: str = field(metadata=_text("What ran the graphs.", "onnxruntime 1.31.1, portable"))
    threads: int = field(metadata=_count("Of the runtime."))
    costs: tuple[BoundaryCost, ...] = field(
        metadata={"description": "Each boundary once.", "min_length": 1, "max_length": MOST_COSTS}
    )
    processor: str = field(default="", metadata=_text("The board or the processor.", "Raspberry Pi 4 Model B Rev 1.4"))
    system: str = field(default="", metadata=_text("The operating system, or the browser.", "Debian 12 (aarch64)"))
    cores: int = field(default=1, metadata=_count("That the agent may use."))
    idle: int | None = field(
        default=None, metadata=_memory("Bytes of the agent's own before anything was loaded; null: unknown.")
    )

    def __post_init__(self) -> None:
        _check_texts(self, "model", "runtime", "processor", "system")
        if _SHA256.fullmatch(self.bundle) is None:
            raise FieldError("bundle", "expected 64 hexadecimal digits")
        for name in ("batch", "iterations", "threads", "cores"):
            if not 1 <= (value := getattr(self, name)) <= MOST_COUNT:
                raise FieldError(name, f"expected a number from 1 to {MOST_COUNT}, got {value}")
        if not 1 <= len(self.costs) <= MOST_COSTS:
            raise FieldError("costs", f"expected from 1 to {MOST_COSTS}, got {len(self.costs)}")
        if len({cost.boundary for cost in self.costs}) < len(self.costs):
            raise FieldError("costs", "expected each boundary once")
        _check_memory("idle", self.idle)

    def check_bundle(self, manifest: Manifest) -> None:
        """Refuse a benchmark that names other things than its bundle has."""
        if self.model != manifest.name:
            raise FieldError("model", f"expected {manifest.name!r}, the bundle's, got {self.model!r}")
        known = {boundary.name for boundary in manifest.boundaries}
        for place, cost in enumerate(self.costs):
            if cost.boundary not in known:
                raise FieldError(("costs", place, "boundary"), f"the bundle has no boundary {cost.boundary!r}")
            if cost.tiers != tiers_of(manifest, cost.boundary):
                raise FieldError(("costs", place, "tiers"), f"they are not the bundle's at {cost.boundary!r}")


def tiers_of(manifest: Manifest, boundary: str) -> tuple[str, ...]:
    """List the tiers of a bundle that train from a boundary."""
    return tuple(tier for tier, name in manifest.tiers.items() if name == boundary)


def _is_short(text: str) -> bool:
    return len(text) <= MOST_LETTERS and text.isprintable()


def _check_texts(holder: object, *names: str) -> None:
    for name in names:
        if not _is_short(getattr(holder, name)):
            raise FieldError(name, f"expected at most {MOST_LETTERS} characters that can be printed")


def _check_memory(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MOST_BYTES:
        raise FieldError(name, f"expected bytes from 0 to 2^50, got {count}")
