"""What the environments of `make venv` and `make venv-stock` must and must not contain."""

from __future__ import annotations

import subprocess
from importlib.metadata import packages_distributions

from tests.stock_python import STOCK_PYTHON, needs_stock_python


def test_exactly_one_onnxruntime_is_installed() -> None:
    """Two distributions provide this module; together they overwrite each other's files."""
    assert len(set(packages_distributions()["onnxruntime"])) == 1


@needs_stock_python
def test_a_device_has_nothing_heavy() -> None:
    heavy = ["fastapi", "onnx", "pydantic", "sqlalchemy", "torch"]
    program = f"from importlib.util import find_spec; print(*filter(find_spec, {heavy}))"
    assert subprocess.check_output([STOCK_PYTHON, "-c", program], text=True).split() == []
