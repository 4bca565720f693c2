"""`embrace verify`: does a bundle compute what its source computes?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from embrace.bundles import HALF_TOLERANCE, TOLERANCE, Bundle, refuse_differences
from embrace.cli import show

if TYPE_CHECKING:
    from model_export.verify import Comparison

KINDS = ("loss", "gradients", "statistics")


def verify(
    directory: Annotated[Path, typer.Argument(help="A bundle, as 'embrace export' wrote it.")],
    source: Annotated[
        str | None, typer.Option(help="Where the model is now, if it moved: file.py:factory or model.onnx")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help=f"Largest relative error allowed. Default: {TOLERANCE:g}; with memory plan half {HALF_TOLERANCE:g}.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=2, help="Samples in each random batch.")] = 4,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a bundle with its source: every layer's output, every loss, gradient and new statistic.

    Exits with 1 if anything differs by more than the tolerance.

    Example: embrace verify bundles/resnet20
    """
    bundle = Bundle(directory)  # a wrong directory is answered before PyTorch is loaded
    signer = bundle.signer
    tolerance = bundle.tolerance if tolerance is None else tolerance
    with show.progress("verify") as report:
        results = bundle.compare(source, tolerance=tolerance, batch=batch, progress=report)
    if json_:
        show.print_json({**summary(results, directory, tolerance), "signer": signer})
    else:
        show.console().print(f"signed by {signer}" if signer else "not signed", markup=False, soft_wrap=True)
        print_results(results, tolerance)
    refuse_differences(results, tolerance)


def summary(results: list[Comparison], directory: Path, tolerance: float) -> dict[str, Any]:
    """All errors, as `--json` prints them; an error that is no number is null and counts as failed."""
    largest = max(result.largest() for result in results)
    return {
        "directory": str(directory),
        "tolerance": tolerance,
        "passed": largest <= tolerance,
        "largest": _finite(largest),
        "results": [
            {
                "boundary": result.boundary,
                "engine": result.engine,
                "inputs": result.inputs,
                "rounding": _finite(result.rounding),
                "largest": _finite(result.largest()),
                "worst": result.worst,
                "skipped": result.skipped,
                "errors": {kind: _finite(result.largest(kind)) for kind in _kinds(result)},
            }
            for result in results
        ],
    }


def print_results(results: list[Comparison], tolerance: float) -> None:
    """Print the table of errors and the verdict."""
    rows = [
        (
            result.boundary,
            result.engine,
            result.worst,
            *(_error(result, kind, tolerance) for kind in ("layers", *KINDS)),
            result.inputs,
        )
        for result in results
    ]
    columns = ("boundary", "engine", "worst tensor", "outputs", "loss", "gradients", "statistics", "inputs")
    screen = show.console()
    screen.print(show.table("largest relative error", columns, rows, left=3))
    for reason in dict.fromkeys(result.skipped for result in results if result.skipped):
        screen.print(f"note: {reason}", markup=False)
    rounding = max(result.rounding for result in results)
    if rounding > tolerance:
        screen.print(
            f"note: PyTorch's own float32 is up to {rounding:.1e} away from float64 here; errors are measured by that",
            markup=False,
        )
    largest = max(result.largest() for result in results)
    verdict = Text("PASS", "bold green") if largest <= tolerance else Text("FAIL", "bold red")
    screen.print(Text.assemble(verdict, f": largest relative error {largest:.2e}, tolerance {tolerance:g}"))


def _kinds(result: Comparison) -> list[str]:
    return sorted({kind for kind, _ in result.tensors})


def _error(result: Comparison, kind: str, tolerance: float) -> Text:
    if kind not in _kinds(result):
        return Text("–")
    value = result.largest(kind)
    return Text(f"{value:.1e}", "" if value <= tolerance else "bold red")


def _finite(value: float) -> float | None:
    """Replace infinity by None: JSON has none."""
    return value if math.isfinite(value) else None
