"""Write the golden vectors of the Python and TypeScript suites: python -m tests.golden.write [--bundles [NAME…]]"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.golden import pure, rounds

FOLDER = rounds.FOLDER
MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"input_shape": (1, 6, 6), "splits": ("stem", "head"), "widths": (0.5,)},
    "depthwise": {"input_shape": (1, 6, 6), "splits": ("stem", "head")},
    "mlp": {"input_shape": (5,), "loss": "mse", "splits": ("first", "last")},
    "text": {
        "input_shape": (7,),
        "vocabulary": 20,
        "loss": "bce_with_logits",
        "splits": ("embedding", "lstm@2", "classifier"),
    },
}


def write_bundles(names: Collection[str]) -> None:
    """Export small models; needs PyTorch, and changes every file of theirs."""
    from federation.manifest import Loss
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    for name in names:
        about = MODELS[name]
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        source = load_source(
            f"tests/golden/models.py:{name}",
            input_shape=about["input_shape"],
            input_dtype="int64" if "vocabulary" in about else None,
            vocabulary=about.get("vocabulary"),
            loss=Loss(about.get("loss", "cross_entropy")),
            batch=4,
        )
        export_bundle(source, FOLDER / name, Choices(about["splits"], widths=about.get("widths", ())))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if sys.argv[1:2] == ["--bundles"]:
        write_bundles(sys.argv[2:] or MODELS)
    with tempfile.TemporaryDirectory() as folder:
        found = {"pure.json": pure.everything(), "rounds.json": rounds.everything(Path(folder))}
    for name, content in found.items():
        (FOLDER / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
