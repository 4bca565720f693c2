"""What devices measure reaches the administrator: checked, replaced by the next of its kind, and never too much."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.benchmarks import MOST_BYTES, MOST_KEPT
from federation.benchmark import Benchmark
from federation.decode import decode
from tests.coordinator.harness import Site, World
from tests.federation.test_benchmark import SECONDS

PLACE = "/v1/devices/me/benchmark"


def told(bundle: str, training: float = 0.2, **changes: Any) -> dict[str, Any]:
    seconds = {**SECONDS, "training": training}
    return {
        "bundle": bundle,
        "model": "tiny",
        "batch": 4,
        "iterations": 5,
        "runtime": "onnxruntime 1.31.1, portable",
        "threads": 1,
        "costs": [{"boundary": "head", "tiers": ["weak"], "seconds": seconds, "memory": 2_000_000}],
        "processor": "a board",
        **changes,
    }


@pytest.fixture
def listed(site: Site) -> Callable[..., list[dict[str, Any]]]:
    def ask(**asked: str) -> list[dict[str, Any]]:
        with site.http(site.admin) as client:
            answer = client.get("/v1/benchmarks", params=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask


def test_devices_measure_and_the_administrator_compares(
    site: Site, listed: Callable[..., list[dict[str, Any]]]
) -> None:
    bundle: str = site.bundle  # type: ignore[attr-defined]
    fast, slow = site.enrol(name="fast"), site.enrol(name="slow")
    own = told("ab" * 32, model="a bundle of its own")
    for token, document in ((fast[1], told(bundle, 0.2)), (slow[1], told(bundle, 0.9)), (slow[1], own)):
        with site.http(token) as client:
            answer = client.put(PLACE, json=document)
            assert answer.status_code == 200, answer.text
    found = {row["name"]: row for row in listed(bundle=bundle)}
    assert found.keys() == {"fast", "slow"} and found["fast"]["device"] == fast[0]
    benchmarks = {name: decode(Benchmark, row["benchmark"]) for name, row in found.items()}
    assert {name: one.costs[0].seconds.training for name, one in benchmarks.items()} == {"fast": 0.2, "slow": 0.9}  # type: ignore[union-attr]
    assert len(listed(device=slow[0])) == 2 and len(listed(device=slow[0], bundle=bundle)) == 1
    assert listed(bundle="cd" * 32) == []
    assert len(listed(limit="1")) == 1


def test_the_next_measurement_replaces_the_last_under_the_same_conditions(world: World) -> None:
    service, device = world.coordinator.benchmarks, world.device()

    def record(training: float, **conditions: Any) -> None:
        world.now += 1
        service.record(device, decode(Benchmark, told(world.bundle, training, **conditions), defaults=True))

    def trained() -> list[float]:
        rows = service.newest(None, device, 100)
        return [row["benchmark"]["costs"][0]["seconds"]["training"] for row in rows]

    record(0.2)
    record(0.3, batch=8)
    record(0.4, threads=4)
    record(0.5, runtime="onnxruntime-web 1.30 wasm")
    record(0.6)
    assert trained() == [0.6, 0.5, 0.4, 0.3]
    world.restart()
    service = world.coordinator.benchmarks
    assert trained() == [0.6, 0.5, 0.4, 0.3]
    for batch in range(10, 10 + MOST_KEPT):
        record(1.0, batch=batch)
    assert trained() == [1.0] * MOST_KEPT
    world.coordinator.forget(device)
    assert trained() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "another"}, "model: expected 'tiny'"),
        ({"costs": [{"boundary": "tail", "problem": "none"}]}, "no boundary 'tail'"),
        ({"costs": [{"boundary": "head", "problem": "none"}]}, "tiers"),
        ({"processor": "a \x1b[2J"}, "printed"),
        ({"weekend": 1}, "weekend"),
        ({"batch": 0}, "batch"),
        ({"costs": []}, "costs"),
        ({"costs": [{"boundary": "head", "tiers": ["weak"], "seconds": {**SECONDS, "load": 1e300}}]}, "load"),
        ({"bundle": "../../x"}, "bundle"),
    ],
)
def test_nonsense_is_refused(site: Site, changes: dict[str, Any], words: str) -> None:
    device, token = site.enrol()
    with site.http(token) as client:
        answer = client.put(PLACE, json={**told(site.bundle), **changes})  # type: ignore[attr-defined]
    assert answer.status_code in (400, 422) and words in answer.json()["detail"]
    assert site.server.coordinator.benchmarks.newest(None, device, 10) == []


def test_numbers_are_finite_and_documents_are_short(site: Site) -> None:
    device, token = site.enrol()
    right = told("ab" * 32)
    long = [{"boundary": f"{'x' * 190}{number}", "problem": "y" * 200} for number in range(200)]
    assert len(json.dumps(long)) > MOST_BYTES
    with site.http(token) as client:
        for name in ("NaN", "Infinity"):
            body = json.dumps(right).replace("0.25", name)
            answer = client.put(PLACE, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 422), answer.text
        assert "fewer boundaries" in client.put(PLACE, json={**right, "costs": long}).json()["detail"]
    assert site.server.coordinator.benchmarks.newest(None, device, 10) == []
