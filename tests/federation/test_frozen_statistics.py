"""Updates with statistics of layers that a device does not train: who sends them, and what the server makes of them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from federation.axes.cover import DeviceProfile, OutputSide
from federation.coverage import STATISTICS
from federation.engine import RoundEngine
from federation.errors import FieldError, InputError
from federation.job import parse_plan, plan_from
from federation.layout import MODEL
from federation.manifest import BatchNorm, Manifest, Measuring
from federation.region import Region
from federation.round_sums import RoundSums
from federation.wire import check_data
from tests.tiny_bundle import FILE, boundary, layer, manifest, statistic, weight

NORM = BatchNorm("stem.mean", "stem.variance", 0.1, 4)
STEM = layer("stem", weight("stem.w", 3), statistic("stem.mean", 2), statistic("stem.variance", 2))
# `power` has a statistic that is none of batch norm.
LAYERS = (
    replace(STEM, measuring=Measuring(FILE, (NORM,))),
    layer("power", weight("power.w", 2), statistic("power.u", 1)),
    layer("head", weight("head.w", 2)),
)
BOUNDARIES = (boundary("stem", 0), boundary("power", 1), boundary("head", 2))
MEASURED = manifest(LAYERS, BOUNDARIES, {"strong": "stem", "weak": "head"})
PLAIN = manifest((STEM, *LAYERS[1:]), BOUNDARIES)
BARE = manifest((layer("a", weight("a.w", 1)), layer("b", weight("b.w", 1))), (boundary("a", 0), boundary("b", 1)))
WEAK, COVER = f"head{STATISTICS}", {"frozen_statistics": True}
STEM_AT, STATISTICS_AT = slice(0, 3), slice(3, 7)


def engine_of(model: Manifest = MEASURED, **job: Any) -> RoundEngine:
    return RoundEngine(plan_from({"bundle": "none", "cover": COVER, **job}), model)


def test_a_weak_device_that_can_measures() -> None:
    cover, able = OutputSide(frozen_statistics=True), DeviceProfile(tier="weak", measures=True)
    assert cover.cover(MEASURED, able) == WEAK
    assert cover.cover(MEASURED, replace(able, measures=False)) == "head"  # a browser
    assert cover.cover(MEASURED, replace(able, tier="strong")) == "stem"  # nothing is frozen
    assert OutputSide().cover(MEASURED, able) == "head"


def test_its_update_has_the_statistics_and_no_weight_in_front() -> None:
    engine = engine_of(algorithm="scaffold")
    tracks = engine.layout(WEAK, 0, engine.first_facts).tracks
    assert [p.name for p in tracks[MODEL].space] == ["stem.mean", "stem.variance", "head.w"]
    assert [p.name for p in tracks["control"].space] == ["head.w"]
    plain = engine.layout("head", 0, engine.first_facts).tracks
    assert [p.name for p in plain[MODEL].space] == ["head.w"]


def fold(engine: RoundEngine, sums: RoundSums, cover: str, values: list[float], samples: int = 1) -> Region:
    layout = engine.layout(cover, sums.number, sums.facts)
    data = np.array(values, "<f4").tobytes()
    sums.fold(check_data(layout, engine.limits, data), io.BytesIO(data), engine.weight(samples), 1, {})
    return layout.tracks[MODEL]


def moved(engine: RoundEngine, sums: RoundSums) -> dict[str, np.ndarray]:
    vectors = {MODEL: np.zeros(MEASURED.space.size, np.float32), **engine.first_vectors()}
    for name, at, values in engine.changes(sums, vectors, 3):
        vectors[name][at] = values
    return vectors


def test_every_element_is_a_mean_over_the_devices_that_have_it() -> None:
    engine = engine_of(serve={"rule": "momentum", "factor": 0.9})
    sums = engine.sums(0, engine.first_facts, 3)
    regions = [
        fold(engine, sums, "stem", [1, 2, 3, 4, 4, 4, 4, 5, 5, 6, 7, 7]),
        fold(engine, sums, WEAK, [1, 2, 3, 7, 1, 4]),
        fold(engine, sums, "head", [1, 1]),
    ]
    found = moved(engine, sums)[MODEL]
    assert found[STEM_AT].tolist() == [1, 2, 3]  # of the strong one alone
    assert found[STATISTICS_AT].tolist() == [2.5, 3, 3.5, 5.5]  # of two
    assert found[-2:].tolist() == [3, 4]  # of all
    told = engine.summary(sums, regions, [(1, 1, {})] * 3)
    assert told["trainers"] == {"stem": 1, "power": 1, "head": 3}


def test_weights_and_their_momentum_stay_where_only_statistics_came() -> None:
    engine = engine_of(serve={"rule": "momentum", "factor": 0.9})
    sums = engine.sums(0, engine.first_facts, 1)
    fold(engine, sums, WEAK, [1, 2, 3, 4, 5, 6])
    changed = [(name, at.start, at.stop) for name, at, _ in engine.changes(sums, moved(engine, sums), 1)]
    assert not any(at < 3 for _, at, _ in changed)
    assert moved(engine, sums)[MODEL].tolist() == [0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 5, 6]


def test_local_models_are_as_far_apart_as_without_what_was_only_measured() -> None:
    engine = engine_of(sync={"rule": "fedlama"})
    apart = []
    for measured in (False, True):
        sums = engine.sums(0, engine.first_facts, 3)
        for values in ([1.0, 2, 3], [3.0, 2, -1]):
            fold(engine, sums, "stem", [*values, 4, 4, 4, 4, 5, 5, 6, 7, 7])
        if measured:
            fold(engine, sums, WEAK, [1, 2, 3, 4, 7, 7])
        apart.append(engine.by_layer(sums, engine.next_facts(sums))["discrepancy"])
    assert apart[0] == apart[1] and apart[0]["stem"] == pytest.approx(5)


@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_a_robust_rule_takes_them_parameter_by_parameter(combine: str) -> None:
    assert engine_of(serve={"combine": combine}).layout(WEAK, 0, engine_of().first_facts).tracks[MODEL].size == 6


def test_where_it_cannot_apply_is_said_in_one_line() -> None:
    with pytest.raises(FieldError, match=r"^cover\.frozen_statistics: 'tiny' has no graphs that measure batch norm"):
        engine_of(PLAIN)
    with pytest.raises(FieldError, match="'tiny' has no batch norm that is ever frozen"):
        engine_of(BARE)
    engine_of(PLAIN, cover={})
    with pytest.raises(InputError, match=r"^line 3: cover\.frozen_statistics: .*expected local\.refresh_every = 1"):
        parse_plan("bundle = 'b'\n[cover]\nfrozen_statistics = true\n[local]\nrefresh_every = 2\n")
    for rule in ("everything", "width", "input_side"):
        with pytest.raises(FieldError, match="frozen_statistics"):
            plan_from({"bundle": "b", "cover": {"rule": rule, **COVER}})
