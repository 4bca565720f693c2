"""Who trains which channels or which front layers: by tier, by memory, by what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.axes.cover import (
    DeviceProfile,
    Everything,
    InputSide,
    OrderedDropout,
    OutputSide,
    Width,
    ensure_coverage,
    uncovered_layers,
)
from federation.axes.participate import Slot
from federation.capacity import predicted_memory, predicted_peak
from federation.coverage import coverage, width_of
from federation.errors import BundleError, InputError, OutOfMemory
from tests.federation.narrow_model import HALF, MODEL, QUARTER, WHOLE

TIERS = {"moderate": 0.5, "weak": 0.25}
WIDTH, ORDERED = Width(tiers=TIERS), OrderedDropout(tiers=TIERS)


def needs(name: str, batch: int | None = None) -> int:
    return predicted_peak(MODEL, MODEL.boundary(name), batch)


def test_the_papers_widths_are_the_default() -> None:
    assert Width().tiers == OrderedDropout().tiers == {"moderate": 0.45, "weak": 0.2}


def test_nothing_known_is_everything() -> None:
    profile = DeviceProfile()
    assert WIDTH.cover(MODEL, profile) == InputSide().cover(MODEL, profile) == "stem"
    assert ORDERED.cover(MODEL, profile) == "stem|stem@0.5|stem@0.25"
    assert WIDTH.choose(MODEL, profile) == ORDERED.choose(MODEL, profile) == InputSide().choose(MODEL, profile) == WHOLE
    assert OutputSide().cover(MODEL, profile) == Everything().cover(MODEL, profile) == "stem"


@pytest.mark.parametrize("boundary", [WHOLE, HALF, QUARTER], ids=lambda boundary: boundary.name)
def test_the_widest_that_fits(boundary: Any) -> None:
    assert WIDTH.choose(MODEL, DeviceProfile(memory=needs(boundary.name))) == boundary
    if boundary != WHOLE:
        wider = {"stem@0.5": WHOLE, "stem@0.25": HALF}[boundary.name]
        assert WIDTH.choose(MODEL, DeviceProfile(memory=needs(wider.name) - 1)) == boundary


def test_memory_never_gives_an_output_side_boundary_nor_the_other_way_round() -> None:
    for memory in range(needs("stem@0.25"), needs("stem") + 500, 100):
        profile = DeviceProfile(memory=memory, engines=("portable", "ort-training"))
        chosen = WIDTH.choose(MODEL, profile)
        assert chosen.whole or chosen.narrow
        assert OutputSide().choose(MODEL, profile).narrow is None


def test_a_tier_is_a_width() -> None:
    assert WIDTH.cover(MODEL, DeviceProfile(tier="weak", memory=1)) == "stem@0.25"
    assert WIDTH.cover(MODEL, DeviceProfile(tier="moderate")) == "stem@0.5"
    assert WIDTH.cover(MODEL, DeviceProfile(tier="strong")) == "stem"
    assert ORDERED.cover(MODEL, DeviceProfile(tier="moderate")) == "stem@0.5|stem@0.25"
    assert ORDERED.cover(MODEL, DeviceProfile(tier="weak")) == "stem@0.25"
    assert Width(tiers={"weak": 1.0}).cover(MODEL, DeviceProfile(tier="weak")) == "stem"


def test_what_was_measured_counts_more() -> None:
    assert WIDTH.cover(MODEL, DeviceProfile(boundary="stem@0.5", tier="weak")) == "stem@0.5"
    # "middle" takes more than a quarter and less than a half of the channels
    assert needs("stem@0.25") <= needs("middle") < needs("stem@0.5")
    assert WIDTH.cover(MODEL, DeviceProfile(boundary="middle", memory=10**9)) == "stem@0.25"


@pytest.mark.parametrize(
    ("profile", "error", "message"),
    [
        (DeviceProfile(memory=needs("stem@0.25") - 1), OutOfMemory, r"no width of 'x' fits .*; 'stem@0\.25' needs"),
        (DeviceProfile(tier="tiny"), BundleError, "no boundary or tier named 'tiny'"),
        (DeviceProfile(tier="weak", engines=("ort-training",)), InputError, "no graph for the engines"),
        (DeviceProfile(engines=("abacus",)), InputError, "no graph of all layers for the engines"),
    ],
)
def test_devices_that_cannot(profile: DeviceProfile, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WIDTH.cover(MODEL, profile)


def test_a_width_that_was_not_exported() -> None:
    with pytest.raises(InputError, match=r"tier 'weak' trains the width 0\.2, and 'x' has 1, 0\.5, 0\.25; export it"):
        Width().cover(MODEL, DeviceProfile(tier="weak"))
    with pytest.raises(InputError, match=r"tier 'weak' has no width: expected one in cover\.tiers"):
        Width(tiers={}).cover(MODEL, DeviceProfile(tier="weak"))


def test_engines_decide_what_there_is() -> None:
    profile = DeviceProfile(engines=("ort-training",))
    assert ORDERED.cover(MODEL, profile) == "stem|stem@0.5"


def test_a_larger_batch_leaves_fewer_channels_and_fewer_layers() -> None:
    profile = DeviceProfile(memory=needs("stem"))
    assert WIDTH.cover(MODEL, profile) == InputSide().cover(MODEL, profile) == "stem"
    assert WIDTH.cover(MODEL, profile, 4) != "stem" != InputSide().cover(MODEL, profile, 4)


@pytest.mark.parametrize("width", [0.0, -1.0, 1.5, float("nan")])
def test_no_width_of_nothing(width: float) -> None:
    with pytest.raises(InputError, match=r"^tiers\.weak: expected a share"):
        Width(tiers={"weak": width})


def front(layers: int) -> int:
    """By hand: 12 bytes for each weight, 8 for each activation, batch 2."""
    weights = [1000, 0, 500, 12]
    return 12 * sum(weights[:layers]) + 8 * 2 * 100 * layers


@pytest.mark.parametrize(("layers", "text"), [(1, "..pool"), (2, "..middle"), (3, "..head"), (4, "stem")])
def test_as_many_of_the_first_layers_as_fit(layers: int, text: str) -> None:
    assert InputSide().cover(MODEL, DeviceProfile(memory=front(layers))) == text
    covered = coverage(MODEL, text)
    assert (covered.boundary, covered.layers) == (WHOLE, range(layers))
    if layers > 1:
        assert InputSide().cover(MODEL, DeviceProfile(memory=front(layers) - 1)) != text
    else:
        with pytest.raises(OutOfMemory, match="the first layer of 'x' does not fit"):
            InputSide().cover(MODEL, DeviceProfile(memory=front(1) - 1))


def test_a_tier_has_the_memory_of_its_boundary() -> None:
    assert InputSide().cover(MODEL, DeviceProfile(tier="strong")) == "stem"
    assert predicted_memory(MODEL, MODEL.boundary("middle")).total == 12 * 512 + 16 * 200 < front(1)
    with pytest.raises(OutOfMemory):
        InputSide().cover(MODEL, DeviceProfile(tier="moderate"))
    wide = replace(MODEL, boundaries=(*MODEL.boundaries[:2], replace(MODEL.boundaries[2], activations=900)), tiers={})
    assert InputSide().cover(wide, DeviceProfile(boundary="middle")) == "..middle"
    assert front(2) <= 12 * 512 + 16 * 900 < front(3)


def test_the_whole_graph_is_needed_at_the_input_side() -> None:
    with pytest.raises(InputError, match="'stem' has no graph for the engines"):
        InputSide().cover(MODEL, DeviceProfile(engines=("abacus",)))


@given(st.integers(1, 10**5), st.integers(0, 10**4), st.integers(1, 64), st.sampled_from([Width, InputSide]))
def test_more_memory_never_trains_less(memory: int, more: int, batch: int, kind: Any) -> None:
    rule = kind()
    try:
        less = coverage(MODEL, rule.cover(MODEL, DeviceProfile(memory=memory), batch))
    except OutOfMemory:
        return
    chosen = coverage(MODEL, rule.cover(MODEL, DeviceProfile(memory=memory + more), batch))
    assert len(chosen.layers) >= len(less.layers)
    assert width_of(chosen.boundary) >= width_of(less.boundary)


def test_narrow_devices_do_not_cover_what_lies_beyond_their_channels() -> None:
    layers = ["stem", "middle", "head"]
    assert uncovered_layers(MODEL, ["stem@0.5", "stem@0.25"]) == layers
    assert uncovered_layers(MODEL, ["stem@0.5|stem@0.25"]) == layers
    assert uncovered_layers(MODEL, ["stem@0.5", "middle"]) == ["stem"]
    assert uncovered_layers(MODEL, ["stem@0.25", "stem|stem@0.5"]) == []


def test_a_wide_device_is_swapped_in() -> None:
    covers = {"a": "stem@0.25", "b": "stem@0.5", "c": "stem@0.25", "d": "stem"}
    slots = [Slot(0, "a"), Slot(1, "b")]
    assert ensure_coverage(MODEL, slots, covers, ["c", "d"]) == [Slot(0, "a"), Slot(1, "d")]
    assert ensure_coverage(MODEL, [Slot(0, "a")], covers, ["c", "b"]) == [Slot(0, "b")]


def test_front_and_back_together_cover_everything() -> None:
    covers = {"a": "..middle", "b": "..middle", "c": "middle"}
    assert ensure_coverage(MODEL, [Slot(0, "a"), Slot(1, "b")], covers, ["c"]) == [Slot(0, "a"), Slot(1, "c")]
