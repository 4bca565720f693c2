"""`embrace train`: fine-tune a bundle on this device's own data, in as much memory as there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from federation.errors import DataError, TaskFailed
from federation.manifest import Manifest

if TYPE_CHECKING:
    from edge_runtime.budget import Allowance
    from edge_runtime.data import Samples
    from edge_runtime.fine_tune import History
    from federation.metrics import Score


def train(
    bundle: Annotated[Path, typer.Argument(help="A bundle, as 'embrace export' wrote it.")],
    data: Annotated[str, typer.Option(help=show.DATA)],
    test: Annotated[str | None, typer.Option(help="Data to evaluate with, in any of these forms.")] = None,
    holdout: Annotated[float, typer.Option(help="Without --test: share of the data held out.")] = 0.1,
    label: Annotated[str | None, typer.Option(help="CSV: the column with the label, by name or number.")] = None,
    tokenizer: show.Tokenizer = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory budget of the whole process: 64MB. Default: what is free.")
    ] = None,
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
        typer.Option(
            help="Local rules in order: momentum=0.9, adam, adamw=0.01, weight_decay=1e-4, proximal=0.01, sgd."
        ),
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Shorten longer gradients to this norm.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Samples of a batch that go through at once; less memory.")
    ] = None,
    augment: Annotated[str, typer.Option(help="Images: crop=4,flip")] = "none",
    refresh_every: Annotated[int, typer.Option(min=1, help="Rounds for which augmented activations are kept.")] = 1,
    activations: Annotated[str, typer.Option(help="Stored as float32 or float16.")] = "float32",
    engine: Annotated[str, typer.Option(help="auto, portable or ort-training.")] = "auto",
    profile: Annotated[str, typer.Option(help="auto, fast or low_memory.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the runtime.")] = 1,
    spinning: Annotated[bool, typer.Option(help="Several threads wait actively within a step.")] = True,
    frozen: show.Frozen = "float32",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The trained bundle. Default: BUNDLE-trained")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Default: OUT.checkpoint")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier checkpoint.")] = False,
    allow_single_class: Annotated[bool, typer.Option(help="Train even if all labels are the same.")] = False,
    work: Annotated[Path | None, typer.Option(help="Where activations and trials are kept.")] = None,
    track: show.Track = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a bundle on local data: as many output-side layers as the memory allows. The data stays here.

    The frozen layers are loaded one after the other, so the model may be larger than the memory. An interrupted run
    goes on from its last round when the same command is given again.

    Example: embrace train bundles/resnet20 --data photos/ --memory 64MB --rounds 5

    Example: embrace train minilm --data reviews.jsonl --memory 128MB --rule adamw=0.01 --rate 1e-4
    """
    named = bundle if bundle.name not in ("", "..") else bundle.resolve()  # '.' has no name of its own
    out = out or named.with_name(f"{bundle.resolve().name}-trained")
    try:
        with show.progress("train") as bar:
            from embrace.bundles import Bundle
            from embrace.fine_tuning import train

            opened = Bundle(bundle)
            training = train(
                opened,
                data,
                test=test,
                holdout=holdout,
                label=label,
                tokenizer=tokenizer,
                memory=memory,
                boundary=boundary,
                rounds=rounds,
                epochs=epochs,
                steps=steps,
                batch=batch,
                rate=rate,
                rules=rule or ["momentum=0.9"],
                clip_norm=clip_norm,
                micro_batch=micro_batch,
                augment=augment,
                refresh_every=refresh_every,
                activations=activations,  # type: ignore[arg-type]
                engine=engine,
                profile=profile,
                threads=threads,
                spinning=spinning,
                frozen=frozen,  # type: ignore[arg-type]
                seed=seed,
                out=out,
                checkpoint=checkpoint,
                fresh=fresh,
                allow_single_class=allow_single_class,
                work=work,
                announce=_silent if json_ else partial(_announce, opened.manifest),
                track=track,
                progress=_RoundsBar(bar, rounds),
            )
    except (TaskFailed, DataError) as error:
        if json_:
            show.print_json({"status": error.reason, "message": str(error)})
        raise
    if json_:
        show.print_json(training.to_json())
    else:
        _print(training.history, out)


def _silent(allowance: Allowance, samples: Samples, held_out: Samples | None) -> None:
    """Announce nothing."""


class _RoundsBar:
    """A bar over all rounds, and over the frozen layers in between."""

    def __init__(self, bar: show.Progress, rounds: int) -> None:
        self._bar = bar
        self._rounds = rounds
        self._done = 0

    def __call__(self, what: str, step: int, total: int) -> None:
        if what == "round":
            self._done = step
        elif what == "train":
            self._bar(f"round {self._done + 1} of {self._rounds}", self._done * total + step, self._rounds * total)
        else:
            self._bar(what if what == "find what fits" else f"frozen layers, {what}", step, total)


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
        f"{' in a trial' if allowance.trial else ''}{_where(manifest, allowance)}",
        markup=False,
    )


def _where(manifest: Manifest, allowance: Allowance) -> str:
    if not manifest.frozen(allowance.boundary):
        return ""  # nothing is stored: all layers are trained
    return f"; activations in {'a file' if allowance.plan.folder else 'memory'}"


def _print(history: History, out: Path) -> None:
    screen = show.console()
    if history.resumed_at:
        screen.print(f"went on after round {history.resumed_at}", markup=False)
    rows = [
        (
            number + 1,
            f"{entry['loss']:.4f}",
            *_evaluation(entry["evaluation"]),
            f"{entry['seconds']['wall']:.1f}",
            show.peak(entry["memory"]),
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
    heads = "".join(f", {name} {_words(part)}" for name, part in score.parts.items())
    return f"loss {score.mean_loss:.4f}{accuracy}{heads}"


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
