"""What a device measures of a bundle: the parts of a real step, what does not fit, and which bundle it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_runtime import device_bench
from edge_runtime.client import DeviceClient, NotUnderstood, OpenJob
from edge_runtime.device_bench import BenchSettings, LocalBundle, bench_device, find_job, places
from edge_runtime.measure import Case, Measurement
from federation.capacity import predicted_peak
from federation.errors import BundleError, InputError, OutOfMemory
from tests.stock_python import ROOT

DIGITS = ROOT / "embrace" / "demo" / "digits" / "model"


@pytest.fixture
def bundle() -> LocalBundle:
    return LocalBundle(DIGITS)


def test_every_tier_is_measured_with_all_its_parts(bundle: LocalBundle) -> None:
    found = bench_device(bundle, BenchSettings(batch=4, iterations=2, threads=1))
    assert found.bundle == hashlib.sha256((DIGITS / "manifest.json").read_bytes()).hexdigest()
    assert (found.model, found.batch, found.iterations) == (bundle.manifest.name, 4, 2)
    assert [cost.tiers for cost in found.costs] == [(tier,) for tier in bundle.manifest.tiers]
    for cost, boundary in zip(found.costs, places(bundle.manifest, "tiers"), strict=True):
        assert (cost.boundary, cost.problem) == (boundary.name, "")
        assert cost.seconds is not None and cost.seconds.training > cost.seconds.backward > 0  # type: ignore[operator]
        # Only a device with frozen layers runs them, and stores what they give.
        assert (cost.seconds.frozen_forward > 0, cost.seconds.activation_io > 0) == (boundary.layer > 0,) * 2
    found.check_bundle(bundle.manifest)


def measured(case: Case, training: tuple[float, ...] = (0.2, 0.4, 0.3)) -> Measurement:
    return Measurement(
        idle={"resident": 60, "anonymous": 40, "file_backed": 20},
        memory={"anonymous": 7_000_000, "file_backed": 1, "total": 8_000_000},
        load=0.5,
        forward_compute=[0.01, 0.03, 0.02],
        activation_io=[0.001, 0.001, 0.001],
        training=list(training),
        optimiser=[0.002, 0.002, 0.002],
        forward_share=0.25,
    )


def test_figures_are_medians_and_quartiles(bundle: LocalBundle) -> None:
    found = bench_device(bundle, measure=measured)
    seconds = found.costs[0].seconds
    assert seconds is not None
    assert (seconds.frozen_forward, seconds.training, seconds.load) == (0.02, 0.3, 0.5)
    assert seconds.backward == pytest.approx(0.75 * 0.3)
    assert (seconds.low, seconds.batch, seconds.high) == pytest.approx((0.268, 0.323, 0.378))
    assert (found.costs[0].memory, found.idle) == (7_000_000, 40)


def test_what_does_not_fit_is_told_and_the_rest_is_measured(
    bundle: LocalBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    strong, *_, weak = places(bundle.manifest, "tiers")
    free = predicted_peak(bundle.manifest, strong, 32) - 1
    monkeypatch.setattr(device_bench, "available_memory", lambda: (free, "limit of the control group"))
    tried: list[str] = []

    def killed(case: Case) -> Measurement:
        tried.append(case.boundary)
        if case.boundary != weak.name:
            raise OutOfMemory("a trial step was ended by the system")
        return measured(case)

    found = bench_device(bundle, BenchSettings(batch=32), measure=killed)
    problems = {cost.boundary: cost.problem for cost in found.costs}
    assert tried[0] == weak.name and strong.name not in tried  # the weakest first; what cannot fit is not tried
    assert problems[weak.name] == "" and "limit of the control group" in problems[strong.name]
    assert all(problems[name] == "a trial step was ended by the system" for name in tried[1:])


def test_a_bundle_that_was_changed_is_not_measured(tmp_path: Path) -> None:
    for file in DIGITS.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "weights.safetensors").write_bytes(b"others")
    with pytest.raises(BundleError, match="weights"):
        LocalBundle(tmp_path)


def test_boundaries_are_chosen_by_name_by_tier_or_all(bundle: LocalBundle) -> None:
    manifest = bundle.manifest
    last = manifest.boundaries[-1].name
    assert [one.name for one in places(manifest, f" {last} ,")] == [last]
    assert len(places(manifest, "all")) == len([one for one in manifest.boundaries if one.narrow is None])
    with pytest.raises(InputError, match="expected names"):
        places(manifest, ",")
    with pytest.raises(InputError):
        places(manifest, "nowhere")


JOBS = [OpenJob("1f2e", "digits", "ab", 3, 32), OpenJob("1f99", "faces", "cd", 0, 8)]


def test_a_job_is_found_by_name_or_beginning_of_its_id() -> None:
    assert find_job(JOBS[:1], None) is JOBS[0]
    assert find_job(JOBS, "faces") is JOBS[1]
    assert find_job(JOBS, "1f2") is JOBS[0]


@pytest.mark.parametrize(
    ("jobs", "wanted", "words"),
    [
        ([], None, "no job that runs"),
        (JOBS, None, "choose one with --job: 1f2e .digits., 1f99 .faces."),
        (JOBS, "1f", "several"),
        (JOBS, "cats", "no job that runs is called 'cats'; there are: 1f2e"),
    ],
)
def test_a_job_that_is_not_clear_is_asked_for(jobs: list[OpenJob], wanted: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_job(jobs, wanted)


JOB = {"id": "1f2e", "name": "digits", "bundle": "ab", "round": 3, "batch": 32}


@pytest.mark.parametrize(
    "told",
    [
        {"jobs": [{**JOB, "id": "../../etc"}]},
        {"jobs": [{**JOB, "bundle": "a/b"}]},
        {"jobs": [{**JOB, "round": "three"}]},
        {"jobs": [7]},
        [],
    ],
)
def test_a_coordinator_that_answers_nonsense_is_not_believed(told: Any) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=iter([json.dumps(told).encode()])))
    with DeviceClient("http://here", "token", transport=transport) as client, pytest.raises(NotUnderstood):
        client.open_jobs()
