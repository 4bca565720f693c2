"""Make this process ignore Ctrl-C. Imported first by the process that workers are forked from, and by no other.

So no worker is interrupted, not even while it starts. The process that started them is, and closes their pipes.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
