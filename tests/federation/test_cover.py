"""What a device trains, and that no layer is left without a trainer if somebody there could train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.axes.cover import (
    DeviceProfile,
    Everything,
    OutputSide,
    ensure_coverage,
    uncovered_layers,
)
from federation.axes.participate import Slot
from federation.capacity import predicted_peak
from federation.errors import BundleError, InputError, OutOfMemory
from federation.manifest import Boundary
from tests.tiny_bundle import FILE, boundary, layer, manifest, weight

LAYERS = tuple(
    layer(name, *(weight(f"{name}.w", size) for size in sizes), activations=100, macs=0)
    for name, sizes in (("stem", [1000]), ("pool", []), ("middle", [500]), ("head", [10]))
)
STRONG, SHORT, MODERATE, WEAK = BOUNDARIES = (
    boundary("stem", 0, 400, ort_training=(FILE,)),
    boundary("stem@8", 0, 300, last_steps=8, ort_training=(FILE,)),
    boundary("middle", 2, 200),
    boundary("head", 3, 100, train=None, ort_training=(FILE,)),
)
MODEL = manifest(LAYERS, BOUNDARIES, {"strong": "stem", "weak": "head"}, name="x")
BOTH = ("portable", "ort-training")


def needs(boundary: Boundary, batch: int | None = None) -> int:
    return predicted_peak(MODEL, boundary, batch)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_boundary_nearest_to_the_input_that_fits(boundary: Boundary) -> None:
    assert OutputSide().choose(MODEL, DeviceProfile(memory=needs(boundary), engines=BOTH)) == boundary


def test_nothing_known_is_everything() -> None:
    assert OutputSide().choose(MODEL, DeviceProfile()) == Everything().choose(MODEL, DeviceProfile()) == STRONG


def test_a_larger_batch_leaves_fewer_layers() -> None:
    profile = DeviceProfile(memory=needs(STRONG), engines=BOTH)
    assert OutputSide().choose(MODEL, profile, 20) == MODEL.boundary("head")


def test_what_the_device_measured_counts_more_than_its_tier_and_this_more_than_its_memory() -> None:
    profile = DeviceProfile(memory=10**9, tier="weak", boundary="middle", engines=BOTH)
    assert OutputSide().choose(MODEL, profile) == MODERATE
    assert OutputSide().choose(MODEL, replace(profile, boundary=None)) == WEAK
    assert OutputSide().choose(MODEL, replace(profile, boundary=None, tier=None)) == STRONG


def test_only_boundaries_with_a_graph_for_the_devices_engines() -> None:
    weak = DeviceProfile(memory=needs(WEAK))
    with pytest.raises(OutOfMemory, match=r"no boundary of 'x' fits: the smallest, 'middle', needs about"):
        OutputSide().choose(MODEL, weak)
    with pytest.raises(InputError, match="'head' has no graph for the engines"):
        OutputSide().choose(MODEL, DeviceProfile(boundary="head"))
    with pytest.raises(InputError, match="'x' has no training graph for the engines"):
        OutputSide().choose(MODEL, DeviceProfile(engines=("abacus",)))
    assert OutputSide().choose(MODEL, DeviceProfile(memory=needs(MODERATE), engines=("ort-training",))) == WEAK


def test_a_boundary_that_the_bundle_does_not_have() -> None:
    with pytest.raises(BundleError, match="no boundary or tier named 'tail'"):
        OutputSide().choose(MODEL, DeviceProfile(boundary="tail"))


@pytest.mark.parametrize(
    "profile",
    [
        DeviceProfile(memory=needs(MODERATE)),
        DeviceProfile(memory=needs(SHORT)),
        DeviceProfile(boundary="middle"),
        DeviceProfile(tier="weak", engines=BOTH),
    ],
)
def test_everything_is_not_for_those_who_cannot(profile: DeviceProfile) -> None:
    with pytest.raises(OutOfMemory, match="everything is to be trained, and the device can train from"):
        Everything().choose(MODEL, profile)


@given(st.integers(1, 10**6), st.integers(0, 10**5), st.integers(1, 64))
def test_more_memory_never_trains_less(memory: int, more: int, batch: int) -> None:
    rule = OutputSide()
    try:
        less = rule.choose(MODEL, DeviceProfile(memory=memory, engines=BOTH), batch)
    except OutOfMemory:
        return
    chosen = rule.choose(MODEL, DeviceProfile(memory=memory + more, engines=BOTH), batch)
    assert chosen.layer <= less.layer
    assert needs(chosen, batch) <= memory + more


def test_layers_without_parameters_need_no_trainer() -> None:
    assert uncovered_layers(MODEL, []) == ["stem", "middle", "head"]
    assert uncovered_layers(MODEL, ["weak"]) == ["stem", "middle"]
    assert uncovered_layers(MODEL, ["head", "middle"]) == ["stem"]
    assert uncovered_layers(MODEL, ["head", "..head"]) == []
    assert uncovered_layers(MODEL, ["..middle"]) == ["middle", "head"]


def test_the_one_drawn_last_makes_room() -> None:
    covers = {"a": "head", "b": "middle", "c": "head", "d": "middle", "e": "stem", "f": "stem"}
    slots = [Slot(0, "a"), Slot(1, "b"), Slot(2, "c")]
    assert ensure_coverage(MODEL, slots, covers, ["d", "f", "e"]) == [Slot(0, "a"), Slot(1, "b"), Slot(2, "f")]
    kept = ensure_coverage(MODEL, slots, covers, ["d", "f", "e"], fixed={"b", "c"})
    assert kept == [Slot(0, "f"), Slot(1, "b"), Slot(2, "c")]


def test_who_is_fixed_stays() -> None:
    slots = [Slot(0, "a"), Slot(1, "b")]
    covers = {"a": "head", "b": "head", "c": "stem"}
    assert ensure_coverage(MODEL, slots, covers, ["c"], fixed={"a", "b"}) == slots


def test_the_best_there_is_if_nobody_can_train_everything() -> None:
    covers = {"a": "head", "b": "head", "c": "middle"}
    assert ensure_coverage(MODEL, [Slot(0, "a")], covers, ["b", "c"]) == [Slot(0, "c")]
    assert ensure_coverage(MODEL, [Slot(0, "a")], covers, ["b"]) == [Slot(0, "a")]


def test_a_draw_with_replacement_stays() -> None:
    slots = [Slot(0, "a", 2), Slot(1, "b")]
    assert ensure_coverage(MODEL, slots, {"a": "head", "b": "head", "c": "stem"}, ["c"]) == slots


fleets = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3), st.sampled_from([boundary.name for boundary in BOUNDARIES]), min_size=1
)


@given(fleets, st.data())
def test_every_layer_has_a_trainer_if_anybody_there_can_train_it(fleet: dict[str, str], data: Any) -> None:
    order = data.draw(st.permutations(sorted(fleet)))
    size = data.draw(st.integers(1, len(order)))
    slots = [Slot(number, device) for number, device in enumerate(order[:size])]
    after = ensure_coverage(MODEL, slots, fleet, order[size:])
    devices = [slot.device for slot in after]
    assert uncovered_layers(MODEL, (fleet[device] for device in devices)) == uncovered_layers(MODEL, fleet.values())
    assert [slot.number for slot in after] == list(range(size))
    assert len(set(devices)) == size
    swapped = sum(old != new for old, new in zip(slots, after))
    before = uncovered_layers(MODEL, (fleet[slot.device] for slot in slots))
    assert swapped == (before != uncovered_layers(MODEL, fleet.values()))  # one is enough, and none without need


@given(fleets, st.data())
def test_the_fixed_stay_whatever_is_missing(fleet: dict[str, str], data: Any) -> None:
    order = data.draw(st.permutations(sorted(fleet)))
    size = data.draw(st.integers(1, len(order)))
    slots = [Slot(number, device) for number, device in enumerate(order[:size])]
    fixed = data.draw(st.sets(st.sampled_from(order[:size])))
    after = ensure_coverage(MODEL, slots, fleet, order[size:], fixed=fixed)
    assert all(old == new for old, new in zip(slots, after) if old.device in fixed)
    left = set(uncovered_layers(MODEL, (fleet[slot.device] for slot in after)))
    assert left <= set(uncovered_layers(MODEL, (fleet[slot.device] for slot in slots)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, r"^memory: expected bytes from 1 to 2\^50, got 0"),
        ({"memory": 2**62}, r"^memory: expected bytes from 1 to 2\^50, got 4611686018427387904"),
        ({"threads": 0}, "^threads: expected a number from 1 to 4096, got 0"),
        ({"engines": ()}, "^engines: expected from 1 to 8, got 0"),
        ({"engines": ("\x1b[2J",)}, "^engines: expected at most 200 characters that can be printed"),
        ({"tier": "x" * 201}, "^tier: expected at most 200 characters that can be printed"),
    ],
)
def test_profiles_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DeviceProfile(**change)
