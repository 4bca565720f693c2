"""Running graphs: sessions, training steps, engines."""

from __future__ import annotations

import sys


def _import_onnxruntime_alone() -> None:
    """onnxruntime-training loads PyTorch where that is installed: three seconds and 170 MB that no step needs."""
    if "onnxruntime" in sys.modules or "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import onnxruntime  # noqa: F401
    finally:
        del sys.modules["torch"]


_import_onnxruntime_alone()
