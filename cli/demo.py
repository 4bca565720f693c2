"""`embrace demo`: the whole of it on a network so small that it takes seconds."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import inspect, show, verify

if TYPE_CHECKING:
    from bench.digits_demo import LocalResult
    from federation.manifest import Manifest
    from model_export.verify import Comparison

TIERS = ("strong", "weak")


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes of each device over its images.")] = 5,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Export a tiny network, inspect it, verify it, and train it on digits: a strong device, then a weak one.

    Example: embrace demo
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "digits"
        with show.progress("export digits") as report:
            manifest = _export(directory, report)
        with show.progress("verify") as report:
            from model_export.verify import verify_bundle

            compared = verify_bundle(directory, progress=report)
        trained = _train(directory, manifest, epochs)
    seconds = time.perf_counter() - started
    if json_:
        show.print_json(
            {
                "inspect": inspect.facts(manifest),
                "verify": verify.summary(compared, Path("digits"), verify.TOLERANCE),
                "training": [{"tier": tier, **asdict(result)} for tier, result in zip(TIERS, trained, strict=True)],
                "seconds": round(seconds, 3),
            }
        )
    else:
        _print(manifest, compared, trained, epochs, seconds)
    verify.refuse(compared, verify.TOLERANCE)


def _export(directory: Path, report: show.Report) -> Manifest:
    from model_export.bundle import export_bundle
    from model_export.source import load_source

    return export_bundle(load_source("digits"), directory, progress=report)


def _train(directory: Path, manifest: Manifest, epochs: int) -> list[LocalResult]:
    """One device after the other, each with its own share of the images, the second from the first one's weights."""
    with show.progress("load digits"):
        from bench.digits_demo import load_digits, train_locally

        shares, held_out = load_digits(manifest, len(TIERS))
    results = []
    for tier, samples in zip(TIERS, shares, strict=True):
        out = directory.with_name(f"digits-{tier}")
        with show.progress(f"train the {tier} device") as report:
            results.append(train_locally(directory, tier, samples, held_out, out, epochs=epochs, progress=report))
        directory = out
    return results


def _print(
    manifest: Manifest, compared: list[Comparison], trained: list[LocalResult], epochs: int, seconds: float
) -> None:
    screen = show.console()
    screen.print("1. embrace export digits: the network becomes a bundle, cut at every layer boundary", style="bold")
    screen.print("2. embrace inspect: what training from each boundary costs", style="bold")
    screen.print(inspect.short_table(manifest))
    screen.print("3. embrace verify: the training graphs against PyTorch's autograd", style="bold")
    verify.print_results(compared, verify.TOLERANCE)
    screen.print(f"4. two devices train it, {epochs} epochs each, with the portable engine", style="bold")
    rows = [
        (
            tier,
            result.boundary,
            show.number(result.trained),
            show.size(result.memory),
            show.size(result.stored),
            f"{result.milliseconds:.2f}",
            f"{result.accuracy_before:.1%}",
            f"{result.accuracy_after:.1%}",
        )
        for tier, result in zip(TIERS, trained, strict=True)
    ]
    columns = ("device", "trains from", "parameters", "memory", "stored", "ms/step", "before", "after")
    screen.print(show.table("accuracy on 360 held-out images", columns, rows, left=2))
    screen.print(
        "The strong device trains the whole network. The weak one continues from its weights: it runs the frozen "
        f"layers once, stores what they give, and trains only the layers behind its boundary. Done in {seconds:.1f} s."
    )
