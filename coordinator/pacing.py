"""Tell devices of a large fleet when to come back, by what the open jobs want of them: federation/pace.py decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from coordinator.jobs import OpenJob, OpenJobState, UnitOfWork
from coordinator.presence import LATE, Presence
from federation.pace import Crowd, Pace, longest_seconds, seconds_away

SHORTEST_ROUND = 1.0  # seconds that a round is taken to last at least


@dataclass(frozen=True)
class ComeBack:
    """What a device is told in place of a task."""

    seconds: float


@dataclass(frozen=True)
class Away:
    """The devices that are away, as a round counts them that gathers its devices."""

    awaited: int  # it can use them, and begins with as many devices as with them
    resting: int  # they are benched: it does not wait for them


class Pacing:
    """Steer the devices that there is no task for."""

    def __init__(self, pace: Pace, presence: Presence, jobs: Mapping[str, OpenJob]) -> None:
        self._pace = pace
        self._presence = presence
        self._jobs = jobs

    def steer(self, work: UnitOfWork, devices: Sequence[str]) -> dict[str, float]:
        """Choose of devices without a task those that do not wait, and for how many seconds they go away."""
        if not devices:
            return {}
        here, away = self._presence.counts(work.session, work.now)
        running = [(job, state) for job in self._jobs.values() if (state := work.state(job)).paused_at is None]
        here = max(0, here - sum(_offered(state) for _, state in running))
        there = here + away + sum(_at_work(state) for _, state in running)
        if there <= self._pace.long_polls:
            return {}
        seats = [job.engine.plan.participation.invited(there) for job, _ in running]
        demand = sum(count / _round_seconds(state, work.now) for count, (_, state) in zip(seats, running))
        crowd, told = Crowd(there, here, sum(seats), demand), {}
        for device in devices:
            states = [(job, state) for job, state in running if _can_use(state, device, work.now)]
            needed = any(_needs(job, state, device) for job, state in states)
            useful = bool(states) or not running
            seconds = seconds_away(self._pace, crowd, device, work.now, is_needed=needed, is_useful=useful)
            if seconds is not None:
                told[device] = seconds
                crowd = Crowd(crowd.there, crowd.waiting - 1, crowd.seats, crowd.demand)
        if told:
            self._presence.sent_away(work.session, told, work.now)
        return told

    def count_away(self, session: Session, state: OpenJobState, now: float) -> Away:
        """Count the devices that are away, without those that a job cannot use: these are sent away again and again.

        None is awaited for longer than it may be away. A device that came since, and went away again, is none of those
        that the round is short of, whichever process has seen it.
        """
        here, away = self._presence.counts(session, now)
        if not away:
            return Away(0, 0)
        benched = state.benched(now)
        useless = self._presence.away_among(session, benched | state.unfit.keys(), now)
        resting = len(useless & benched - state.unfit.keys())
        is_over = now > state.round.opened_at + longest_seconds(self._pace, here + away) + LATE
        return Away(0 if is_over else max(0, away - len(useless)), resting)


def _at_work(state: OpenJobState) -> int:
    """Count the devices that have a task or are offered one."""
    seats = state.round.slots
    return max(0, len(seats) - seats.arrived - seats.free) if state.round.state == "collecting" else 0


def _offered(state: OpenJobState) -> int:
    """Count the devices that are offered a task and have not taken it yet: they still wait, and not for another."""
    return sum(seat.state == "offered" for seat in state.round.slots) if state.round.state == "collecting" else 0


def _round_seconds(state: OpenJobState, now: float) -> float:
    """Estimate how long a round takes: as long as the one before, or as the present one has taken."""
    return max(SHORTEST_ROUND, state.last_round or 0.0, now - state.round.opened_at)


def _can_use(state: OpenJobState, device: str, now: float) -> bool:
    return device not in state.unfit and not state.why_benched(device, now)


def _needs(job: OpenJob, state: OpenJobState, device: str) -> bool:
    """Whether a round is short of devices, or the next one goes on with this one."""
    if state.round.state == "selecting":
        return True
    goes_on = not job.engine.plan.participation.starts_window(state.round.number + 1)
    return goes_on and state.round.seat_of(device) is not None
