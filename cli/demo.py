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
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1437 training images.")] = 5,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Export a tiny network, inspect it, verify it, and train it on scikit-learn's digits: all of it, then its end.

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
        trained = [_train(directory, tier, epochs) for tier in TIERS]
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


def _train(directory: Path, tier: str, epochs: int) -> LocalResult:
    with show.progress(f"train {tier}") as report:
        from bench.digits_demo import load_digits, train_locally

        return train_locally(directory, tier, load_digits(), epochs=epochs, progress=report)


def _print(
    manifest: Manifest, compared: list[Comparison], trained: list[LocalResult], epochs: int, seconds: float
) -> None:
    screen = show.console()
    screen.print("1. embrace export digits: the network becomes a bundle, cut at every layer boundary", style="bold")
    screen.print("2. embrace inspect: what training from each boundary costs", style="bold")
    screen.print(inspect.boundaries_table(manifest))
    screen.print("3. embrace verify: the training graphs against PyTorch's autograd", style="bold")
    verify.print_results(compared, verify.TOLERANCE)
    screen.print(f"4. training on a device: {epochs} epochs of scikit-learn's digits, stock onnxruntime", style="bold")
    rows = [
        (
            f"{tier} (from {result.boundary})",
            show.number(result.trained),
            show.size(result.memory),
            show.size(result.stored),
            f"{result.milliseconds:.2f}",
            f"{result.accuracy_before:.1%}",
            f"{result.accuracy_after:.1%}",
        )
        for tier, result in zip(TIERS, trained, strict=True)
    ]
    columns = (
        "device",
        "parameters trained",
        "predicted memory",
        "stored activations",
        "ms per step",
        "before",
        "after",
    )
    screen.print(show.table("accuracy on 360 held-out images", columns, rows))
    screen.print("A strong device trains the whole network. A weak one runs the frozen layers once, stores what they")
    screen.print(f"give, and trains only the layers behind its boundary. Done in {seconds:.1f} s.")
