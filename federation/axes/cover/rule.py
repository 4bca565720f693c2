"""The vocabulary of coverage: what a device says about itself, and a rule for what it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from federation.capacity import MeasuredNeed, megabytes, predicted_peak
from federation.errors import FieldError, OutOfMemory
from federation.manifest import Boundary, Manifest
from federation.messages import MOST_SAMPLES_PER_STEP

MOST_MEMORY = 2**50  # bytes that a device may claim
MOST_THREADS = 4096
MOST_ENGINES = 8
MOST_LETTERS = 200  # of every text that a device says about itself
TIERS: Mapping[str, float] = MappingProxyType({"moderate": 0.45, "weak": 0.2})  # shares of the channels, EmbracingFL's
MOST_NEEDS = 64  # trials that a device tells of


@dataclass(frozen=True)
class DeviceProfile:
    """What a device says about itself. A boundary that it insists on counts most, then its tier, then its memory.

    Coordinator and device decide by `need` and `fits` what it can train, so that they agree.
    """

    # The metadata describes and bounds each field in the coordinator's REST interface.
    memory: int | None = field(
        default=None,
        metadata={
            "description": "Bytes for training, beside the idle process; null: enough for everything.",
            "ge": 1,
            "le": MOST_MEMORY,
        },
    )
    tier: str | None = field(
        default=None, metadata={"description": "A tier of the bundle, if it is fixed.", "max_length": MOST_LETTERS}
    )
    boundary: str | None = field(
        default=None,
        metadata={"description": "A boundary or tier to train from, if it is fixed.", "max_length": MOST_LETTERS},
    )
    threads: int = field(default=1, metadata={"description": "Threads of its runtime.", "ge": 1, "le": MOST_THREADS})
    runtime: str = field(
        default="",
        metadata={"description": "For people.", "max_length": MOST_LETTERS, "examples": ["onnxruntime 1.31.1"]},
    )
    engines: tuple[str, ...] = field(
        default=("portable",),
        metadata={
            "description": "Training graphs that it runs: portable, ort-training.",
            "min_length": 1,
            "max_length": MOST_ENGINES,
        },
    )
    needs: tuple[MeasuredNeed, ...] = field(
        default=(),
        metadata={"description": "What training took in trial steps on this device.", "max_length": MOST_NEEDS},
    )
    measures: bool = field(
        default=False,
        metadata={"description": "Whether it can measure batch-norm statistics of layers that it does not train."},
    )
    micro_batch: int | None = field(
        default=None,
        metadata={
            "description": "The most samples that it takes through the graph at once; null: as the task says.",
            "ge": 1,
            "le": MOST_SAMPLES_PER_STEP,
        },
    )

    def __post_init__(self) -> None:
        if self.memory is not None and not 1 <= self.memory <= MOST_MEMORY:
            raise FieldError("memory", f"expected bytes from 1 to 2^50, got {self.memory}")
        if not 1 <= self.threads <= MOST_THREADS:
            raise FieldError("threads", f"expected a number from 1 to {MOST_THREADS}, got {self.threads}")
        if self.micro_batch is not None and not 1 <= self.micro_batch <= MOST_SAMPLES_PER_STEP:
            raise FieldError(
                "micro_batch", f"expected a number from 1 to {MOST_SAMPLES_PER_STEP}, got {self.micro_batch}"
            )
        if not 1 <= len(self.engines) <= MOST_ENGINES:
            raise FieldError("engines", f"expected from 1 to {MOST_ENGINES}, got {len(self.engines)}")
        texts = {"tier": self.tier, "boundary": self.boundary, "runtime": self.runtime}
        for name, text in (*texts.items(), *(("engines", engine) for engine in self.engines)):
            if text is not None and not (len(text) <= MOST_LETTERS and text.isprintable()):
                raise FieldError(name, f"expected at most {MOST_LETTERS} characters that can be printed")
        if len(self.needs) > MOST_NEEDS:
            raise FieldError("needs", f"expected at most {MOST_NEEDS}, got {len(self.needs)}")

    def can_run(self, boundary: Boundary) -> bool:
        """Whether one of its engines has a graph for a boundary."""
        portable = "portable" in self.engines and boundary.train is not None
        return portable or ("ort-training" in self.engines and bool(boundary.ort_training))

    def measured(self, manifest: Manifest, boundary: Boundary, batch: int | None = None) -> int | None:
        """Return the bytes that training from a boundary took in a trial step; None: there was none."""
        graph = self.graph(boundary)
        found = [need.bytes for need in self.needs if (need.graph, need.batch) == (graph, batch or manifest.batch)]
        return max(found, default=None)

    def need(self, manifest: Manifest, boundary: Boundary, batch: int | None = None, buffers: int = 1) -> int:
        """Return the bytes of training from a boundary: measured, else predicted.

        A prediction is corrected by what was measured of the boundary that lies nearest.
        """
        own = self.measured(manifest, boundary, batch) if self.needs else None
        if own is not None:
            return own
        known = [(other, self.measured(manifest, other, batch)) for other in manifest.boundaries if self.needs]
        near = [(abs(other.layer - boundary.layer), took, other) for other, took in known if took is not None]
        predicted = predicted_peak(manifest, boundary, batch, buffers)
        if not near:
            return predicted
        _, took, other = min(near, key=lambda one: one[0])
        return predicted * took // max(1, predicted_peak(manifest, other, batch, buffers))

    def fits(self, manifest: Manifest, boundary: Boundary, batch: int | None = None, buffers: int = 1) -> bool:
        """Whether the memory suffices to train from a boundary."""
        return self.memory is None or self.need(manifest, boundary, batch, buffers) <= self.memory

    def check_measured(self, manifest: Manifest, boundary: Boundary, batch: int | None = None) -> None:
        """Refuse what was tried on the device and is known not to fit, even if the device insists on it."""
        took = self.measured(manifest, boundary, batch)
        if took is not None and self.memory is not None and took > self.memory:
            raise OutOfMemory(
                f"training from {boundary.name!r} needs {megabytes(took)}, and {megabytes(self.memory)} are left "
                "beside the idle process; give it more memory or another --boundary"
            )

    def knowing(self, need: MeasuredNeed) -> DeviceProfile:
        """Return a profile that knows what a trial took; the oldest trials are forgotten."""
        others = [known for known in self.needs if (known.graph, known.batch) != (need.graph, need.batch)]
        before = [known.bytes for known in self.needs if (known.graph, known.batch) == (need.graph, need.batch)]
        return replace(self, needs=(replace(need, bytes=max([need.bytes, *before])), *others)[:MOST_NEEDS])

    def graph(self, boundary: Boundary) -> str:
        """Name the graph that the device runs for a boundary: the portable one where it can."""
        if boundary.train is not None and ("portable" in self.engines or not boundary.ort_training):
            return boundary.train.sha256
        return boundary.ort_training[-1].sha256 if boundary.ort_training else ""


class Cover(ABC):
    """A rule for what a device trains: a frozen dataclass."""

    @property
    def by_layer(self) -> bool:
        """Whether devices train whole parameters."""
        return True

    def check(self, manifest: Manifest) -> None:  # noqa: B027 - most rules suit every model
        """Refuse a model that the rule's choices make no sense for."""

    @abstractmethod
    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1) -> str:
        """Say what a device trains, as text: federation/coverage.py; OutOfMemory if it cannot do what the rule asks.

        `batch` is the one for which memory is predicted, None: the manifest's; `buffers` how many vectors local rules
        hold.
        """


@dataclass(frozen=True)
class TieredCover(Cover):
    """The constant that all our rules have: only the widths use it, so that a job may change its rule by one word."""

    tiers: dict[str, float] = field(default_factory=lambda: dict(TIERS))  # the share of a tier's channels
