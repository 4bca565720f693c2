"""Parts of a vector, and somebody else's local model, over HTTP: what comes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from edge_runtime.bundle_files import map_weights
from federation.axes.sync import Rotating
from federation.job import plan_from
from federation.region import of_layers
from federation.space import Vector
from federation.wire import encode
from tests.coordinator.harness import Files, Site, place_bundle, report_header, serving

MakeJob = Callable[..., str]


@pytest.fixture
def job_of(site: Site) -> Iterator[MakeJob]:
    """Jobs that end with their test."""
    service, made = site.server.coordinator, []

    def make(**plan: Any) -> str:
        made.append(service.create_job(plan_from({"bundle": "x", **plan}), site.bundle))  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for job in made:
        service.set_state(job, "stopped")


def weights(site: Site, job: str, version: int = 0) -> dict[str, Vector]:
    space = site.manifest.space  # type: ignore[attr-defined]
    vector = np.array(map_weights(Files(site.directory).version(job, version), space))
    return dict(space.views(vector))


def part(site: Site, token: str, job: str, name: str = "model", version: int = 0, **query: Any) -> httpx.Response:
    with site.http(token) as client:
        return client.get(f"/v1/jobs/{job}/versions/{version}/parts/{name}", params={"boundary": "stem", **query})


def same(answer: httpx.Response, expected: dict[str, Vector]) -> None:
    assert answer.status_code == 200, answer.text
    found = load(answer.content)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_what_a_boundary_needs_and_one_unit_of_it(site: Site, job_of: MakeJob) -> None:
    job, token = job_of(sync={"rule": "rotating", "parts": 3}), site.enrol()[1]
    whole = weights(site, job)
    same(part(site, token, job), whole)
    same(part(site, token, job, boundary="body"), {name: whole[name] for name in ("body.w", "head.w", "head.b")})
    same(part(site, token, job, unit=0), {name: whole[name] for name in ("stem.w", "stem.mean")})
    same(part(site, token, job, unit=1), {"body.w": whole["body.w"]})
    same(part(site, token, job, boundary="weak", unit=0), {})  # what it does not train


def test_a_unit_of_channels(site: Site, job_of: MakeJob) -> None:
    job, token = job_of(sync={"rule": "rotating", "parts": 2, "by": "channel"}), site.enrol()[1]
    whole = weights(site, job)
    assert whole["body.w"].size == 5
    rows = {name: tensor[len(tensor) // 2 :] for name, tensor in whole.items()}
    same(part(site, token, job, unit=1), rows)


def test_the_servers_state_where_the_algorithm_has_it(site: Site, job_of: MakeJob) -> None:
    job, token = job_of(algorithm="scaffold"), site.enrol()[1]
    zeros = {f"control/{name}": np.zeros_like(tensor) for name, tensor in weights(site, job).items()}
    same(part(site, token, job, "control"), zeros)
    assert part(site, token, job, "momentum").status_code == 404


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"unit": 3}, 400),
        ({"unit": -1}, 422),
        ({"unit": "first"}, 422),
        ({"unit": 10**30}, 422),
        ({"boundary": "tail"}, 400),
        ({"boundary": "..stem"}, 400),
        ({"boundary": "x" * 300}, 422),
        ({"name": "control"}, 404),
        ({"name": "momentum"}, 404),
        ({"name": "server_momentum"}, 404),
        ({"name": "..%2Fmodel"}, 404),
        ({"version": 1}, 404),
        ({"version": -1}, 422),
        ({"job": "nobody"}, 404),
    ],
)
def test_what_there_is_not_is_refused_in_one_line(
    site: Site, job_of: MakeJob, change: dict[str, Any], status: int
) -> None:
    job = job_of(sync={"rule": "rotating", "parts": 3})
    answer = part(site, site.enrol()[1], **{"job": job, **change})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status and "\n" not in answer.json()["detail"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Site]:
    """A server on which nobody else could be drawn."""
    with serving(tmp_path) as running:
        running.bundle, running.manifest = place_bundle(tmp_path)  # type: ignore[attr-defined]
        yield running


def test_a_task_that_inherits_nothing_and_one_that_does(alone: Site) -> None:
    """Ten rotations of one part, then the cohort may change: the first task of the window gets the last body."""
    plan = {"num_rounds": 30, "participate": {"count": 1}, "sync": {"rule": "rotating", "parts": 1}}
    alone.server.coordinator.create_job(plan_from({"bundle": "x", **plan}), alone.bundle)  # type: ignore[attr-defined]
    manifest = alone.manifest  # type: ignore[attr-defined]
    region = of_layers(manifest.space, range(3))
    assert Rotating(1).window == 10
    with alone.http(alone.enrol()[1]) as client:
        for number in range(11):
            offer = client.post("/v1/tasks/next?wait=5").json()
            answer = client.get(f"/v1/tasks/{offer['id']}/inherited")
            if number < 10:
                assert answer.status_code == 404 and "inherits nothing" in answer.json()["detail"]
                assert offer["work"]["exchange"]["inherit"] is None
                vector = np.full(manifest.space.size, 0.25 * number, np.float32)
                body = b"".join(map(bytes, encode({"model": (region, vector)})))
                sent = client.put(f"/v1/tasks/{offer['id']}/update", content=body, headers=report_header())
                assert sent.status_code == 201, sent.text
                alone.settle()
        assert answer.status_code == 200 and answer.content == body
        assert offer["work"]["exchange"]["inherit"]["boundary"] == "stem"
        job = offer["id"].partition("-")[0]
        for wrong in ("nothing", f"{job}-11-0-1", f"{job}-10-1-1", f"{job}-10-0-1x", f"{job}-9-0-1"):
            assert client.get(f"/v1/tasks/{wrong}/inherited").status_code in (404, 409)
    with alone.http(alone.enrol()[1]) as other:  # whose task it is, is nobody's business
        assert other.get(f"/v1/tasks/{offer['id']}/inherited").status_code == 404
