"""Scores one version of a bundle's weights on data, in a process of its own.

python -m edge_runtime.evaluate_version < request.json > score.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.calibrate import batches_of, calibrated
from edge_runtime.data import load_samples
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.session import Settings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from federation.errors import EmbraceError


def main() -> None:
    """Read a request from standard input (bundle, weights, data, statistics); write a score to standard output."""
    request = json.load(sys.stdin)
    directory = Path(request["bundle"])
    try:
        manifest = read_manifest(directory)
        samples = load_samples(request["data"], manifest)
        weights = map_weights(Path(request["weights"]), manifest.space)
        if request["statistics"] == "static":
            step = open_step(directory, manifest, manifest.whole)
            weights = calibrated(step, manifest.space, weights, batches_of(samples))
        source = BundleSource(directory, manifest)
        evaluator = Evaluator(directory, source, 0, samples, settings=Settings(), plan=ForwardPlan())
        found = evaluator.score(weights)
    except EmbraceError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    json.dump({**asdict(found), "mean_loss": found.mean_loss, "accuracy": found.accuracy}, sys.stdout)


if __name__ == "__main__":
    main()
