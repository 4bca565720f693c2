"""`embrace train`: fine-tune a bundle on this device's own data, in as much memory as there is."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from federation.bundle_files import check_bundle
from federation.errors import DataError, InputError, TaskFailed
from federation.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from edge_runtime.budget import Allowance
    from edge_runtime.data import Samples
    from edge_runtime.fine_tune import History, Settled
    from federation.metrics import Score


def default_work() -> Path:
    """Where trials are remembered and activations are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embrace"


def train(
    bundle: Annotated[Path, typer.Argument(help="A bundle, as 'embrace export' wrote it.")],
    data: Annotated[str, typer.Option(help="FILE.npz, a folder of images by class, FILE.csv or FILE.py:NAME.")],
    test: Annotated[str | None, typer.Option(help="Data to evaluate with, in any of these forms.")] = None,
    holdout: Annotated[float, typer.Option(help="Without --test: share of the data held out.")] = 0.1,
    label: Annotated[str | None, typer.Option(help="CSV: the column with the label, by name or number.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory budget: 64MB, 1GB. Default: what is free.")] = None,
    boundary: Annotated[
        str | None, typer.Option(help="Train from this boundary or tier on. Default: what fits the memory.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rounds; after each there is a checkpoint.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, max=10_000, help="Passes over the data in a round.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps in a round, instead of --epochs.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Samples in a step.")] = 32,
    rate: Annotated[str, typer.Option(help="Learning rate: 0.05, 0.4/10@800,900, '0.1 cosine 50'.")] = "0.05",
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Local rules in order: momentum=0.9, weight_decay=1e-4, proximal=0.01, sgd."),
    ] = None,
    augment: Annotated[str, typer.Option(help="Images: crop=4,flip")] = "none",
    refresh_every: Annotated[int, typer.Option(min=1, help="Rounds for which augmented activations are kept.")] = 1,
    activations: Annotated[str, typer.Option(help="Stored as float32 or float16.")] = "float32",
    engine: Annotated[str, typer.Option(help="auto, portable or ort-training.")] = "auto",
    profile: Annotated[str, typer.Option(help="auto, fast or low_memory.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the runtime.")] = 1,
    spinning: Annotated[bool, typer.Option(help="Idle threads wait actively.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The trained bundle. Default: BUNDLE-trained")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Default: OUT.checkpoint")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier checkpoint.")] = False,
    allow_single_class: Annotated[bool, typer.Option(help="Train even if all labels are the same.")] = False,
    work: Annotated[Path | None, typer.Option(help="Where activations and trials are kept.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a bundle on local data: as many output-side layers as the memory allows. The data stays here.

    The frozen layers are loaded one after the other, so the model may be larger than the memory. An interrupted run
    goes on from its last round when the same command is given again.

    Example: embrace train bundles/resnet20 --data photos/ --memory 64MB --rounds 5
    """
    manifest = read_manifest(bundle)
    named = bundle if bundle.name not in ("", "..") else bundle.resolve()  # '.' has no name of its own
    out = out or named.with_name(f"{bundle.resolve().name}-trained")
    checkpoint = checkpoint or out.with_name(f"{out.name}.checkpoint")
    try:
        from edge_runtime.budget import allow
        from edge_runtime.data import check_trainable, load_samples, parse_augmentation
        from edge_runtime.engine.session import Settings
        from edge_runtime.fine_tune import kept_boundary
        from edge_runtime.state_file import sole_user
        from edge_runtime.trained_bundle import check_target

        check_target(out)
        check_bundle(bundle, manifest)
        settings = Settings(threads, spinning)
        samples = load_samples(data, manifest, label=label)
        held_out = load_samples(test, manifest, label=label) if test else None
        if held_out is None and holdout:
            samples, held_out = samples.split(holdout, seed)
        boundary = boundary or (None if fresh else kept_boundary(checkpoint))
        check_trainable(samples, allow_single_class)
        parse_augmentation(augment).check(manifest.input.shape)
        most = max(len(samples), len(held_out) if held_out is not None else 0)
        with show.progress("find what fits"):
            allowance = allow(
                bundle,
                manifest,
                batch=min(batch, len(samples)),
                samples=most,
                memory=memory,
                boundary=boundary,
                engine=engine,
                profile=profile,
                settings=settings,
                activations=activations,
                work=work or default_work(),
            )
        settled = _settle(
            allowance.boundary.name,
            samples,
            epochs,
            steps,
            batch,
            rate,
            rule,
            augment,
            refresh_every,
            activations,
            seed,
            allow_single_class,
        )
        if not json_:
            _announce(manifest, allowance, samples, held_out)
        with sole_user(checkpoint):
            if fresh:
                _forget(checkpoint)
            history = _run(bundle, manifest, samples, held_out, settled, allowance, rounds, checkpoint, out)
    except (TaskFailed, DataError) as error:
        if json_:
            show.print_json({"status": error.reason, "message": str(error)})
        raise
    if json_:
        show.print_json(summary(manifest, allowance, history, out))
    else:
        _print(history, allowance, out)


def _forget(checkpoint: Path) -> None:
    try:
        checkpoint.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--fresh cannot remove {checkpoint}: {error.strerror}") from None


def _settle(
    boundary: str,
    samples: Samples,
    epochs: int,
    steps: int | None,
    batch: int,
    rate: str,
    rule: list[str] | None,
    augment: str,
    refresh_every: int,
    activations: str,
    seed: int,
    allow_single_class: bool,
) -> Settled:
    from edge_runtime.data import parse_augmentation
    from edge_runtime.fine_tune import Settled
    from federation.axes.local import parse_rule
    from federation.messages import Task
    from federation.schedule import parse_schedule

    if activations not in ("float32", "float16"):
        raise InputError(f"--activations: expected float32 or float16, got {activations!r}")
    schedule = parse_schedule(rate)
    rules = [found for text in rule or ["momentum=0.9"] if (found := parse_rule(text)) is not None]
    augmentation = parse_augmentation(augment)
    per_epoch = max(1, len(samples) // min(batch, max(1, len(samples))))
    task = Task(
        boundary=boundary,
        steps=steps or epochs * per_epoch,
        batch=batch,
        rate=schedule.at(0),
        rules=tuple(rules),
        seed=seed,
        refresh_every=refresh_every,
        activations="float16" if activations == "float16" else "float32",
        crop=augmentation.crop,
        flip=augmentation.flip,
    )
    return Settled(task, schedule, allow_single_class)


def _run(
    bundle: Path,
    manifest: Manifest,
    samples: Samples,
    held_out: Samples | None,
    settled: Settled,
    allowance: Allowance,
    rounds: int,
    checkpoint: Path,
    out: Path,
) -> History:
    from edge_runtime.fine_tune import fine_tune
    from edge_runtime.trained_bundle import write_trained

    done = 0
    with show.progress("train") as bar:

        def progress(what: str, step: int, total: int) -> None:
            nonlocal done
            if what == "round":
                done = step
            elif what == "train":
                bar(f"round {done + 1} of {rounds}", done * total + step, rounds * total)
            else:
                bar(f"frozen layers, {what}", step, total)

        trained, history = fine_tune(
            bundle,
            manifest,
            samples,
            held_out,
            settled,
            allowance,
            num_rounds=rounds,
            checkpoint=checkpoint,
            progress=progress,
        )
    write_trained(bundle, manifest, allowance.boundary.layer, trained, out)
    checkpoint.unlink(missing_ok=True)
    return history


def summary(manifest: Manifest, allowance: Allowance, history: History, out: Path) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    return {
        "status": "done",
        "model": manifest.name,
        "out": str(out),
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
        "resumed_at": history.resumed_at,
        "before": _score(history.before),
        "after": _score(history.after),
        "rounds": history.rounds,
    }


def _score(score: Score | None) -> dict[str, Any] | None:
    return {**asdict(score), "mean_loss": score.mean_loss, "accuracy": score.accuracy} if score else None


def _announce(manifest: Manifest, allowance: Allowance, samples: Samples, held_out: Samples | None) -> None:
    frozen, layers = allowance.boundary.layer, len(manifest.layers)
    held = f", {show.number(len(held_out))} held out" if held_out is not None else ""
    screen = show.console()
    screen.print(f"{manifest.name}: {show.number(len(samples))} samples{held}", markup=False)
    screen.print(
        f"training from {allowance.boundary.name!r} on: {layers - frozen} of {layers} layers, "
        f"{show.number(manifest.weights_from(frozen))} of {show.number(manifest.weights_from(0))} weights; "
        f"engine {allowance.engine}, profile {allowance.settings.profile}",
        markup=False,
    )
    screen.print(
        f"memory: {show.size(allowance.budget)} ({allowance.budget_from}), idle {show.size(allowance.idle)}, training "
        f"{'took' if allowance.trial else 'is predicted to take'} {show.size(allowance.needed)}"
        f"{' in a trial' if allowance.trial else ''}{_where(allowance)}",
        markup=False,
    )


def _where(allowance: Allowance) -> str:
    if not allowance.boundary.layer:
        return ""  # nothing is stored: all layers are trained
    return f"; activations in {'a file' if allowance.plan.folder else 'memory'}"


def _print(history: History, allowance: Allowance, out: Path) -> None:
    screen = show.console()
    if history.resumed_at:
        screen.print(f"went on after round {history.resumed_at}", markup=False)
    rows = [
        (
            number + 1,
            f"{entry['loss']:.4f}",
            *_evaluation(entry["evaluation"]),
            f"{entry['seconds']['wall']:.1f}",
            show.size(entry["memory"]["anonymous"]) if entry["memory"] else "–",
        )
        for number, entry in enumerate(history.rounds)
    ]
    columns = ("round", "training loss", "held-out loss", "accuracy", "seconds", "peak memory")
    screen.print(show.table("rounds", columns, rows))
    screen.print(show.table("where the time went", ("part", "seconds", "share"), _breakdown(history.rounds)))
    if history.before and history.after:
        before, after = (_words(score) for score in (history.before, history.after))
        screen.print(f"before: {before}; after: {after}", markup=False)
    screen.print(f"trained bundle: {out}", markup=False)


def _evaluation(told: dict[str, Any] | None) -> tuple[str, str]:
    from federation.metrics import Score

    if told is None:
        return "–", "–"
    score = Score(**told)
    return f"{score.mean_loss:.4f}", "–" if score.accuracy is None else f"{100 * score.accuracy:.2f} %"


def _words(score: Score) -> str:
    accuracy = "" if score.accuracy is None else f", accuracy {100 * score.accuracy:.2f} %"
    return f"loss {score.mean_loss:.4f}{accuracy}"


def _breakdown(rounds: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Seconds of each part over all rounds; layers together, steps divided where the runtime's record says how."""
    total: dict[str, float] = {}
    for entry in rounds:
        for name, value in entry["seconds"].items():
            seconds = sum(value.values()) if isinstance(value, dict) else value or 0.0
            total[name] = total.get(name, 0.0) + seconds
    wall = total.pop("wall") or 1.0
    if total["training_forward"]:
        total.pop("training")
    else:
        total.pop("training_forward"), total.pop("backward")
    total.pop("hidden_download")  # lies inside other parts
    total["frozen layers"] = total.pop("forward")
    return [
        (name.replace("_", " "), f"{value:.2f}", f"{100 * value / wall:.1f} %")
        for name, value in sorted(total.items(), key=lambda item: -item[1])
        if value >= 0.001 * wall
    ]
