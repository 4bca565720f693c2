"""What the workers of the pool's tests do: they are built by name, in processes of their own."""

from __future__ import annotations

import os
import signal
import time


def build(settings, shared):
    seen = []

    def work(job, slot):
        seen.append(job["number"])
        if job.get("raise"):
            raise ValueError(f"job {job['number']} is not to my taste\nand more")
        if job.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(job.get("sleep", 0))
        slot["out"][:] = shared["x"] * job["number"] + settings["add"]
        return {"number": job["number"], "pid": os.getpid(), "exact": job["number"] / 3}

    return work
