"""A picture of a fleet and its coordinator: how long requests took, and what the server's process had to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from simulation.plots import COLOURS, save, tidy


def plot_fleet(found: Mapping[str, Any], bar: float, file: Path) -> None:
    """Draw what `measure` of fleet.py returned; `bar` is the time in which control requests shall be answered."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    answers, work = figure.subplots(1, 2)
    for number, (kind, own) in enumerate(found["requests"].items()):
        shares, seconds = zip(*own["curve"])
        answers.plot(seconds, shares, label=f"{kind} ({own['count']:,})", color=COLOURS[number % len(COLOURS)])
    answers.axvline(bar, color="#999999", linestyle="--", linewidth=1)
    answers.axhline(99, color="#999999", linestyle="--", linewidth=1)
    answers.set_xscale("log")
    answers.set_xlabel("seconds until the answer")
    answers.set_ylabel("% of the requests")
    answers.set_title(f"{found['devices']:,} devices, {found['selected']:,} selected a round")
    answers.legend(frameon=False)
    tidy(answers, "both")
    looked = found["server"]["by_second"]
    step = found["seconds"] / max(len(looked["cpu"]) - 1, 1)
    times = [step * number for number in range(1, len(looked["cpu"]))]
    busy = [100 * (later - earlier) / step for earlier, later in zip(looked["cpu"], looked["cpu"][1:])]
    work.plot(times, busy, color=COLOURS[0], label="processor, % of a core")
    work.plot(times, [one / 1e6 for one in looked["memory"][1:]], color=COLOURS[1], label="memory, MB")
    ended = 0.0
    for row in found["rounds"]:
        ended += row["seconds"]
        work.axvline(ended, color="#999999", linestyle="--", linewidth=1)
    work.set_ylim(bottom=0)
    work.set_xlabel("seconds; dashed: a round ends")
    work.set_title("the coordinator's process")
    work.legend(frameon=False)
    tidy(work, "both")
    save(figure, file)
