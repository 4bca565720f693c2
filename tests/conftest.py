"""What holds for every test: how quick this machine is, and what else it does, decides nothing."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Tests run side by side. Threads of PyTorch and numpy, one for every core in every process, would spin while they wait
# for each other: that took two thirds of the time.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
