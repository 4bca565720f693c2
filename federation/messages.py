"""What travels between the coordinator and a device, defined once for both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from federation.axes.local import LOCAL, LocalRule, check_rules, working_vectors
from federation.axes.local.rule import check_constant
from federation.decode import decode, encode
from federation.errors import FieldError, InputError
from federation.exchange import Exchange
from federation.identity import is_plain
from federation.manifest import Boundary, Manifest

MOST_STEPS = 10_000_000
MOST_SAMPLES_PER_STEP = 65_536
MOST_PIXELS = 65_536


@dataclass(frozen=True)
class Task:
    """One device's work in one round."""

    boundary: str  # what it trains: federation/coverage.py
    steps: int
    batch: int
    rate: float
    rules: tuple[Annotated[LocalRule, LOCAL], ...] = ()
    seed: int = 0  # with the round: order of samples, dropout, augmentation
    round: int = 0
    refresh_every: int = 1  # rounds for which stored activations are used; 1: they are always fresh
    activations: Literal["float32", "float16"] = "float32"
    crop: int = 0  # augmentation of images: pad by so many pixels and crop back; 0: none
    flip: bool = False  # ... mirror every other image
    epochs: int | None = None  # passes over the local data instead of a number of steps
    exchange: Exchange = field(default_factory=Exchange)
    holdout: float = 0.0  # share of the local data that is never trained on
    evaluate: bool = False  # score the received version on that share, before training
    clip_norm: float | None = None  # longer gradients are shortened to this
    micro_batch: int | None = None  # samples that go through the graph at once; None: the whole batch
    good_since: int = 0  # the first round whose activations are used, whatever `refresh_every` says

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise FieldError("holdout", f"expected a share in [0, 1), got {self.holdout}")
        for name, value, least, most in (
            ("steps", self.steps, 1, MOST_STEPS),
            ("batch", self.batch, 1, MOST_SAMPLES_PER_STEP),
            ("round", self.round, 0, MOST_STEPS),
            ("refresh_every", self.refresh_every, 1, MOST_STEPS),
            ("good_since", self.good_since, 0, MOST_STEPS),
            ("crop", self.crop, 0, MOST_PIXELS),
            ("epochs", self.epochs, 1, MOST_STEPS),
            ("micro_batch", self.micro_batch, 1, MOST_SAMPLES_PER_STEP),
        ):
            if value is not None and not least <= value <= most:
                raise FieldError(name, f"expected a number from {least} to {most}, got {value}")
        if self.activations not in ("float32", "float16"):
            raise FieldError("activations", f"expected 'float32' or 'float16', got {self.activations!r}")
        if self.clip_norm is not None and not 0 < self.clip_norm < 1e30:
            raise FieldError("clip_norm", f"expected a number above 0, got {self.clip_norm}")
        check_constant("rate", self.rate)
        check_rules(self.rules)

    @property
    def at_once(self) -> int:
        """How many samples go through the graph at once."""
        return min(self.batch, self.micro_batch or self.batch)

    @property
    def buffers(self) -> int:
        """How many vectors, as long as the parameters, a step has beside them and its gradients."""
        return working_vectors(self.rules) + (self.at_once < self.batch)

    def check_parts(self, manifest: Manifest, boundary: Boundary | None = None) -> None:
        """Refuse parts of a batch that would train something else than the batch: by the loss, or by batch norm."""
        if self.at_once == self.batch:
            return
        if reason := manifest.loss.couples:
            raise FieldError("micro_batch", f"{reason}, so it cannot go through in parts; leave micro_batch out")
        statistics = manifest.statistics_from(0) if boundary is None else manifest.statistics_of(boundary)
        if statistics and 1 in (self.at_once, self.batch % self.at_once):
            raise FieldError(
                "micro_batch",
                f"{self.at_once} of {self.batch} leaves parts of one sample, over which batch norm has no variance; "
                "expected parts of two samples or more",
            )

    def in_parts(self, most: int | None, manifest: Manifest, samples: int | None = None) -> Task:
        """Return the task of a device that takes at most so many samples through the graph at once.

        Where batch norm would get a part of one sample, of a batch or of the `samples` that the device has, it is the
        next smaller size without, else the next larger. Where the loss couples samples the batch goes whole.
        """
        if most is None or most >= self.at_once or manifest.loss.couples:
            return self
        batch = min(self.batch, samples or self.batch)
        for size in (*range(most, 0, -1), *range(most + 1, self.at_once)):
            found = replace(self, micro_batch=size)
            try:
                replace(found, batch=batch).check_parts(manifest)
            except FieldError:
                continue
            return found
        return self

    def for_samples(self, samples: int) -> Task:
        """Return the task of a device with so many samples: passes over them become steps, of full batches only."""
        if self.epochs is None:
            return self
        return replace(self, steps=self.epochs * max(1, samples // self.batch), epochs=None)


_NEWER = ("holdout", "evaluate", "clip_norm", "micro_batch", "good_since")


def encode_task(task: Task) -> dict[str, Any]:
    """Turn a task into JSON; what older devices do not know is left out where it means nothing."""
    found: dict[str, Any] = encode(task)
    return {name: value for name, value in found.items() if value or name not in _NEWER}


def decode_task(data: Any) -> Task:
    """Read what `encode_task` made; a FieldError names what is wrong."""
    return decode(Task, data, "task", defaults=True)


@dataclass(frozen=True)
class TaskOffer:
    """A device's work: fetch `version`, train as `work` says, send the update before the lease ends."""

    # The metadata describes each field in the coordinator's REST interface.
    id: str = field(metadata={"examples": ["1f2e3d4c5b6a7988-0-2-1"]})
    job: str = field(metadata={"examples": ["1f2e3d4c5b6a7988"]})
    bundle: str = field(metadata={"description": "sha256 of the bundle's manifest", "examples": ["5f70bf18…"]})
    version: int = field(metadata={"description": "Of the weights to start from.", "examples": [0]})
    lease_until: float = field(metadata={"description": "seconds since 1970", "examples": [1767225600.0]})
    work: dict[str, Any] = field(
        metadata={
            "description": "Where training begins, how many steps of which batch, the rate, the local rules, the seed.",
            "examples": [
                {"boundary": "dense", "steps": 10, "batch": 32, "rate": 0.05, "rules": [], "seed": 2, "round": 0}
            ],
        }
    )

    storage: str | None = field(
        default=None,
        repr=False,  # it is a secret
        metadata={
            "description": "Asked for with `storage=1`: a URL from which ranges of the version's weights can be read; "
            "the update may be uploaded to object storage, too. Absent if bytes go through the coordinator."
        },
    )

    def check(self) -> None:
        """Its names become parts of paths on the device; a coordinator could send any."""
        for name in (self.id, self.job, self.bundle):
            if not is_plain(name):
                raise InputError(f"a task's name is {str(name)[:80]!r}; expected letters, digits, '_', '-' and '.'")


@dataclass(frozen=True)
class Report:
    """What a device says about a task: how it ended and what it cost. Of the data it says only how much there is."""

    status: str  # 'done', or the reason of a failure
    boundary: str
    engine: str
    profile: str
    round: int
    steps: int
    batch: int
    samples: int
    loss: float | None  # mean over the steps
    last_loss: float | None
    seconds: dict[str, Any] = field(default_factory=dict)  # see edge_runtime/timing.py
    memory: dict[str, int] = field(default_factory=dict)  # peak bytes on top of the idle process
    bytes: dict[str, int] = field(default_factory=dict)  # stored activations, downloaded, uploaded
    message: str = ""  # of a failure, in words
    lost_state: bool = False  # what the device had kept is gone; it went on from the server's values
    activations_age: int = 0  # rounds since the frozen layers gave what was trained on
    # Of the received version on the held-out share: federation/metrics.py, Score. Empty: it was not asked for.
    evaluation: dict[str, Any] = field(default_factory=dict)
