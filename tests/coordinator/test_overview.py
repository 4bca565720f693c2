"""What the dashboard shows: the fleet at a glance, who trained what, versions, the trained model as a file."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coordinator import overview
from coordinator.errors import NotFound
from edge_runtime.bundle_files import check_bundle, map_weights, read_manifest
from federation.job import parse_plan
from tests.coordinator.harness import Site, World

BOTH = {"participate": {"min_available": 2}}


def row_of(world: World, device: str) -> dict[str, object]:
    return next(row for row in world.coordinator.overview.fleet()["devices"] if row["id"] == device)


def test_a_device_shows_what_its_last_update_told(world: World) -> None:
    strong, weak = world.fleet("strong", "weak")
    job = world.job(num_rounds=5, **BOTH)
    world.round([strong, weak], boundary="body", memory={"anonymous": 1}, seconds={"wall": 9.0})
    world.now += 1
    report = {"boundary": "stem", "memory": {"anonymous": 7, "allowed": 9, "odd": "x"}, "seconds": {"wall": 2.5}}
    world.round([strong, weak], **report)
    row = row_of(world, weak)
    assert (row["boundary"], row["memory"], row["seconds"]) == (
        "stem",
        {"anonymous": 7, "allowed": 9},
        {"wall": 2.5},
    )
    assert (row["done"], row["failed"], row["last_job"], row["last_update_at"]) == (2, 0, job, world.now)


def test_devices_in_trouble_come_first_and_revoked_ones_not_at_all(world: World) -> None:
    fine, failing, gone, shut_out = world.fleet("strong", "strong", "strong", "strong")
    world.job(participate={"min_available": 4})
    offers = world.offers([fine, failing, gone, shut_out])
    world.coordinator.fail_task(failing, offers[failing].id, "out_of_memory", "64 MB are not enough")
    world.send(fine, offers[fine])
    world.coordinator.revoke(shut_out)
    found = world.coordinator.overview.fleet()
    ids = [row["id"] for row in found["devices"]]
    assert ids[0] == failing and shut_out not in ids and found["total"] == 3
    row = row_of(world, failing)
    assert (row["failed"], row["in_a_row"], row["reason"], row["message"]) == (
        1,
        1,
        "out_of_memory",
        "64 MB are not enough",
    )


def test_seats_say_who_trained_which_layers_and_who_did_not_answer(world: World) -> None:
    strong, weak, spare = world.fleet("strong", "weak", "weak")
    job = world.job(num_rounds=9, participate={"min_available": 3, "count": 2})
    offers = world.offers([strong, weak, spare])
    loser, winner = list(offers)[:2]
    world.coordinator.fail_task(loser, offers[loser].id, "failed", "")
    world.send(winner, offers[winner])
    found = world.coordinator.overview.seats(job, 60)
    assert [layer["name"] for layer in found["layers"]] == ["stem", "body", "head"]
    assert sum(layer["parameters"] for layer in found["layers"]) == world.manifest.space.size
    assert {"stem": [0, 1, 2], "head": [2]}.items() >= found["boundaries"].items()
    by_device = {seat["device"]: seat for seat in found["seats"]}
    assert by_device[winner]["state"] == "arrived" and by_device[winner]["lost"] == []
    assert [loser] in [seat["lost"] for seat in found["seats"]]
    assert found["devices"].keys() >= {winner, loser}


def test_only_the_newest_rounds_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = world.fleet("strong", "weak")
    job = world.job(num_rounds=9, **BOTH)
    for _ in range(4):
        world.round(devices)
    seats = world.coordinator.overview.seats
    assert {seat["round"] for seat in seats(job, 3)["seats"]} == {2, 3}  # round 4 is open and has no cohort yet
    monkeypatch.setattr(overview, "MOST_SEATS", 5)
    assert [seat["round"] for seat in seats(job, 60)["seats"]] == [3, 3, 2, 2]  # whole rounds


def test_a_page_asks_for_what_is_new_only(world: World) -> None:
    devices = world.fleet("strong", "weak")
    job = world.job(num_rounds=9, **BOTH)
    for _ in range(3):
        world.round(devices)
    whole = world.coordinator.rounds(job)
    assert [row["number"] for row in whole] == [0, 1, 2, 3]
    assert world.coordinator.rounds(job, 2) == whole[2:]
    with world.coordinator.repository.begin() as session:
        rows = [{"job": job, "version": number, "name": "accuracy", "value": 0.5, "at": 0.0} for number in (1, 2, 3)]
        world.coordinator.repository.add_metrics(session, rows)
    assert [row["version"] for row in world.coordinator.metrics(job, 2)] == [2, 3]


def test_the_trained_model_is_a_bundle_with_the_weights_of_the_version(world: World, tmp_path: Path) -> None:
    devices = world.fleet("strong", "weak")
    job = world.job(name="Ein Modell/../x", num_rounds=3, **BOTH)
    world.round(devices)
    (newest, first) = world.coordinator.overview.versions(job)
    assert (newest["version"], newest["newest"], first["version"]) == (1, True, 0)
    name, body = world.coordinator.overview.trained_bundle(job, 1)
    assert name == "Ein-Modell----x-v1"
    with zipfile.ZipFile(io.BytesIO(b"".join(body))) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "out")
    folder = tmp_path / "out" / name
    manifest = read_manifest(folder)
    check_bundle(folder, manifest)  # every file, by size and sha256
    np.testing.assert_array_equal(map_weights(folder / manifest.weights.name, manifest.space), world.weights(job, 1))
    with pytest.raises(NotFound):
        world.coordinator.overview.trained_bundle(job, 7)


def test_what_a_job_can_be_made_of(make_world: Callable[..., World]) -> None:
    world = make_world()
    (world.root / "bundles" / ("0" * 64)).mkdir()  # a folder without a manifest is no bundle
    found = world.coordinator.overview.choices()
    assert [(row["digest"], row["layers"]) for row in found["bundles"]] == [(world.bundle, 3)]
    assert found["bundles"][0]["parameters"] == world.manifest.space.size
    assert "scaffold" in [row["name"] for row in found["algorithms"]]


def test_a_job_file_is_checked_as_the_command_line_does(site: Site) -> None:
    text = 'bundle = "x"\nnum_rounds = 7\n[local]\nsteps = 3\n'
    with site.http(site.admin) as client:
        plan = client.post("/v1/plans", json={"toml": text}).raise_for_status().json()["plan"]
        wrong = client.post("/v1/plans", json={"toml": text.replace("steps = 3", "steps = -3")})
        no_toml = client.post("/v1/plans", json={"toml": "bundle ="})
        assert client.post("/v1/plans", json={"toml": "x" * 200_000}).status_code == 422
        created = client.post("/v1/jobs", json={"bundle": site.bundle, "plan": plan})  # type: ignore[attr-defined]
    assert (plan["num_rounds"], plan["local"]["steps"]) == (7, parse_plan(text).local.steps)
    assert wrong.status_code == 400 and "line 4" in wrong.json()["detail"]
    assert no_toml.status_code == 400 and "no TOML" in no_toml.json()["detail"]
    assert created.status_code == 201
