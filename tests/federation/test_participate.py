"""Draws: even, repeatable, independent of how devices are listed; and the arithmetic of counts, shares and quorums."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.axes.participate import Participation, Slot
from federation.errors import InputError

DEVICES = [f"device-{n}" for n in range(12)]
names = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=30)
rules = st.one_of(
    st.builds(
        Participation,
        fraction_train=st.floats(0.01, 1),
        replacement=st.just(False),
        over_select=st.floats(0, 2),
        quorum=st.one_of(st.floats(0.01, 1), st.integers(1, 5)),
        window=st.integers(1, 5),
    ),
    st.builds(
        Participation, count=st.integers(5, 9), replacement=st.booleans(), quorum=st.integers(1, 5) | st.floats(0.01, 1)
    ),
)


def drawn(rule: Participation, devices: Any, seed: int = 0, number: int = 0) -> list[str]:
    return [slot.device for slot in rule.draw(devices, seed, number)]


def test_by_default_all_are_invited_and_half_are_enough() -> None:
    rule = Participation()
    assert sorted(drawn(rule, DEVICES)) == sorted(DEVICES)
    assert (rule.needed, rule.wanted(12), rule.invited(12), rule.quorum_of(12)) == (1, 12, 12, 6)
    assert [rule.quorum_of(wanted) for wanted in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert Participation(quorum=1.0).quorum_of(12) == 12


def test_a_draw_is_the_same_on_every_machine() -> None:
    """Golden values: whoever changes them changes the outcome of every seeded job."""
    assert drawn(Participation(count=4), DEVICES, 7, 3) == ["device-7", "device-4", "device-0", "device-9"]
    repeated = Participation(count=6, replacement=True).draw(DEVICES[:4], 8, 3)
    assert [(slot.device, slot.count) for slot in repeated] == [("device-3", 2), ("device-0", 2), ("device-1", 2)]


@given(rules, names, st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.randoms())
def test_the_order_of_listing_makes_no_difference(
    rule: Participation, devices: set[str], seed: int, number: int, random: Any
) -> None:
    listed = list(devices)
    random.shuffle(listed)
    slots = rule.draw(listed, seed, number)
    assert slots == rule.draw(sorted(devices), seed, number) == rule.draw(listed * 2, seed, number)
    assert [slot.number for slot in slots] == list(range(len(slots)))
    assert len({slot.device for slot in slots}) == len(slots)
    assert {slot.device for slot in slots} <= devices
    assert sum(slot.count for slot in slots) == rule.invited(len(devices))


@given(rules, st.integers(1, 200))
def test_the_arithmetic_holds_together(rule: Participation, more: int) -> None:
    available = rule.needed + more - 1
    wanted = rule.wanted(available)
    assert 1 <= rule.quorum_of(wanted) <= wanted <= rule.invited(available)
    if isinstance(rule.quorum, int):
        assert rule.quorum_of(wanted) == rule.quorum  # never quietly less than was asked for
    if not rule.replacement:
        assert rule.invited(available) <= available


def test_nobody_is_drawn_from_nobody() -> None:
    assert Participation().draw([], 0, 0) == []


@pytest.mark.parametrize(
    ("fraction", "available", "wanted"),
    [(0.25, 128, 32), (0.29, 100, 29), (0.1, 10, 1), (0.1, 3, 1), (0.5, 5, 2), (1.0, 7, 7), (0.07, 100, 7)],
)
def test_shares_are_rounded_down_but_not_by_the_floating_point(fraction: float, available: int, wanted: int) -> None:
    assert Participation(fraction_train=fraction).wanted(available) == wanted


def test_over_selection_invites_more_but_not_more_than_there_are() -> None:
    rule = Participation(count=10, over_select=0.25)
    assert [rule.invited(n) for n in (10, 11, 12, 13, 14, 100)] == [10, 11, 12, 13, 13, 13]
    assert rule.wanted(100) == 10
    assert Participation(count=10, over_select=1e300).invited(100) == 100


def test_a_quorum_is_a_share_or_a_number() -> None:
    assert [Participation(quorum=0.8).quorum_of(n) for n in (1, 4, 5, 10)] == [1, 4, 4, 8]
    assert Participation(quorum=1.0).quorum_of(10) == 10
    assert Participation(quorum=1).quorum_of(10) == 1


def test_a_round_waits_for_as_many_devices_as_it_needs() -> None:
    assert Participation(min_available=5).needed == 5
    assert Participation(count=8).needed == 8
    assert Participation(count=8, replacement=True).needed == 1
    assert Participation(fraction_train=0.25, quorum=4).needed == 16


def test_without_replacement_everybody_has_the_same_chance() -> None:
    """Single devices and pairs, within five standard deviations, over 4000 rounds."""
    rounds, n, k = 4000, len(DEVICES), 5
    rule = Participation(count=k)
    single: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    first: Counter[str] = Counter()
    for number in range(rounds):
        cohort = drawn(rule, DEVICES, 11, number)
        single.update(cohort)
        pairs.update(combinations(sorted(cohort), 2))
        first[cohort[0]] += 1
    check_even(single, n, rounds, k / n)
    check_even(pairs, math.comb(n, 2), rounds, k * (k - 1) / (n * (n - 1)))
    check_even(first, n, rounds, 1 / n)


def test_with_replacement_draws_are_independent_and_even() -> None:
    rounds, n, k = 3000, len(DEVICES), 6
    rule = Participation(count=k, replacement=True)
    draws: Counter[str] = Counter()
    twice = 0
    for number in range(rounds):
        slots = rule.draw(DEVICES, 13, number)
        assert sum(slot.count for slot in slots) == k
        draws.update({slot.device: slot.count for slot in slots})
        twice += sum(slot.count == 2 for slot in slots)
    check_even(draws, n, rounds * k, 1 / n)
    # A device is drawn exactly twice with the probability of the binomial distribution.
    expected = rounds * n * math.comb(k, 2) * (1 / n) ** 2 * (1 - 1 / n) ** (k - 2)
    assert abs(twice - expected) < 5 * math.sqrt(expected)


def test_seeds_draw_differently() -> None:
    cohorts = {tuple(drawn(Participation(count=5), DEVICES, seed)) for seed in range(50)}
    assert len(cohorts) == 50


def check_even(seen: Counter[Any], kinds: int, trials: int, chance: float) -> None:
    assert len(seen) == kinds
    spread = math.sqrt(trials * chance * (1 - chance))
    assert all(abs(count - trials * chance) < 5 * spread for count in seen.values())


def test_a_window_keeps_its_draw() -> None:
    rule = Participation(count=5, window=4)
    cohorts = [drawn(rule, DEVICES, 3, number) for number in range(12)]
    assert cohorts[0] == cohorts[1] == cohorts[2] == cohorts[3]
    assert cohorts[4] == cohorts[7] != cohorts[3]
    assert [rule.starts_window(number) for number in range(5)] == [True, False, False, False, True]


@given(names, st.integers(), st.data())
def test_who_leaves_does_not_change_the_order_of_the_others(devices: set[str], seed: int, data: Any) -> None:
    gone = data.draw(st.sets(st.sampled_from(sorted(devices))))
    before = Participation().order(devices, seed, 0)
    assert Participation().order(devices - gone, seed, 0) == [device for device in before if device not in gone]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fraction_train": 0.0}, r"^fraction_train: expected a share in \(0, 1\], got 0.0"),
        ({"fraction_train": math.nan}, r"^fraction_train: expected a share in \(0, 1\], got nan"),
        ({"fraction_train": 1.5}, "^fraction_train"),
        ({"count": 0}, "^count: expected an integer of at least 1, got 0"),
        ({"count": 2.0}, "^count: expected an integer of at least 1, got 2.0"),
        ({"count": True}, "^count: expected an integer of at least 1, got True"),
        ({"min_available": 0}, "^min_available: expected an integer of at least 1, got 0"),
        ({"window": 0}, "^window: expected an integer of at least 1, got 0"),
        ({"over_select": -0.1}, "^over_select: expected a share of 0 or more, got -0.1"),
        ({"over_select": math.inf}, "^over_select: expected a share of 0 or more, got inf"),
        ({"quorum": 0}, r"^quorum: expected a share in \(0, 1\] or an integer of at least 1, got 0"),
        ({"quorum": 1.5}, "^quorum: expected a share"),
        ({"quorum": True}, "^quorum: expected a share"),
        ({"quorum": math.nan}, "^quorum: expected a share"),
        ({"quorum": 5, "count": 4}, "^quorum: expected at most the count of 4, got 5"),
        ({"deadline": 0.0}, "^deadline: expected seconds above 0, got 0.0"),
        ({"deadline": math.inf}, "^deadline: expected seconds above 0, got inf"),
        ({"count": 3, "fraction_train": 0.5}, "^count: expected either count or fraction_train, got both"),
        ({"replacement": True, "over_select": 0.5}, "^over_select: expected 0 with replacement"),
        ({"on_missing_quorum": "hope"}, "^on_missing_quorum: expected wait or fail, got 'hope'"),
        ({"on_missing_quorum": "fail"}, "^on_missing_quorum: 'fail' needs a deadline"),
    ],
)
def test_rules_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Participation(**change)


def test_slots_and_rounds_that_make_no_sense() -> None:
    for wrong in ((-1, "a", 1), (0, "", 1), (0, "a", 0)):
        with pytest.raises(InputError, match="slot: expected"):
            Slot(*wrong)
    with pytest.raises(InputError, match="round_number: expected 0 or more, got -1"):
        Participation().draw(DEVICES, 0, -1)
