"""Cohorts: the same for the same arguments, kept for a window, balanced; and what happens to a single seat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.axes.cover import DeviceProfile, Everything, OutputSide
from federation.axes.participate import Participation
from federation.cohort import (
    AcceptUpdate,
    AlreadyAccepted,
    Cohort,
    GrantLease,
    Member,
    RefuseLease,
    RejectUpdate,
    RenewLease,
    Seat,
    assign,
    hand_out,
    member_of,
    run_out,
)
from federation.errors import InputError
from tests import tiny_bundle
from tests.tiny_bundle import boundary, weight

NAMES = ("stem", "middle", "head")
MODEL = tiny_bundle.manifest(
    [tiny_bundle.layer(name, weight(name, 9)) for name in NAMES],
    [boundary(name, index, 3 - index) for index, name in enumerate(NAMES)],
)
STRONG, WEAK = DeviceProfile(boundary="stem"), DeviceProfile(boundary="head")
FLEET = [f"d{n:02}" for n in range(20)]
PROFILES = {device: STRONG if index < 3 else WEAK for index, device in enumerate(FLEET)}


def usual(_: DeviceProfile) -> tuple[int | None, int]:
    return None, 1


def make(
    rule: Participation,
    number: int = 0,
    devices: Iterable[str] = FLEET,
    previous: Cohort | None = None,
    seed: int = 5,
    profiles: dict[str, DeviceProfile] = PROFILES,
) -> Cohort:
    return assign(seed, number, devices, profiles, rule, OutputSide(), MODEL, usual, previous)


def devices_of(cohort: Cohort) -> list[str]:
    return [seat.member.device for seat in cohort.seats]


def test_seats_have_a_device_and_its_boundary() -> None:
    cohort = make(Participation())
    assert sorted(devices_of(cohort)) == FLEET
    assert (cohort.wanted, cohort.quorum, cohort.missing, cohort.uncovered, cohort.unfit) == (20, 10, 0, (), ())
    for seat in cohort.seats:
        strong = PROFILES[seat.member.device] is STRONG
        trains = 3 if strong else 1
        assert seat.member == Member(seat.member.device, "stem" if strong else "head", trains, work=trains)


def test_over_selection_has_more_seats_than_wanted() -> None:
    cohort = make(Participation(count=8, over_select=0.25, quorum=0.75))
    assert (len(cohort.seats), cohort.wanted, cohort.quorum) == (10, 8, 6)


def test_too_few_devices() -> None:
    cohort = make(Participation(min_available=25))
    assert (cohort.seats, cohort.missing) == ((), 5)
    assert make(Participation(), devices=[]).missing == 1


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        (Participation(), 0),
        (Participation(count=8), 0),  # fewer are drawn
        (Participation(count=8, quorum=5), 1),
        (Participation(quorum=6), 2),
        (Participation(quorum=3, fraction_train=0.5), 2),
        (Participation(min_available=5), 1),
        (Participation(count=8, quorum=8, replacement=True), 0),  # a device may count several times
    ],
)
def test_what_a_job_asks_for_in_numbers_holds_while_devices_rest(rule: Participation, missing: int) -> None:
    cohort = assign(5, 0, FLEET[:4], PROFILES, rule, OutputSide(), MODEL, usual, resting=16)
    assert cohort.missing == missing
    if not missing and isinstance(rule.quorum, int):
        assert cohort.quorum == rule.quorum


def test_devices_that_can_train_nothing_are_left_out_and_named() -> None:
    profiles = {"a": STRONG, "b": DeviceProfile(memory=1), "c": DeviceProfile(boundary="tail")}
    cohort = make(Participation(), devices=["a", "b", "c", "unknown"], profiles=profiles)
    assert sorted(devices_of(cohort)) == ["a", "unknown"]
    assert [device for device, _ in cohort.unfit] == ["b", "c"]
    assert "1 bytes are left beside the idle process" in cohort.unfit[0][1]
    assert "no boundary or tier named 'tail'" in cohort.unfit[1][1]
    whole = assign(0, 0, ["a", "b"], {"a": STRONG, "b": WEAK}, Participation(), Everything(), MODEL, usual)
    assert devices_of(whole) == ["a"]


def test_input_side_layers_find_a_trainer() -> None:
    """Three of twenty are strong: a draw of two mostly has none of them."""
    balanced = [make(Participation(count=2), number) for number in range(50)]
    assert all(cohort.uncovered == () for cohort in balanced)
    plain = [make(Participation(count=2, balance=False), number) for number in range(50)]
    assert sum(cohort.uncovered == ("stem", "middle") for cohort in plain) > 20
    assert all(one == other for one, other in zip(balanced, plain) if not other.uncovered)


def test_what_nobody_can_train_is_named() -> None:
    assert make(Participation(count=2), devices=FLEET[3:]).uncovered == ("stem", "middle")


def test_with_replacement_one_seat_counts_for_all_draws_of_a_device() -> None:
    cohort = make(Participation(count=30, replacement=True, quorum=0.5))
    counts = [seat.count for seat in cohort.seats]
    assert (sum(counts), cohort.wanted, cohort.quorum) == (30, 30, 15)
    assert max(counts) > 1
    assert len(set(devices_of(cohort))) == len(counts)


def test_a_cohort_stays_for_its_window() -> None:
    rule = Participation(count=6, window=4)
    cohorts = [make(rule)]
    for number in range(1, 9):
        cohorts.append(make(rule, number, previous=cohorts[-1]))
    assert cohorts[0] == cohorts[1] == cohorts[2] == cohorts[3]
    assert cohorts[4] == cohorts[7]
    assert len({cohorts[0], cohorts[4], cohorts[8]}) == 3


def test_newcomers_wait_for_the_next_window() -> None:
    rule = Participation(fraction_train=0.5, window=3)
    first = make(rule, devices=FLEET[:10])
    assert make(rule, 1, previous=first) == make(rule, 2, previous=first) == first
    assert len(make(rule, 3, previous=first).seats) == 10


def test_whoever_left_is_replaced_in_its_own_slot() -> None:
    rule = Participation(count=6, window=4, balance=False)
    first = make(rule)
    gone = devices_of(first)[2]
    second = make(rule, 1, [device for device in FLEET if device != gone], first)
    changed = [number for number, (old, new) in enumerate(zip(first.seats, second.seats)) if old != new]
    assert changed == [2]
    assert second.seats[2].member.device not in devices_of(first)
    assert make(rule, 2, FLEET, second) == second  # also after it has come back


def test_slots_that_nobody_can_fill_close_up() -> None:
    rule = Participation(window=4, quorum=0.5)
    first = make(rule)
    second = make(rule, 1, FLEET[:5], first)
    assert sorted(devices_of(second)) == FLEET[:5]
    assert (second.wanted, second.quorum) == (5, 3)
    assert devices_of(second) == [device for device in devices_of(first) if device in FLEET[:5]]


def test_inside_a_window_only_vacancies_are_balanced() -> None:
    rule = Participation(count=4, window=9)
    first = make(rule, devices=FLEET[3:])
    assert first.uncovered == ("stem", "middle")
    assert make(rule, 1, FLEET, first) == first
    gone = devices_of(first)[0]
    second = make(rule, 1, [device for device in FLEET if device != gone], first)
    assert second.uncovered == ()
    assert devices_of(second)[1:] == devices_of(first)[1:]


rules = st.one_of(
    st.builds(Participation, fraction_train=st.floats(0.05, 1), over_select=st.floats(0, 1), window=st.integers(1, 4)),
    st.builds(Participation, count=st.integers(1, 6), replacement=st.booleans(), window=st.integers(1, 4)),
)


@given(rules, st.lists(st.sets(st.sampled_from(FLEET)), min_size=1, max_size=6), st.integers(), st.randoms())
def test_any_coming_and_going(rule: Participation, there: list[set[str]], seed: int, random: Any) -> None:
    previous: Cohort | None = None
    for number, devices in enumerate(there):
        listed = sorted(devices)
        random.shuffle(listed)
        cohort = make(rule, number, listed, previous, seed)
        assert cohort == make(rule, number, sorted(devices), previous, seed)
        assert set(devices_of(cohort)) <= devices
        assert bool(cohort.seats) == (len(devices) >= rule.needed)
        if previous and previous.seats and cohort.seats and not rule.starts_window(number):
            stayed = [device for device in devices_of(previous) if device in devices]
            assert [device for device in devices_of(cohort) if device in stayed] == stayed
        previous = cohort


A, B, C = Member("a", "stem", 3), Member("b", "head", 1), Member("c", "stem", 3)


def test_a_lease_is_for_whom_it_was_offered_to() -> None:
    seat = Seat(0, A, until=10.0)
    leased, effect = seat.leased_to("a", 0.0, 20.0, closed=False)
    assert effect == GrantLease(leased)
    assert (leased.state, leased.until, leased.holders) == ("leased", 20.0, ("a",))
    assert leased.leased_to("a", 0.0, 99.0, closed=False) == (leased, GrantLease(leased))  # asked again: the same lease
    assert seat.leased_to("b", 0.0, 20.0, closed=False) == (seat, RefuseLease("b", "not_yours"))
    assert seat.leased_to("a", 0.0, 20.0, closed=True) == (seat, RefuseLease("a", "round_closed"))
    (over,), freed = run_out([leased], 20.0)
    assert freed == 1
    assert over.leased_to("a", 0.0, 30.0, closed=False) == (over, RefuseLease("a", "expired"))


def test_answers() -> None:
    first, _ = Seat(0, A, until=10.0).leased_to("a", 0.0, 20.0, closed=False)
    assert first.answered_by("b", 1, 15.0, closed=False) == (first, RejectUpdate("b", "not_yours"))
    assert first.answered_by("a", 2, 15.0, closed=False) == (first, RejectUpdate("a", "not_yours"))
    assert first.answered_by("a", 0, 15.0, closed=False) == (first, RejectUpdate("a", "not_yours"))
    assert first.answered_by("a", 1, 15.0, closed=True) == (first, RejectUpdate("a", "round_closed"))
    done, effect = first.answered_by("a", 1, 15.0, closed=False)
    assert effect == AcceptUpdate(done)
    for closed in (False, True):
        assert done.answered_by("a", 1, 15.0, closed=closed) == (done, AlreadyAccepted(done))
    assert done.leased_to("a", 0.0, 30.0, closed=False) == (done, RefuseLease("a", "duplicate"))
    (over,), _ = run_out([first], 21.0)
    assert over.answered_by("a", 1, 15.0, closed=False) == (over, RejectUpdate("a", "expired"))
    again = over.offered_to(B, 20.0, 30.0)
    assert again.answered_by("a", 1, 15.0, closed=False) == (again, RejectUpdate("a", "expired"))
    second, _ = again.leased_to("b", 0.0, 40.0, closed=False)
    assert second.answered_by("a", 1, 15.0, closed=False) == (second, RejectUpdate("a", "late"))
    answered, _ = second.answered_by("b", 2, 15.0, closed=False)
    assert answered.answered_by("a", 1, 15.0, closed=False) == (answered, RejectUpdate("a", "late"))
    mine, _ = over.offered_to(A, 20.0, 30.0).leased_to("a", 0.0, 40.0, closed=False)
    mine, _ = mine.answered_by("a", 2, 15.0, closed=False)
    assert mine.answered_by("a", 1, 15.0, closed=False) == (mine, RejectUpdate("a", "duplicate"))


def test_a_free_seat_goes_rather_to_somebody_who_trains_as_much() -> None:
    leased, _ = Seat(0, A, until=10.0).leased_to("a", 0.0, 20.0, closed=False)
    seats, _ = run_out([leased], 20.0)
    assert hand_out(seats, [B, A, C], 20.0, 25.0)[1] == [seats[0].offered_to(C, 20.0, 25.0)]
    assert hand_out(seats, [B, A], 20.0, 25.0)[1] == [seats[0].offered_to(A, 20.0, 25.0)]
    assert hand_out(seats, [B], 20.0, 25.0)[1] == [seats[0].offered_to(B, 20.0, 25.0)]
    assert hand_out(seats, [], 20.0, 25.0) == (seats, [])


def test_a_seat_that_failed_is_free_at_once_and_rather_for_another() -> None:
    leased, _ = Seat(0, A, until=10.0).leased_to("a", 0.0, 20.0, closed=False)
    assert leased.failed_by("b", 1, 15.0) == leased
    failed = leased.failed_by("a", 1, 15.0)
    assert (failed.state, failed.since, failed.failed_by("a", 1, 99.0)) == ("failed", 15.0, failed)
    assert hand_out([failed], [A], 20.0, 25.0)[1] == [failed.offered_to(A, 20.0, 25.0)]
    assert hand_out([failed], [A, C], 20.0, 25.0)[1] == [failed.offered_to(C, 20.0, 25.0)]


def test_renewals() -> None:
    seat = Seat(0, A, until=10.0)
    assert seat.renewed_by("a", 1, 30.0, closed=False) == (seat, RefuseLease("a", "not_yours"))
    leased, _ = seat.leased_to("a", 0.0, 20.0, closed=False)
    renewed, effect = leased.renewed_by("a", 1, 30.0, closed=False)
    assert effect == RenewLease(renewed) and renewed == replace(leased, until=30.0)
    assert renewed.renewed_by("a", 1, 25.0, closed=False)[0] == renewed  # never shorter
    assert leased.renewed_by("b", 1, 30.0, closed=False) == (leased, RefuseLease("b", "not_yours"))
    assert leased.renewed_by("a", 1, 30.0, closed=True) == (leased, RefuseLease("a", "round_closed"))
    (over,), _ = run_out([leased], 20.0)
    assert over.renewed_by("a", 1, 30.0, closed=False) == (over, RefuseLease("a", "expired"))
    done, _ = leased.answered_by("a", 1, 15.0, closed=False)
    assert (done.since, done.seconds) == (15.0, 15.0)
    assert done.renewed_by("a", 1, 30.0, closed=False) == (done, RefuseLease("a", "duplicate"))


def test_nobody_gets_a_second_seat() -> None:
    free = [Seat(0, A, state="expired"), Seat(1, B, state="arrived", holders=("b",)), Seat(2, C, state="expired")]
    after, offered = hand_out(free, [A, B, A], 0.0, 5.0)
    assert [seat.number for seat in offered] == [0]
    assert after[1:] == tuple(free[1:])


def test_a_member_of_its_own() -> None:
    assert member_of("a", WEAK, OutputSide(), MODEL, None) == Member("a", "head", 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Member("", "stem", 1),
        lambda: Member("a", "stem", 0),
        lambda: Seat(-1, A),
        lambda: Seat(0, A, count=0),
        lambda: Seat(0, A, until=float("nan")),
        lambda: Seat(0, A, state="leased"),
        lambda: Seat(0, A, state="arrived", holders=("b",)),
        lambda: Seat(0, A, state="asleep"),  # type: ignore[arg-type]
        lambda: Cohort(),
        lambda: Cohort(missing=1, wanted=1),
        lambda: Cohort((Seat(1, A),), 1, 1),
        lambda: Cohort((Seat(0, A), Seat(1, A)), 2, 1),
        lambda: Cohort((Seat(0, A),), 2, 1),
        lambda: Cohort((Seat(0, A),), 1, 0),
        lambda: Cohort((Seat(0, A),), 1, 1, missing=1),
        lambda: Cohort((Seat(0, A, 2), Seat(1, B)), 2, 1),
    ],
)
def test_values_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"member|seat|cohort"):
        wrong()
