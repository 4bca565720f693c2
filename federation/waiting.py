"""Say what a job waits for, in words and as a value: for devices to begin, for updates, for an administrator.

Pure: the round and what is known of the devices go in. The words are the same wherever a person looks: at the job, at
its live view, at a device that has nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from federation.cohort import Seat
from federation.printable import printable
from federation.rounds import Round

On = Literal["administrator", "devices", "updates", "closing", "evaluation"]
MOST_NAMED = 4  # devices that are named in a line


@dataclass(frozen=True)
class Waiting:
    """What a job waits for. `text` says all of it to people, in one line."""

    on: On
    text: str
    count: int = 0  # devices that are missing to begin, or updates to close
    devices: tuple[str, ...] = ()  # whose updates are awaited


@dataclass(frozen=True)
class Fleet:
    """What is known of the devices of a job."""

    missing: int = 0  # that are not there, of those with which a round begins
    unfit: Mapping[str, str] = field(default_factory=dict)  # that can train nothing of the job, and why
    benched: Mapping[str, str] = field(default_factory=dict)  # that get no task for a while, and why
    names: Mapping[str, str] = field(default_factory=dict)  # by id

    def name(self, device: str) -> str:
        return printable(self.names.get(device, device), 40)


def waiting_for(round: Round, fleet: Fleet, *, paused: bool = False) -> Waiting | None:
    """Say what a round that is open waits for; None if it is over."""
    if round.state in ("committed", "abandoned"):
        return None
    if paused:
        under_way = _counted(sum(seat.state == "leased" for seat in round.slots), "task")
        return Waiting("administrator", f"paused until it is resumed; {under_way} under way may still be answered")
    if round.state == "closing":
        tried = f" ({round.reason}; tried {_counted(round.tries, 'time')})" if round.tries else ""
        return Waiting("closing", f"round {round.number} is being closed{tried}")
    out = _aside(fleet)
    if round.state == "selecting":
        told = f"needs {_counted(fleet.missing, 'more device')}" if fleet.missing else "begins with the next request"
        return Waiting("devices", "; ".join([told, *out]), fleet.missing)
    return _for_updates(round, fleet, out)


def waiting_device(round: Round, fleet: Fleet, device: str, *, paused: bool = False) -> str:
    """Say to a device without a task what a job waits for."""
    if paused:
        return "is paused"
    if device in fleet.benched:
        return f"gives this device no task for now: {printable(fleet.benched[device], 200)}"
    if round.state == "selecting":
        return f"needs {_counted(fleet.missing, 'more device')}" if fleet.missing else "begins a round"
    seat = round.seat_of(device) if round.state == "collecting" else None
    if seat is not None and seat.answered:
        missing = round.wanted - round.arrived
        return f"has this device's update and waits for {_counted(missing, 'other')}"
    return "trains with other devices" if round.state == "collecting" else "closes a round"


def _for_updates(round: Round, fleet: Fleet, out: Sequence[str]) -> Waiting:
    under_way = [seat for seat in round.slots if seat.running]
    unchecked = round.slots.uploaded
    free = len(round.slots) - len(under_way) - len(round.counted) - unchecked
    told = [f"round {round.number} has {round.arrived} of {_counted(round.wanted, 'update')}"]
    if round.overdue:
        told.append(f"the others are late, and it closes with {round.quorum}")
    if under_way:
        told.append(f"waits for {_listed([_at_work(seat, fleet) for seat in under_way])}")
    if unchecked:
        told.append(f"{_counted(unchecked, 'update')} being checked")
    if free:
        told.append(f"{_counted(free, 'seat')} for which no device is there")
    missing = (round.quorum if round.overdue else round.wanted) - round.arrived
    devices = tuple(seat.member.device for seat in under_way)
    return Waiting("updates", "; ".join([*told, *out]), missing, devices)


def _at_work(seat: Seat, fleet: Fleet) -> str:
    does = "trains" if seat.state == "leased" else "is invited"
    return f"{fleet.name(seat.member.device)} ({does} since {_clock(seat.since)} UTC)"


def _aside(fleet: Fleet) -> list[str]:
    """Name the devices that cannot help, and why."""
    said = []
    for what, known in (("cannot take part", fleet.unfit), ("is benched", fleet.benched)):
        if known:
            listed = [f"{fleet.name(device)} {what}: {printable(why, 120)}" for device, why in sorted(known.items())]
            said.append(_listed(listed, 2))
    return said


def _listed(words: Sequence[str], most: int = MOST_NAMED) -> str:
    more = [f"{len(words) - most} more"] if len(words) > most else []
    return ", ".join([*words[:most], *more])


def _clock(at: float) -> str:
    """Write seconds since 1970 as the time of a day.

    >>> _clock(86400 + 3661.5)
    '01:01:01'
    """
    minutes, seconds = divmod(int(at) % 86400, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
