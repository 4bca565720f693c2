"""Write a partition down: one archive per device, as `embrace agent --data` reads them, and one for testing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from federation.errors import InputError
from simulation.datasets.dataset import Dataset, Progress, silent
from simulation.partitioners import Numbers

RECORD = "split.json"  # written last: a folder without it is incomplete


def write_split(
    data: Dataset, parts: list[Numbers], facts: dict[str, Any], folder: Path, progress: Progress = silent
) -> list[Path]:
    """Write archives without compression, which are mapped, not read. `facts` say how it was dealt."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty; expected a folder that is new or empty")
        digits = max(3, len(str(len(parts) - 1)))
        files = [folder / f"device-{number:0{digits}}.npz" for number in range(len(parts))]
        for number, (file, part) in enumerate(zip(files, parts)):
            progress(file.name, number, len(parts) + 1)
            np.savez(file, x=data.x_train[part], y=data.y_train[part])
        progress("test.npz", len(parts), len(parts) + 1)
        np.savez(folder / "test.npz", x=data.x_test, y=data.y_test)
        record = {**facts, "numpy": np.__version__, "sizes": [len(part) for part in parts]}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from None
    return files
