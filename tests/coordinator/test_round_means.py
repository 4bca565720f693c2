"""What a round makes of its updates, against numpy: means layer by layer, weights, clipping, robust rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests.coordinator.harness import ALL_THREE, TIERS, World, mean_oracle, scripted


def test_a_round_of_unequal_devices_is_a_mean_layer_by_layer(world: World) -> None:
    job = world.job(num_rounds=2, **ALL_THREE)
    devices = world.fleet(*TIERS)
    before = world.weights(job)
    offers = world.round(devices)
    layers = {
        offer.work["boundary"]: world.manifest.boundary(offer.work["boundary"]).layer for offer in offers.values()
    }
    assert sorted(layers.values()) == [0, 1, 2]
    updates = [(layers[o.work["boundary"]], 1.0, scripted(world.manifest, o)) for o in offers.values()]
    mean, trained = mean_oracle(world.manifest, updates)
    assert trained.all()
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)
    statistic = world.manifest.space.slice_of("stem.mean")
    assert (world.weights(job)[statistic] != before[statistic]).all()
    summary = world.coordinator.rounds(job)[0]["summary"]
    assert summary["trainers"] == {"stem": 1, "body": 2, "head": 3} and summary["updates"] == 3
    assert world.spool() == []


def test_what_nobody_trains_keeps_every_bit_and_is_warned_about(world: World) -> None:
    job = world.job(participate={"min_available": 2})
    devices = world.fleet("weak", "moderate")
    before = world.weights(job)
    world.round(devices)
    stem = world.manifest.space.layer(0)
    after = world.weights(job)
    assert after[stem].tobytes() == before[stem].tobytes()
    assert (after[stem.stop :] != before[stem.stop :]).all()
    assert "WarnLayerUncovered" in world.kinds(job)


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_updates_are_weighed_by_samples_and_the_server_has_a_rate(world: World, rate: float) -> None:
    job = world.job(weigh={"by": "samples"}, serve={"rate": rate}, **ALL_THREE)
    devices = world.fleet("strong", "strong", "weak")
    before = world.weights(job)
    offers = world.offers(devices)
    updates = []
    for samples, (device, offer) in zip((1, 50, 999), offers.items()):
        world.send(device, offer, samples=samples)
        layer = world.manifest.boundary(offer.work["boundary"]).layer
        updates.append((layer, samples, scripted(world.manifest, offer)))
    world.settle()
    mean, _ = mean_oracle(world.manifest, updates)
    statistics = world.manifest.space.slice_of("stem.mean")
    expected = before + rate * mean
    expected[statistics] = (before + mean)[statistics]  # a mean of what devices saw, whatever the rate
    np.testing.assert_allclose(world.weights(job), expected, rtol=0, atol=3e-7)
    assert world.coordinator.rounds(job)[0]["summary"]["samples"] == 1050


def test_a_device_that_was_drawn_three_times_counts_three_times(world: World) -> None:
    job = world.job(seed=3, participate={"replacement": True, "count": 5})
    devices = world.fleet("strong", "strong")
    before = world.weights(job)
    offers = world.offers(devices)
    seats = world.state(job)["round"]["body"]["slots"]
    counts = {seat["member"]["device"]: seat["count"] for seat in seats}
    assert sum(counts.values()) == 5 and len(set(counts.values())) == 2
    for device, offer in offers.items():
        world.send(device, offer)
    world.settle()
    updates = [(0, counts[device], scripted(world.manifest, offer)) for device, offer in offers.items()]
    mean, _ = mean_oracle(world.manifest, updates)
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)


def test_long_updates_are_shortened(world: World) -> None:
    job = world.job(serve={"clip_norm": 0.5}, participate={"min_available": 2})
    devices = world.fleet("strong", "strong")
    before, size = world.weights(job), world.manifest.space.size
    offers = world.offers(devices)
    long, short = np.full(size, 2.0, np.float32), np.full(size, 0.01, np.float32)
    for (device, offer), vector in zip(offers.items(), (long, short)):
        world.send(device, offer, vector)
    world.settle()
    clipped = long * (0.5 / np.linalg.norm(long.astype(np.float64)))
    np.testing.assert_allclose(world.weights(job), before + (clipped + short) / 2, rtol=0, atol=3e-7)


@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_robust_rules_against_numpy(world: World, combine: str) -> None:
    job = world.job(serve={"combine": combine, "trim": 0.25}, participate={"min_available": 5})
    devices = world.fleet("strong", "strong", "strong", "strong", "weak")
    before, space = world.weights(job), world.manifest.space
    offers = world.offers(devices)
    rows = np.full((5, space.size), np.nan)
    for row, (device, offer) in zip(rows, offers.items()):
        vector = scripted(world.manifest, offer)
        if offer is next(iter(offers.values())):
            vector = np.full_like(vector, 60.0)  # one lies
        row[space.size - vector.size :] = vector
        world.send(device, offer, vector)
    world.settle()
    expected = np.empty(space.size)
    for column in range(space.size):
        values = np.sort(rows[:, column][~np.isnan(rows[:, column])])
        cut = len(values) // 4
        expected[column] = np.median(values) if combine == "median" else values[cut : len(values) - cut].mean()
    np.testing.assert_allclose(world.weights(job), before + expected, rtol=0, atol=3e-7)
    assert np.abs(world.weights(job) - before).max() < 1
    assert world.spool() == []


def test_any_order_of_arrival_gives_the_same_bits(make_world: Callable[..., World]) -> None:
    world = make_world()
    devices = world.fleet(*TIERS)
    found = set()
    for order in itertools.permutations(range(3)):
        job = world.job(num_rounds=1, seed=5, weigh={"by": "samples"}, **ALL_THREE)
        offers = world.offers(devices)
        rng = np.random.default_rng(8)
        vectors = {d: rng.normal(size=scripted(world.manifest, offers[d]).size).astype(np.float32) for d in devices}
        for index in order:
            device = devices[index]
            world.send(device, offers[device], vectors[device], samples=7 + 100 * index)
        world.settle()
        assert world.state(job)["state"] == "done"
        found.add(world.weights(job).tobytes())
    assert len(found) == 1
