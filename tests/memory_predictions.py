"""Predicted peaks of training beside measured ones, for every model of the zoo and those of memory_models.

    python -m tests.memory_predictions            # all models; writes the results page's second table
    python -m tests.memory_predictions resnet20   # prints the rows of one

Exporting needs PyTorch; what is measured runs on the stock runtime, as a device's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_runtime.measure import Case
from federation.capacity import predicted_memory, predicted_peak
from federation.manifest import Manifest
from model_export.zoo import ZOO
from tests.memory_models import OWN, export_named
from tests.stock_python import ROOT, STOCK_PYTHON

BATCH = 32
# The oracle is blind below a megabyte: blocks that the heap had free from imports do not add to what is resident.
# femnist_cnn from its classifier is measured with 1.3 MB, and its three vectors alone are 1.5.
SMALL = 1_000_000
PAGE = ROOT / "docs" / "results" / "memory-budget.md"
HEAD = "| model | from | papers' formula | predicted peak | measured | off by |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Prediction:
    """What was said of training from one boundary, and what a fresh process took. Bytes."""

    model: str
    boundary: str
    formula: int  # the papers'
    predicted: int
    measured: int

    def row(self) -> str:
        sizes = " | ".join(f"{size / 1e6:.1f}" for size in (self.formula, self.predicted, self.measured))
        return f"| {self.model} | `{self.boundary}` | {sizes} | {100 * (self.predicted / self.measured - 1):+.0f} % |"


def places(manifest: Manifest) -> list[str]:
    """From the input, the middle and near the output: where a graph is largest, usual and smallest."""
    names = [b.name for b in manifest.boundaries if b.train and b.narrow is None]
    return [names[i] for i in sorted({0, len(names) // 2, 3 * len(names) // 4, len(names) - 1})]


def compare(name: str, folder: Path, python: Path) -> Iterator[Prediction]:
    """Export a model and train it from its places, each in a fresh process of an interpreter."""
    manifest = export_named(name, folder)
    for place in places(manifest):
        boundary = manifest.boundary(place)
        case = Case(str(folder / name), place, batch=BATCH, warm_up=0, iterations=3, divide=False)
        yield Prediction(
            model=name,
            boundary=place,
            formula=predicted_memory(manifest, boundary, BATCH).total,
            predicted=predicted_peak(manifest, boundary, BATCH),
            measured=_measured(case, python),
        )


def _measured(case: Case, python: Path) -> int:
    # onnxruntime-training loads PyTorch where that is installed: two seconds and 200 MB that a device does not have.
    hiding = "sys.modules['torch'] = None"
    program = f"import runpy, sys; {hiding}; runpy.run_module('edge_runtime.measure', run_name='__main__')"
    request = json.dumps(asdict(case))
    command = [str(python), "-c", program]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=True, cwd=ROOT)
    answer: dict[str, Any] = json.loads(done.stdout)
    return int(answer["memory"]["anonymous"])


def main(names: Sequence[str]) -> None:
    rows = []
    for name in names or [*OWN, *ZOO]:
        with tempfile.TemporaryDirectory(prefix="embrace-predictions-") as folder:
            for found in compare(name, Path(folder), STOCK_PYTHON):
                if found.measured > SMALL:
                    rows.append(found.row())
                    print(rows[-1], flush=True)
    if not names:
        text = PAGE.read_text()
        start, end = "<!-- predictions -->\n", "<!-- end of predictions -->"
        before, after = text.partition(start)[0], text.partition(end)[2]
        lines = "\n".join([HEAD, *rows])
        PAGE.write_text(f"{before}{start}{lines}\n{end}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
