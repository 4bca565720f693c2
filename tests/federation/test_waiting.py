"""What a job waits for, in words: through a whole round, with devices that cannot help."""

from __future__ import annotations

from federation import rounds
from federation.axes.participate import Participation
from federation.cohort import Cohort, LeaseTaken, Member, Seat, TaskReturned, UpdateArrived
from federation.waiting import Fleet, Waiting, waiting_device, waiting_for

NAMES = {"a": "kitchen", "b": "gar\x1bage", "c": "attic"}
SEATS = tuple(Seat(number, Member(device, "conv1", 1)) for number, device in enumerate("abc"))
WORKS = Fleet(names=NAMES)


def said(round: rounds.Round, fleet: Fleet = WORKS, *, paused: bool = False) -> Waiting:
    found = waiting_for(round, fleet, paused=paused)
    assert found is not None
    return found


def test_a_round_from_its_opening_to_its_end() -> None:
    rule = Participation(quorum=2, deadline=100.0)
    round = rounds.open_round(4, 0, rule, 0.0, lease=1000.0, offer=60.0)
    assert said(round, Fleet(missing=2)) == Waiting("devices", "needs 2 more devices", 2)
    assert said(round, Fleet(missing=1)).text == "needs 1 more device"
    assert waiting_device(round, Fleet(missing=2), "a") == "needs 2 more devices"
    round, _ = rounds.advance(round, rounds.DevicesAvailable(cohort=Cohort(SEATS, 3, 2)), 3661.0)
    assert said(round) == Waiting(
        "updates",
        "round 4 has 0 of 3 updates; waits for kitchen (is invited since 01:01:01 UTC), "
        "gar\\x1bage (is invited since 01:01:01 UTC), attic (is invited since 01:01:01 UTC)",
        3,
        ("a", "b", "c"),
    )
    for number, device in enumerate("abc"):
        round, _ = rounds.advance(round, LeaseTaken(device, number), 3665.0)
    round, _ = rounds.advance(round, UpdateArrived("a", 0, 1), 3666.0)
    round, _ = rounds.advance(round, TaskReturned("b", 1, 1), 3667.0)
    found = said(round)
    assert found.text == (
        "round 4 has 1 of 3 updates; waits for attic (trains since 01:01:05 UTC); 1 seat for which no device is there"
    )
    assert (found.count, found.devices) == (2, ("c",))
    assert waiting_device(round, WORKS, "a") == "has this device's update and waits for 2 others"
    assert waiting_device(round, WORKS, "d") == "trains with other devices"
    assert said(round, paused=True) == Waiting(
        "administrator", "paused until it is resumed; 1 task under way may still be answered"
    )
    assert waiting_device(round, WORKS, "d", paused=True) == "is paused"
    round, _ = rounds.advance(round, rounds.Tick(), 3800.0)
    found = said(round)
    assert "the others are late, and it closes with 2" in found.text and found.count == 1
    round, _ = rounds.advance(round, UpdateArrived("c", 2, 1), 3801.0)
    assert said(round).text == "round 4 is being closed"
    round, _ = rounds.advance(round, rounds.CloseFailed("the disk"), 3802.0)
    assert said(round).text == "round 4 is being closed (the disk; tried 1 time)"
    round, _ = rounds.advance(round, rounds.Committed(), 3803.0)
    assert waiting_for(round, WORKS) is None


def test_devices_that_cannot_help_are_named_with_the_reason() -> None:
    round = rounds.open_round(0, 0, Participation(), 0.0, lease=10.0, offer=10.0)
    fleet = Fleet(1, {"a": "no tier 'x'"}, {"b": "data: empty", "c": "late", "d": "late"}, NAMES)
    assert said(round, fleet).text == (
        "needs 1 more device; kitchen cannot take part: no tier 'x'; "
        "gar\\x1bage is benched: data: empty, attic is benched: late, 1 more"
    )
    assert waiting_device(round, fleet, "b") == "gives this device no task for now: data: empty"


def test_many_devices_take_one_line() -> None:
    many = tuple(Seat(n, Member(f"d{n}", "conv1", 1)) for n in range(500))
    round = rounds.open_round(0, 0, Participation(), 0.0, lease=10.0, offer=10.0)
    round, _ = rounds.advance(round, rounds.DevicesAvailable(cohort=Cohort(many, 500, 500)), 0.0)
    found = said(round, Fleet())
    assert found.text.endswith(", 496 more") and len(found.text) < 300 and len(found.devices) == 500
