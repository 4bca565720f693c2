"""Run every graph of a directory in whatever environment this is started: numpy and onnxruntime are enough.

For each NAME.onnx the inputs are in NAME.npz. Its outputs go to NAME.found.npz, or the error to NAME.error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


def run(path: Path) -> None:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    with np.load(path.with_suffix(".npz")) as feed:
        found = session.run(names, dict(feed))
    np.savez(path.with_suffix(".found.npz"), **dict(zip(names, found)))


def main(directory: Path) -> None:
    for path in sorted(directory.glob("*.onnx")):
        try:
            run(path)
        except Exception as error:  # onnxruntime raises several unrelated types
            path.with_suffix(".error").write_text(f"onnxruntime {ort.__version__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
