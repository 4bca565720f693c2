"""What the environments of `make venv` and `make venv-stock` must and must not contain."""

from __future__ import annotations

import subprocess
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

DEVICE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-stock" / "bin" / "python"


def test_exactly_one_onnxruntime_is_installed() -> None:
    """Two distributions provide this module; together they overwrite each other's files."""
    assert len(set(packages_distributions()["onnxruntime"])) == 1


@pytest.mark.skipif(not DEVICE_PYTHON.exists(), reason="needs `make venv-stock`")
def test_a_device_has_nothing_heavy() -> None:
    heavy = ["fastapi", "onnx", "pydantic", "sqlalchemy", "torch"]
    program = f"from importlib.util import find_spec; print(*filter(find_spec, {heavy}))"
    assert subprocess.check_output([DEVICE_PYTHON, "-c", program], text=True).split() == []
