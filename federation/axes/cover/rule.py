"""The vocabulary of coverage: what a device says about itself, and a rule for what it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from federation.errors import FieldError
from federation.manifest import Boundary, Manifest

TIERS: Mapping[str, float] = MappingProxyType({"moderate": 0.45, "weak": 0.2})  # shares of the channels, EmbracingFL's


@dataclass(frozen=True)
class DeviceProfile:
    """What a device says about itself. The boundary it measured counts most, then its tier, then its memory."""

    # The metadata describes and bounds each field in the coordinator's REST interface.
    memory: int | None = field(
        default=None, metadata={"description": "Bytes for training; null: enough for everything.", "ge": 1}
    )
    tier: str | None = field(
        default=None, metadata={"description": "A tier of the bundle, if it is fixed.", "max_length": 200}
    )
    boundary: str | None = field(
        default=None,
        metadata={"description": "Nearest to the input from which this device can train.", "max_length": 200},
    )
    threads: int = field(default=1, metadata={"description": "Threads of its runtime.", "ge": 1, "le": 4096})
    runtime: str = field(
        default="", metadata={"description": "For people.", "max_length": 200, "examples": ["onnxruntime 1.31.1"]}
    )
    engines: tuple[str, ...] = field(
        default=("portable",),
        metadata={
            "description": "Training graphs that it runs: portable, ort-training.",
            "min_length": 1,
            "max_length": 8,
        },
    )

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


class Cover(ABC):
    """A rule for what a device trains: a frozen dataclass."""

    @property
    def by_layer(self) -> bool:
        """Whether devices train whole parameters."""
        return True

    @abstractmethod
    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None) -> str:
        """Say what a device trains, as text: federation/coverage.py; OutOfMemory if it cannot do what the rule asks.

        `batch` is the one for which memory is predicted; None: the manifest's.
        """


@dataclass(frozen=True)
class TieredCover(Cover):
    """The constant that all our rules have: only the widths use it, so that a job may change its rule by one word."""

    tiers: dict[str, float] = field(default_factory=lambda: dict(TIERS))  # the share of a tier's channels
