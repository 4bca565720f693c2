"""Loaded first by the process that workers are forked from: none of them hears Ctrl-C, not even while it starts.

The one who started them does, and closes their pipes. Importing this is its effect; nobody else does.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
