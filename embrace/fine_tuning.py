"""Fine-tune a bundle on this machine's own data, in as much memory as there is. The data stays here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from edge_runtime.budget import Allowance, allow, open_budget
from edge_runtime.bundle_files import own_tokenizer
from edge_runtime.data import Samples, check_trainable, load_samples, parse_augmentation
from edge_runtime.data.load import Data
from edge_runtime.engine.session import FrozenType, RuntimeSettings
from edge_runtime.files import sole_user
from edge_runtime.fine_tune import History, Settled, fine_tune, kept_boundary
from edge_runtime.places import default_work
from edge_runtime.trained_bundle import check_target, write_trained
from embrace.bundles import Bundle, Progress, quiet, written_to
from embrace.trackers import OnRound, Tracker, tracked
from federation.axes.local import LocalRule, parse_rule
from federation.errors import InputError
from federation.messages import Task
from federation.metrics import Score
from federation.schedule import parse_schedule

Announce = Callable[[Allowance, Samples, "Samples | None"], None]  # what was decided, before training begins


@dataclass(frozen=True)
class Training:
    """What a run of `train` came to."""

    bundle: Bundle  # the trained one
    allowance: Allowance
    history: History

    @property
    def before(self) -> Score | None:
        """The score on the held-out data before training."""
        return self.history.before

    @property
    def after(self) -> Score | None:
        """The score on the held-out data after training."""
        return self.history.after

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """A report of every round: loss, seconds by part, peak memory, evaluation."""
        return self.history.rounds

    def to_json(self) -> dict[str, Any]:
        """Return everything as `embrace train --json` prints it."""
        allowance = self.allowance
        return {
            "status": "done",
            "model": self.bundle.name,
            "out": str(self.bundle.path),
            "boundary": allowance.boundary.name,
            "engine": allowance.engine,
            "profile": allowance.settings.profile,
            "memory": {
                "budget": allowance.budget,
                "budget_from": allowance.budget_from,
                "idle": allowance.idle,
                "needed": allowance.needed,
                "measured": allowance.trial is not None,
            },
            "forward": {"batch": allowance.plan.batch, "store": "disk" if allowance.plan.folder else "memory"},
            "resumed_at": self.history.resumed_at,
            "before": _encode(self.before),
            "after": _encode(self.after),
            "rounds": self.rounds,
        }

    def __repr__(self) -> str:
        share = "" if self.after is None or self.after.accuracy is None else f", accuracy {self.after.accuracy:.1%}"
        return f"Training(from {self.allowance.boundary.name!r}, {len(self.rounds)} rounds{share})"


def train(
    bundle: Bundle | str | Path,
    data: Data,
    *,
    test: Data | None = None,
    holdout: float = 0.1,
    label: str | None = None,
    tokenizer: str | Path | None = None,
    memory: str | int | None = None,
    boundary: str | None = None,
    rounds: int = 5,
    epochs: int = 1,
    steps: int | None = None,
    batch: int = 32,
    rate: float | str = 0.05,
    rules: Sequence[LocalRule | str] = ("momentum=0.9",),
    clip_norm: float | None = None,
    micro_batch: int | None = None,
    augment: str = "none",
    refresh_every: int = 1,
    activations: Literal["float32", "float16"] = "float32",
    engine: str = "auto",
    profile: str = "auto",
    threads: int = 1,
    spinning: bool = True,
    frozen: FrozenType = "float32",
    seed: int = 0,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    fresh: bool = False,
    allow_single_class: bool = False,
    work: str | Path | None = None,
    announce: Announce = lambda allowance, samples, held_out: None,
    on_round: OnRound = lambda record: None,
    track: str | Tracker | None = None,
    progress: Progress = quiet,
) -> Training:
    """Train as many output-side layers as the memory allows; the frozen ones are loaded one after the other.

    `data` is a pair of arrays, or what the command line takes: FILE.npz, a folder of images by class, FILE.csv,
    FILE.jsonl, FILE.txt or FILE.py:NAME; names of classes that it has travel in the trained bundle. `tokenizer` is the
    tokenizer.json that makes tokens of texts; without it the bundle's. `memory` is a budget such as "64MB";
    `boundary` a boundary or tier instead. With `frozen` "int8" the layers in front of it run in 8 bits: less exact, in
    less time. `clip_norm` shortens longer gradients; with `micro_batch` so many samples of a batch go through at once,
    and their gradients are added. With `out` an interrupted run goes on from its last round when it is repeated;
    without, the trained bundle is a temporary folder. `on_round` is called with the report of each round; `track` keeps
    its numbers in "tensorboard", "mlflow" or "wandb", or in a tracker of your own.

    >>> training = embrace.train(bundle, (x, y), rounds=3, boundary="weak")
    >>> training.allowance.boundary.name
    '3'
    >>> training.after.mean_loss < training.before.mean_loss
    True
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    manifest = bundle.manifest
    for name, value in (("rounds", rounds), ("epochs", epochs), ("batch", batch), ("threads", threads)):
        if value < 1:
            raise InputError(f"{name}: expected at least 1, got {value}")
    if memory is not None:
        open_budget(memory)  # before anything is read that takes long
    found: list[tuple[Allowance, History]] = []

    def each(entry: dict[str, Any]) -> None:
        log(_tracked(entry))
        on_round(entry)

    def write(target: Path) -> None:
        kept = Path(checkpoint) if checkpoint is not None else target.with_name(f"{target.name}.checkpoint")
        check_target(target)
        bundle.check()
        chosen = Path(tokenizer) if tokenizer is not None else own_tokenizer(bundle.path, manifest)
        opened = partial(load_samples, manifest=manifest, label=label, tokenizer=chosen)
        samples, held_out = _open_data(opened, data, test, holdout, seed)
        check_trainable(samples, allow_single_class)
        named = manifest if samples.class_names is None else replace(manifest, classes=tuple(samples.class_names))
        augmentation = parse_augmentation(augment)
        augmentation.check(manifest.input.shape)
        if activations not in ("float32", "float16"):
            raise InputError(f"activations: expected float32 or float16, got {activations!r}")
        schedule = parse_schedule(str(rate))
        task = Task(
            boundary="",
            steps=steps or epochs * max(1, len(samples) // min(batch, max(1, len(samples)))),
            batch=batch,
            rate=schedule.at(0),
            rules=_rules(rules),
            seed=seed,
            refresh_every=refresh_every,
            activations=activations,
            crop=augmentation.crop,
            flip=augmentation.flip,
            clip_norm=clip_norm,
            micro_batch=micro_batch,
        )
        progress("find what fits", 0, 1)
        allowance = allow(
            bundle.path,
            manifest,
            batch=min(task.at_once, len(samples)),
            samples=max(len(samples), len(held_out) if held_out is not None else 0),
            memory=memory,
            boundary=boundary or (None if fresh else kept_boundary(kept)),
            engine=engine,
            profile=profile,
            settings=RuntimeSettings(threads, spinning, frozen=frozen),
            activations=activations,
            work=Path(work) if work is not None else default_work(),
            buffers=task.buffers,
        )
        task = replace(task, boundary=allowance.boundary.name)
        announce(allowance, samples, held_out)
        in_use = f"{kept} is in use by another process; wait for its end or keep yours elsewhere"
        with sole_user(kept.with_name(f"{kept.name}.lock"), in_use):
            if fresh:
                _forget(kept)
            trained, history = fine_tune(
                bundle.path,
                manifest,
                samples,
                held_out,
                Settled(task, schedule, allow_single_class),
                allowance,
                num_rounds=rounds,
                checkpoint=kept,
                progress=progress,
                on_round=each,
            )
            write_trained(bundle.path, named, allowance.boundary.layer, trained, target)
            kept.unlink(missing_ok=True)
        found.append((allowance, history))

    config: dict[str, Any] = {
        "bundle": str(bundle.path),
        "data": str(data) if isinstance(data, (str, Path)) else "arrays",
    }
    config |= {"rounds": rounds, "epochs": epochs, "steps": steps, "batch": batch, "rate": rate, "rules": str(rules)}
    config |= {"clip_norm": clip_norm, "micro_batch": micro_batch}
    config |= {"memory": memory, "boundary": boundary, "augment": augment, "engine": engine, "seed": seed}
    with tracked(track, bundle.name if out is None else Path(out).name, config) as log:
        return Training(written_to(out, write), *found[0])


def _tracked(entry: dict[str, Any]) -> dict[str, Any]:
    """Name the numbers of a round's report as those of a simulation are named."""
    told = {name: entry[name] for name in ("round", "loss", "samples", "steps", "seconds", "memory")}
    if entry["evaluation"] is not None:
        found = Score(**entry["evaluation"])
        told |= {"test_loss": found.mean_loss, "accuracy": found.accuracy}
    return told


def _open_data(
    opened: Callable[[Data], Samples], data: Data, test: Data | None, holdout: float, seed: int
) -> tuple[Samples, Samples | None]:
    """Return the samples to train on, and those to score with."""
    samples = opened(data)
    if test is not None:
        return samples, opened(test)
    return samples.split(holdout, seed) if holdout else (samples, None)


def _rules(rules: Sequence[LocalRule | str]) -> tuple[LocalRule, ...]:
    parsed = (parse_rule(rule) if isinstance(rule, str) else rule for rule in rules)
    return tuple(rule for rule in parsed if rule is not None)


def _forget(checkpoint: Path) -> None:
    try:
        checkpoint.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--fresh cannot remove {checkpoint}: {error.strerror}") from None


def _encode(score: Score | None) -> dict[str, Any] | None:
    return {**asdict(score), **score.describe()} if score else None
