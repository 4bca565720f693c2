"""When which unit is synchronised: rotation by counting, FedLAMA against the listing of the paper."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.axes.sync import FedLama, OnePart, Rotating, Sync, SyncFacts, When, WholeModel, after_round, first_facts
from federation.axes.sync.fedlama import faster_intervals, longer_intervals
from federation.axes.sync.one_part import Which
from federation.decode import decode, encode
from federation.errors import InputError
from federation.exchange import Exchange, units_region
from federation.space import Parameter, ParameterSpace
from tests.federation.regions import spaces, vector_of
from tests.oracles import fedlama


def space_of(*sizes: int) -> ParameterSpace:
    return ParameterSpace([[Parameter(f"w{i}", "weight", (size,))] if size else [] for i, size in enumerate(sizes)])


RULES: list[Sync] = [WholeModel(), Rotating(1), Rotating(2), Rotating(2, "channel"), FedLama(), FedLama(3, True)]
RULES += [OnePart(part) for part in get_args(Which)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(space=spaces())
@settings(max_examples=30, deadline=None)
def test_every_element_belongs_to_one_unit(rule: Sync, space: ParameterSpace) -> None:
    filled = sum(any(p.size for p in layer) for layer in space.layers)
    if isinstance(rule, Rotating) and rule.by == "layer" and filled < rule.parts:
        with pytest.raises(InputError, match=f"sync.parts: expected at most {filled}"):
            rule.units(space)
        return
    places = [int(v) for unit in rule.units(space) for v in unit.gather(vector_of(space))]
    assert sorted(places) == list(range(1, space.size + 1))
    assert len(first_facts(rule, space).changed) == len(rule.units(space))


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any),
    parts=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_groups_of_layers_are_consecutive_and_as_even_as_a_layer_allows(sizes: list[int], parts: int) -> None:
    filled = [index for index, size in enumerate(sizes) if size]
    if parts > len(filled):
        return
    units = Rotating(parts).units(space_of(*sizes))
    groups = [[index for index, pieces in enumerate(unit.layers) if pieces] for unit in units]
    assert [index for group in groups for index in group] == filled and all(groups)
    ends = list(itertools.accumulate(unit.size for unit in units))
    for number, end in enumerate(ends[:-1], 1):
        ideal = sum(sizes) * number / parts
        # A border is off by less than the layer in which the ideal one lies, unless groups would be empty.
        forced = len(groups[number - 1]) == 1 or all(len(group) == 1 for group in groups[number:])
        assert forced or abs(end - ideal) <= max(sizes), (groups, ends)


def test_even_groups_by_hand() -> None:
    def layers(*sizes: int, parts: int) -> list[list[int]]:
        units = Rotating(parts).units(space_of(*sizes))
        return [[index for index, pieces in enumerate(unit.layers) if pieces] for unit in units]

    assert layers(1, 1, 1, 1, parts=2) == [[0, 1], [2, 3]]
    assert layers(1, 0, 1, 0, 2, parts=2) == [[0, 2], [4]]
    assert layers(9, 1, 1, 1, parts=3) == [[0], [1], [2, 3]] or layers(9, 1, 1, 1, parts=3) == [[0], [1, 2], [3]]
    assert layers(1, 1, 1, 9, parts=4) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("by", ["layer", "channel"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_in_every_period_each_unit_is_due_once(parts: int, by: str) -> None:
    rule, space = Rotating(parts, by), space_of(3, 4, 5, 6, 7)
    facts = first_facts(rule, space)
    due = [rule.due(When(number), facts) for number in range(4 * parts)]
    for period in range(4):
        assert Counter(unit for units in due[period * parts : (period + 1) * parts] for unit in units) == Counter(
            range(parts)
        )
    assert due[0] == (1 % parts,)  # step k averages part k mod τ, and the first step is number 1
    assert rule.window % parts == 0 and facts.intervals == (parts,) * parts


def test_the_last_round_averages_everything() -> None:
    rule = Rotating(3)
    facts = first_facts(rule, space_of(1, 2, 3))
    assert rule.due(When(4, is_last=True), facts) == rule.sent(When(4, is_last=True), facts) == (0, 1, 2)


def test_when_the_cohort_changes_models_are_handed_on_or_averaged() -> None:
    ends, facts = When(29, ends_window=True), first_facts(Rotating(3), space_of(1, 2, 3))
    assert Rotating(3).due(ends, facts) == (0,) and Rotating(3).sent(ends, facts) == (0, 1, 2)
    averaged = Rotating(3, redistribute="averaged")
    assert averaged.due(ends, facts) == averaged.sent(ends, facts) == (0, 1, 2)


def test_a_unit_changes_in_the_version_after_the_round_in_which_it_is_due() -> None:
    rule, space = Rotating(3), space_of(1, 2, 3)
    facts = first_facts(rule, space)
    seen = []
    for number in range(5):
        facts = after_round(rule, When(number), facts, (1, 2, 3), {})
        seen.append(facts.changed)
    assert seen == [(0, 1, 0), (0, 1, 2), (3, 1, 2), (3, 4, 2), (3, 4, 5)]


def test_one_part_is_always_due_and_the_other_at_the_end() -> None:
    space = space_of(2, 4, 8, 16, 32)
    sizes = {part: OnePart(part).units(space)[0].size for part in get_args(Which)}
    assert sizes == {"first_half": 6, "second_half": 56, "half_of_channels": 31, "none": 0}
    rule = OnePart()
    facts = first_facts(rule, space)
    assert rule.due(When(7), facts) == rule.sent(When(7), facts) == (0,)
    assert rule.due(When(8, is_last=True), facts) == rule.sent(When(8, is_last=True), facts) == (0, 1)


# --- FedLAMA ---------------------------------------------------------------------------------------

CASES = st.lists(
    st.tuples(st.floats(0, 10) | st.sampled_from([0.0, 1e-9, 1.0]), st.integers(1, 1000)), min_size=1, max_size=12
)


@given(cases=CASES, factor=st.integers(1, 8), accelerate=st.booleans())
@settings(max_examples=300, deadline=None)
def test_intervals_are_those_of_the_paper(cases: list[tuple[float, int]], factor: int, accelerate: bool) -> None:
    d, sizes = (tuple(column) for column in zip(*cases))
    choose = faster_intervals if accelerate else longer_intervals
    found = choose(d, sizes, factor)
    expected = fedlama.adjust(list(d), list(sizes), 1, factor, accelerate)
    gaps = [delta - (1 - lam) for delta, lam in zip(expected.delta, expected.lam)]
    if min(map(abs, gaps)) > 1e-12:  # where the curves touch, the order in which a sum is rounded decides
        assert list(found) == expected.intervals
    assert set(found) <= {1, factor}


def test_intervals_by_hand() -> None:
    """A large layer that hardly differs is worth waiting for; a small one that differs is not."""
    assert longer_intervals((0.1, 5.0, 0.2), (100, 10, 50), 4) == (4, 1, 4)
    assert faster_intervals((0.1, 5.0, 0.2), (100, 10, 50), 4) == (4, 1, 1)
    assert longer_intervals((1.0, 1.0), (5, 5), 1) == (1, 1)
    assert longer_intervals((0.0, 0.0), (5, 5), 3) == (3, 3)  # one device: nothing differs


def fact(intervals: tuple[int, ...]) -> SyncFacts:
    return SyncFacts((0,) * len(intervals), intervals, (0.0,) * len(intervals))


def test_layers_are_due_at_their_intervals_and_all_at_the_end_of_a_window() -> None:
    rule = FedLama(4)
    due = [rule.due(When(number), fact((1, 4, 1))) for number in range(8)]
    assert due == [(0, 2), (0, 2), (0, 2), (0, 1, 2)] * 2
    assert rule.due(When(0, is_last=True), fact((1, 4, 1))) == (0, 1, 2)
    assert rule.due(When(1, ends_window=True), fact((1, 4, 1))) == (0, 1, 2)
    assert rule.window == 4


def test_intervals_change_at_the_end_of_a_window_only() -> None:
    rule, facts, sizes = FedLama(3), fact((1, 1, 1)), (100, 10, 50)
    measured = {0: 0.1, 1: 5.0, 2: 0.2}
    for number in range(6):
        facts = after_round(rule, When(number), facts, sizes, measured)
        adjusted = tuple(fedlama.adjust([0.1, 5.0, 0.2], list(sizes), 1, 3).intervals)
        assert facts.intervals == ((1, 1, 1) if number < 2 else adjusted)
        assert facts.discrepancies == (0.1, 5.0, 0.2)


def test_what_nobody_trained_keeps_its_discrepancy() -> None:
    facts = after_round(FedLama(2), When(0), SyncFacts((0, 0), (1, 1), (3.0, 4.0)), (1, 1), {1: 5.0})
    assert facts.discrepancies == (3.0, 5.0) and facts.changed == (1, 1)


# --- names, and units together ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_survive_the_way_through_a_table(rule: Sync) -> None:
    exchange = Exchange(sync=rule, sent=(0,), changed=(0,))
    assert decode(Exchange, encode(exchange)) == exchange


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], r"^sync: expected a table, got '\[\]'"),
        ({"rule": "some"}, "^sync.rule: expected all, rotating, fedlama, one_part, got 'some'"),
        ({"rule": ["all"]}, "^sync.rule: expected all, rotating, fedlama"),
        ({"rule": "all", "parts": 2}, "^sync.parts: not a constant of the rule 'all', which has none"),
        ({"rule": "rotating", "parts": 0}, "^sync.parts: expected a number from 1 to 10000, got 0"),
        ({"rule": "rotating", "parts": 2.5}, "^sync.parts: expected int"),
        ({"rule": "rotating", "by": "row"}, "^sync.by: expected 'layer' or 'channel', got 'row'"),
        ({"rule": "rotating", "redistribute": "all"}, "^sync.redistribute: expected 'local' or 'averaged'"),
        ({"rule": "fedlama", "factor": 0}, "^sync.factor: expected a number from 1 to 1000, got 0"),
        ({"rule": "one_part", "part": "third"}, "^sync.part: expected 'first_half' or .*, got 'third'"),
        ({"rule": "fedlama", "accelerate": 1}, "^sync.accelerate: expected true or false"),
    ],
)
def test_tables_that_are_no_rule(table: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(Exchange, {"sync": table}, defaults=True)


def test_units_that_share_a_layer_cannot_be_sent_together() -> None:
    space = space_of(4, 6)
    with pytest.raises(InputError, match="have 'w0' in common"):
        units_region(Rotating(3, "channel"), space, (0, 2))
    assert units_region(Rotating(3, "channel"), space, (0, 1, 2)).size == 10  # all of them are everything
    assert units_region(FedLama(), space_of(1, 2, 3), (0, 2)).size == 4
