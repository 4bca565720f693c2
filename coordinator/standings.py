"""How a device does in a job: what a success and a failure change, and for how long a device that fails is benched.

A device that fails for its own reasons (wrong data, too little memory, too slow, values that are refused) gets no task
of the job for a while: twice as long each time, up to a bound, so that one that was mended comes back by itself. Where
tasks take long the pauses do too: else a device that fails would be invited to every round again.

A device that succeeds, but many times slower than the others, rests for a multiple of what they waited for it: so its
data counts, and the fleet takes half as long again at most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from coordinator.store.schema import StandingRecord

FIRST_BENCH, LONGEST_BENCH = 10.0, 300.0  # seconds
TASKS, MOST_TASKS = 2, 32  # the same in tasks, if that is longer ...
LONGEST_EVER: Final = 3600.0  # ... but never longer than this
MOST_WORDS: Final = 500  # characters of a message that is kept
REST: Final = 2  # times what a task took
LATE: Final = "late"
SLOW: Final = "slow"
LOST: Final = "lost"
REFUSED: Final = "refused"
# Failures in a row that are excused, by reason. Those of any other reason are the device's own from the first on.
_EXCUSED: Final = {"stopped": 3, "too_large": 3, "coordinator": 3, LOST: 1, LATE: 1}


def succeeded(standing: StandingRecord, seconds: float, now: float, slow: str = "") -> StandingRecord:
    """Count an update; what its tasks take is smoothed over the last few. `slow` says that the others waited for it."""
    known = seconds if standing.seconds is None else (standing.seconds + seconds) / 2
    after = replace(standing, successes=standing.successes + 1, in_a_row=0, excused=0, seconds=known, at=now)
    if not slow:
        return replace(after, benched_until=None)
    return replace(after, benched_until=now + min(REST * seconds, LONGEST_EVER), reason=SLOW, message=slow)


def failed(
    standing: StandingRecord,
    reason: str,
    message: str,
    now: float,
    usual: float | None = None,
    taken: float | None = None,
) -> StandingRecord:
    """Count a failure; the device is benched if it is its own. `usual` seconds is what a task of the job takes.

    `taken` is for how long a device that is late was at its task: it is known to take at least that from now on.
    """
    own = standing.excused >= _EXCUSED.get(reason, 0)
    in_a_row = standing.in_a_row + own
    pause = _pause(in_a_row, usual or 0.0) if own else None
    return replace(
        standing,
        failures=standing.failures + 1,
        in_a_row=in_a_row,
        excused=standing.excused + (not own),
        seconds=standing.seconds if taken is None else max(taken, standing.seconds or 0.0),
        benched_until=standing.benched_until if pause is None else now + pause,
        reason=reason,
        message=message[:MOST_WORDS],
        at=now,
    )


def _pause(times: int, usual: float) -> float:
    longest = max(LONGEST_BENCH, min(MOST_TASKS * usual, LONGEST_EVER))
    return min(max(FIRST_BENCH, TASKS * usual) * 2.0 ** min(times - 1, 30), longest)


def why_benched(standing: StandingRecord | None, now: float) -> str:
    """Say for how long a device is benched and why; nothing if it is not."""
    if standing is None or standing.benched_until is None or now >= standing.benched_until:
        return ""
    words = f"{standing.reason}: {standing.message}" if standing.message else standing.reason
    return f"benched for {math.ceil(standing.benched_until - now)} s: {words}"
