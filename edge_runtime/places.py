"""Where a device keeps things, unless it is told otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_work() -> Path:
    """Return the folder for trials, activations, graphs and credentials."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embrace"
