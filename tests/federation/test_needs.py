"""What a device can train, by what its trial steps took: coordinator and device ask the same function."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from federation.axes.cover import MOST_NEEDS, DeviceProfile, Everything, InputSide, OutputSide
from federation.capacity import MeasuredNeed, beside, predicted_memory, predicted_peak
from federation.decode import decode
from federation.errors import BundleError, FieldError, OutOfMemory
from federation.manifest import Boundary, FileRef, Manifest, dumps, loads
from tests.tiny_bundle import boundary, layer, manifest, weight

BATCH = 8
NAMES = ("stem", "middle", "head")
STEP = {"stem": ((1, 1000), (16, 16000)), "middle": ((1, 500), (16, 8000)), "head": ((1, 100), (16, 1600))}


def graph(name: str) -> str:
    return f"{NAMES.index(name):064x}"


def place(name: str) -> Boundary:
    index = NAMES.index(name)
    found = boundary(name, index, 100)
    return replace(found, train=FileRef(f"train.{name}.onnx", graph(name), 100), step_memory=STEP[name])


LAYERS = tuple(layer(name, weight(f"{name}.w", 100), activations=10, macs=0) for name in NAMES)
MODEL = manifest(LAYERS, tuple(map(place, NAMES)), {"strong": "stem", "weak": "head"}, name="x")


def took(name: str, size: int, batch: int = BATCH) -> MeasuredNeed:
    return MeasuredNeed(graph(name), batch, size)


def chosen(profile: DeviceProfile) -> str:
    return OutputSide().cover(MODEL, profile, BATCH)


def test_the_prediction_adds_the_graph_and_what_lies_outside_it() -> None:
    vectors = 3 * 4 * 300  # parameters, gradients, momentum
    stem = MODEL.boundary("stem")
    assert predicted_peak(MODEL, stem, BATCH) == vectors + BATCH * 4 + 8000  # a sample is one number
    assert predicted_peak(MODEL, stem, 32) == vectors + 32 * 4 + 32000  # beyond the table


def test_a_bundle_without_lifetimes_has_the_papers_formula() -> None:
    old = replace(MODEL.boundary("stem"), step_memory=None)
    assert predicted_peak(MODEL, old, BATCH) > predicted_memory(MODEL, old, BATCH).total


def test_a_measured_need_decides_whatever_was_predicted() -> None:
    predicted = predicted_peak(MODEL, MODEL.boundary("stem"), BATCH)
    assert chosen(DeviceProfile(memory=predicted)) == "stem"
    assert chosen(DeviceProfile(memory=predicted, needs=(took("stem", predicted + 1),))) != "stem"
    assert chosen(DeviceProfile(memory=1000, needs=(took("stem", 1000),))) == "stem"
    assert chosen(DeviceProfile(memory=predicted, needs=(took("stem", predicted + 1, batch=4),))) == "stem"


def test_the_largest_of_several_measurements_counts() -> None:
    profile = DeviceProfile(memory=1000, needs=(took("stem", 900), took("stem", 1100), took("head", 10)))
    assert profile.measured(MODEL, MODEL.boundary("stem"), BATCH) == 1100
    assert chosen(profile) != "stem"


def test_what_was_not_tried_is_corrected_by_the_nearest_that_was() -> None:
    stem, middle, head = (predicted_peak(MODEL, MODEL.boundary(name), BATCH) for name in NAMES)
    profile = DeviceProfile(memory=10**9, needs=(took("stem", 3 * stem), took("head", head // 2)))
    assert profile.need(MODEL, MODEL.boundary("middle"), BATCH) == 3 * middle  # of two neighbours the larger part
    only = DeviceProfile(memory=3 * middle, needs=(took("stem", 3 * stem),))
    assert chosen(only) == "middle"
    assert chosen(replace(only, memory=3 * middle - 1)) == "head"


def test_what_is_known_not_to_fit_is_refused_even_if_the_device_insists() -> None:
    profile = DeviceProfile(memory=2_000_000, boundary="stem", needs=(took("stem", 3_000_000),))
    message = "training from 'stem' needs 3.0 MB, and 2.0 MB are left beside the idle process"
    for rule in (OutputSide(), InputSide(), Everything()):
        with pytest.raises(OutOfMemory, match=message):
            rule.cover(MODEL, profile, BATCH)
    assert OutputSide().cover(MODEL, replace(profile, needs=()), BATCH) == "stem"
    assert OutputSide().cover(MODEL, replace(profile, memory=None), BATCH) == "stem"


def test_where_nothing_fits_the_smallest_is_named() -> None:
    with pytest.raises(OutOfMemory, match=r"no boundary of 'x' fits: the smallest, 'head', needs about .* at batch 8"):
        chosen(DeviceProfile(memory=10))


def test_further_graphs_take_their_vectors_and_structures() -> None:
    assert beside(MODEL, []) == 0
    assert beside(MODEL, [MODEL.boundary("middle")]) > 2 * 4 * 200


def test_profiles_travel_with_their_needs_and_within_bounds() -> None:
    profile = DeviceProfile(memory=5, needs=(took("stem", 7),))
    assert decode(DeviceProfile, {**asdict(profile), "needs": [asdict(profile.needs[0])]}, defaults=True) == profile
    with pytest.raises(FieldError, match=f"needs: expected at most {MOST_NEEDS}"):
        DeviceProfile(needs=(took("stem", 7),) * (MOST_NEEDS + 1))
    for change in ({"batch": 0}, {"bytes": 0}, {"bytes": 2**51}, {"graph": "ab"}):
        with pytest.raises(FieldError, match="expected"):
            replace(profile.needs[0], **change)


def test_lifetimes_travel_in_the_manifest_and_may_be_absent() -> None:
    assert loads(dumps(MODEL)) == MODEL
    old = Manifest(**{**vars(replace(MODEL)), "boundaries": (replace(place("stem"), step_memory=None),), "tiers": {}})
    assert "step_memory" not in dumps(old) and loads(dumps(old)) == old


@pytest.mark.parametrize("wrong", [(), ((1,),), ((0, 5),), ((2, 5), (1, 5)), ((1, -1),), ((1, 1),) * 65])
def test_lifetimes_that_make_no_sense(wrong: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(BundleError, match="'stem': step_memory: expected"):
        replace(place("stem"), step_memory=wrong)
