"""Rounds to look at: one in every state, and every fact that there is."""

from __future__ import annotations

from typing import Any

from federation.axes.participate import Participation
from federation.cohort import (
    CHECK,
    Cohort,
    LeaseRenewed,
    LeaseTaken,
    Member,
    Seat,
    TaskReturned,
    UpdateArrived,
    UpdateChecked,
    UpdateUploaded,
)
from federation.rounds import (
    MAX_TASK,
    Abandon,
    CloseFailed,
    CloseRequested,
    Committed,
    DevicesAvailable,
    DevicesLeft,
    Effect,
    Event,
    Resumed,
    Round,
    State,
    Stop,
    Tick,
    advance,
    encode_head,
    encode_seat,
    open_round,
)

LEASE, OFFER, GRACE = 30.0, 10.0, 5.0
DEVICES = "abcdef"
RUN_OUT = ("offered", "leased", "uploaded")


def member(device: str) -> Member:
    return Member(device, "stem", 3)


def cohort(devices: str, wanted: int, quorum: int, **more: Any) -> Cohort:
    return Cohort(tuple(Seat(n, member(device)) for n, device in enumerate(devices)), wanted, quorum, **more)


def opened(*, most: float = MAX_TASK, **constants: Any) -> Round:
    return open_round(
        3, 7, Participation(**{"grace": GRACE, **constants}), 0.0, lease=LEASE, offer=OFFER, max_task=most
    )


def run(round: Round, *facts: tuple[Event, float]) -> tuple[Round, list[Effect]]:
    effects: list[Effect] = []
    for event, now in facts:
        round, more = advance(round, event, now)
        effects += more
    return round, effects


def collecting(devices: str = "abc", wanted: int = 3, quorum: int = 2, **constants: Any) -> Round:
    """Everybody has a lease until 30."""
    round, _ = run(opened(**constants), (DevicesAvailable(cohort=cohort(devices, wanted, quorum)), 0.0))
    return run(round, *((LeaseTaken(device, n), 0.0) for n, device in enumerate(devices)))[0]


def closing() -> Round:
    return run(collecting(), *((UpdateArrived(device, n, 1), 1.0) for n, device in enumerate("abc")))[0]


def late_at(round: Round) -> float | None:
    """When a round closes with the updates that it has, by looking at every seat."""
    arrived = sum(seat.count for seat in round.slots if seat.state == "arrived")
    if round.lateness is None or round.state != "collecting" or not round.quorum <= arrived < round.wanted:
        return None
    if any(seat.state == "uploaded" for seat in round.slots):
        return None
    return max(round._ends_at(seat) for seat in round.slots if seat.state != "arrived")


def wakes_at(round: Round) -> float | None:
    """When time alone changes something next, by looking at every seat."""
    unchecked = any(seat.state == "uploaded" for seat in round.slots)
    lacking = round.overdue and sum(seat.count for seat in round.slots if seat.state == "arrived") < round.quorum
    deadline = [] if round.deadline is None or lacking else [round.deadline + CHECK * unchecked]
    late = [at for at in [late_at(round)] if at is not None]
    deserted = [seat.since + round.offer for seat in round.slots if seat.free]
    deserted = [at for at in deserted if round.quorum_at(at) < round.quorum]
    times = [*deadline, *late, *deserted, *(seat.until for seat in round.slots if seat.state in RUN_OUT)]
    return min(times, default=None) if round.state == "collecting" else None


def encoded(round: Round) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return encode_head(round), [encode_seat(seat) for seat in round.slots]


EXAMPLES: dict[State, Round] = {
    "selecting": opened(),
    "collecting": collecting(),
    "closing": closing(),
    "committed": advance(closing(), Committed(), 2.0)[0],
    "abandoned": advance(collecting(), Abandon("why"), 2.0)[0],
}
FACTS: tuple[Event, ...] = (
    DevicesAvailable((member("z"),), cohort("z", 1, 1)),
    DevicesLeft(("a",)),
    LeaseTaken("a", 0),
    LeaseRenewed("a", 0, 1),
    UpdateArrived("a", 0, 1),
    UpdateUploaded("a", 0, 1),
    UpdateChecked("a", 0, 1, sound=True),
    UpdateChecked("a", 0, 1, sound=False),
    TaskReturned("a", 0, 1),
    Tick(),
    Resumed(5.0),
    CloseRequested(),
    Committed(),
    CloseFailed("a defect"),
    Abandon("because"),
    Stop(),
)
