"""The interpreter of `make venv-stock`: what a device has, the newest stock onnxruntime and no torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "Scripts/python.exe" if os.name == "nt" else "bin/python"
STOCK_PYTHON = Path(os.environ.get("EMBRACE_STOCK_PYTHON", ROOT / ".venv-stock" / PYTHON))
needs_stock_python = pytest.mark.skipif(
    not STOCK_PYTHON.exists(), reason="needs `make venv-stock`, or EMBRACE_STOCK_PYTHON"
)
