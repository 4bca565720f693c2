"""Running graphs: sessions, training steps, engines."""

from __future__ import annotations

import sys


def _import_onnxruntime_alone() -> None:
    """Import onnxruntime without PyTorch, which onnxruntime-training loads if it can: 170 MB that no step needs."""
    if "onnxruntime" in sys.modules or "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import onnxruntime  # noqa: F401
    finally:
        del sys.modules["torch"]


_import_onnxruntime_alone()
