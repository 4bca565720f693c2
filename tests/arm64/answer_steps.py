"""Take the training steps that a file asks for, as a device does, and write every number that comes out.

    python -m tests.arm64.answer_steps BUNDLE ASKED.npz ANSWERS.npz

What is asked: `x`, `labels` and the `seed` of dropout, and for each boundary the weights, as `BOUNDARY/weights`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import read_manifest
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.portable import LayerForward


def main() -> None:
    bundle, asked, answers = map(Path, sys.argv[1:])
    began = time.perf_counter()
    manifest = read_manifest(bundle)
    given = np.load(asked)
    found = {}
    for name in (key.removesuffix("/weights") for key in given if key.endswith("/weights")):
        boundary = manifest.boundary(name)
        x = given["x"]
        for layer in manifest.layers[: boundary.layer]:
            x = LayerForward(bundle / layer.forward.name)(x)
        step = open_step(bundle, manifest, boundary, "portable")
        step.parameters[:] = given[f"{name}/weights"]
        found[f"{name}/loss"] = np.array(step.run(x, given["labels"], int(given["seed"])))
        found |= {f"{name}/{key}": value for key, value in step.results.items()}
    np.savez(answers, seconds=np.array(time.perf_counter() - began), **found)


if __name__ == "__main__":
    main()
