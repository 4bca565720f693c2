"""The vocabulary of coverage: what a device says about itself, and a rule for what it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from federation.errors import FieldError
from federation.manifest import Boundary, Manifest

TIERS: Mapping[str, float] = MappingProxyType({"moderate": 0.45, "weak": 0.2})  # shares of the channels, EmbracingFL's


@dataclass(frozen=True)
class DeviceProfile:
    """What a device says about itself. The boundary it measured counts most, then its tier, then its memory."""

    memory: int | None = None  # bytes for training, beside the idle process; None: enough for everything
    tier: str | None = None  # fixed by the fleet's administrator
    boundary: str | None = None  # nearest to the input that the device can train, as it measured
    threads: int = 1
    runtime: str = ""
    engines: tuple[str, ...] = ("portable",)

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise FieldError("memory", f"expected bytes above 0, got {self.memory}")
        if self.threads < 1:
            raise FieldError("threads", f"expected at least 1, got {self.threads}")
        if not self.engines:
            raise FieldError("engines", "expected at least one, got none")

    def can_run(self, boundary: Boundary) -> bool:
        """Whether one of its engines has a graph for a boundary."""
        portable = "portable" in self.engines and boundary.train is not None
        return portable or ("ort-training" in self.engines and bool(boundary.ort_training))


class Cover(Protocol):
    """A rule for what a device trains. `batch` is the one for which memory is predicted; None: the manifest's."""

    @property
    def by_layer(self) -> bool:
        """Whether devices train whole parameters."""

    def choose(self, manifest: Manifest, profile: DeviceProfile, batch: int | None) -> Boundary:
        """Choose the graph that the device runs; OutOfMemory if it cannot do what the rule asks for."""

    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None) -> str:
        """Say what the device trains, as text: federation/coverage.py."""


@dataclass(frozen=True)
class ByLayer:
    """What the rules that train whole layers have in common."""

    tiers: dict[str, float] = field(default_factory=lambda: dict(TIERS))  # for the widths; a job may change its rule

    @property
    def by_layer(self) -> bool:
        return True
