"""Blobs in object storage: the same protocol, the same weights; what is lost with a machine, and with the server."""

from __future__ import annotations

import itertools
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator import folding
from coordinator.check import Check
from coordinator.errors import StoreAway
from coordinator.registry import Registry
from coordinator.retention import Keep
from coordinator.store import s3
from coordinator.store.blobs import Blobs
from coordinator.store.database import open_database
from coordinator.store.repository import Repository
from coordinator.store.s3 import S3Blobs
from coordinator.store.versions import Versions
from edge_runtime.bundle_files import map_weights
from federation.axes.cover import DeviceProfile
from federation.errors import InputError
from federation.manifest import MANIFEST_NAME
from tests.coordinator.databases import about_postgresql, copy_database, database_url, query
from tests.coordinator.harness import (
    ALL_THREE,
    TIERS,
    Offer,
    World,
    body_of,
    end_process,
    put_update,
    serving,
    start_server,
)
from tests.coordinator.s3_servers import BUCKET, S3Server, s3_server
from tests.coordinator.test_kill import ROUNDS, WIDTH, Prepared, enrol_all, run_fleet
from tests.coordinator.test_takeover import Start, fleet, version_of
from tests.embrace.cli.conftest import run
from tests.waiting import PATIENCE, wait_until

URL = f"s3://{BUCKET}/some/where"
BOTH = {"min_available": 2, "quorum": 1.0}


@pytest.fixture(scope="module", params=["rclone", "moto"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(request.param, tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server("rclone", tmp_path / "s3") as found:
        yield found


def keys(server: S3Server, below: str = "") -> list[str]:
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=below)
    return [row["Key"] for page in pages for row in page.get("Contents", ())]


def write(blobs: Blobs, key: str, data: bytes) -> None:
    draft = blobs.draft(key)
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(data)
    blobs.commit(draft, key)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}"


def test_what_one_machine_wrote_another_reads(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = S3Blobs(prefix, tmp_path / "first")
    write(first, "jobs/a/versions/0.x", b"zero")
    write(first, "jobs/a/versions/0.x", b"nought")  # in place of what has the key
    first.link("jobs/a/versions/0.x", "jobs/a/versions/0.best")
    folder = first.draft("bundles/abc")
    (folder / "graphs").mkdir(parents=True)
    (folder / "graphs" / "one.onnx").write_bytes(b"1" * 100)
    (folder / "manifest.json").write_bytes(b"{}")
    first.commit(folder, "bundles/abc")
    write(first, "bundles/abc/signature.json", b"signed")
    arrived = [(first.draft(f"spool/t{n}", ".part"), f"spool/t{n}.body") for n in range(20)]
    for path, _ in arrived[:-1]:
        path.write_bytes(path.name.encode())
    *kept, missing = first.commit_all(arrived)
    assert kept == [None] * 19 and isinstance(missing, FileNotFoundError)
    first.close()

    second = S3Blobs(prefix, tmp_path / "second")
    assert second.file("jobs/a/versions/0.x").read_bytes() == b"nought"
    bundle = second.file("bundles/abc")
    found = {str(path.relative_to(bundle)): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    assert found == {"graphs/one.onnx": b"1" * 100, "manifest.json": b"{}", "signature.json": b"signed"}
    assert second.list("jobs") == ["jobs/a"] and second.list("bundles") == ["bundles/abc"]
    assert second.list("jobs/a/versions") == ["jobs/a/versions/0.best", "jobs/a/versions/0.x"]
    assert len(second.list("spool")) == 19 and second.size("jobs/a", "bundles/abc") == 6 + 6 + 102 + 6
    assert not second.file("jobs/b/versions/0.x").exists()
    second.delete("jobs/a/versions/0.x", "spool/t3.body", "spool/t3.body")
    assert second.file("jobs/a/versions/0.best").read_bytes() == b"nought", "a second key is one of its own"
    assert not second.file("spool/t3.body").exists() and not second.file("jobs/a/versions/0.x").exists()
    second.delete("jobs/a", "bundles/abc", *second.list("spool"))
    assert keys(server, prefix.partition(f"{BUCKET}/")[2]) == [], "no object is left behind"
    second.close()


def test_keys_of_objects_cannot_be_guessed_and_are_never_used_twice(server: S3Server, prefix: str, tmp_path) -> None:
    blobs = S3Blobs(prefix, tmp_path / "cache")
    place = prefix.partition(f"{BUCKET}/")[2] + "/objects/"
    write(blobs, "data/a", b"the same")
    first = keys(server, place)
    write(blobs, "data/a", b"the same")
    second = keys(server, place)
    assert len(first) == len(second) == 1 and first != second and len(first[0]) >= len(place) + 40
    blobs.close()


def test_bytes_that_were_not_written_are_refused(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = S3Blobs(prefix, tmp_path / "first")
    write(first, "data/a", b"what was written")
    first.close()
    (name,) = keys(server, prefix.partition(f"{BUCKET}/")[2] + "/objects/")
    server.client().put_object(Bucket=BUCKET, Key=name, Body=b"something else")
    second = S3Blobs(prefix, tmp_path / "second")
    with pytest.raises(FileNotFoundError, match="another sha256"):
        second.file("data/a")
    assert not (tmp_path / "second" / "data" / "a").exists()
    second.close()


def test_an_object_that_is_lost_is_not_waited_for(server: S3Server, prefix: str, tmp_path: Path) -> None:
    """It cannot be read, nor get a second key; a server that does not answer is something else."""
    with closing(S3Blobs(prefix, tmp_path / "first")) as blobs:
        write(blobs, "data/a", b"what was written")
        blobs.drop("data/a")
        (name,) = keys(server, prefix.partition(f"{BUCKET}/")[2] + "/objects/")
        server.client().delete_object(Bucket=BUCKET, Key=name)
        for use in (lambda: blobs.file("data/a"), lambda: blobs.link("data/a", "data/b")):
            with pytest.raises(FileNotFoundError, match="has lost an object"):
                use()


def test_blobs_are_deleted_several_at_once_and_refs_first(server: S3Server, prefix: str, tmp_path: Path) -> None:
    with closing(S3Blobs(prefix, tmp_path / "cache")) as blobs:
        names = [f"spool/{number}" for number in range(4)]
        for name in names:
            write(blobs, name, name.encode())
        objects = {name: next(iter((blobs._ref(name) or {}).values()))["object"] for name in names}
        removed: list[str] = []
        two, remove = threading.Barrier(2), blobs._remove

        def remove_together(name: str) -> None:
            if name.startswith(s3.REFS):
                two.wait(PATIENCE)
            remove(name)
            removed.append(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blobs, "_remove", remove_together)
            blobs.delete(*names, *names)
        assert len(removed) == 8
        assert all(removed.index(f"refs/{name}.ref") < removed.index(objects[name]) for name in names)
        assert keys(server, prefix.partition(f"{BUCKET}/")[2]) == []


@pytest.mark.parametrize("where", ["AWS_DEFAULT_REGION", "AWS_REGION", "profile", "nowhere"])
def test_the_region_is_the_one_that_boto3_finds(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    if where == "profile":
        (tmp_path / "config").write_text("[profile here]\nregion = eu-central-1\n")
        monkeypatch.setenv("AWS_PROFILE", "here")
    elif where != "nowhere":
        monkeypatch.setenv(where, "eu-central-1")
    with closing(S3Blobs(prefix, tmp_path / "cache")) as blobs:
        region = "us-east-1" if where == "nowhere" else "eu-central-1"
        assert f"%2F{region}%2Fs3%2F" in str(blobs.upload_url("spool/a", 1))


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "http://bucket/x", "bucket"])
def test_what_is_no_bucket(url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected s3://BUCKET/PREFIX"):
        S3Blobs(url, tmp_path / "cache")


def test_a_bucket_that_is_not_there_or_not_ours(server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(StoreAway, match="bucket elsewhere"):
        S3Blobs("s3://elsewhere/x", tmp_path / "cache")


def test_a_wrong_secret_is_refused(rclone: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StoreAway):
        S3Blobs(URL, tmp_path / "cache")


# --- a coordinator ---------------------------------------------------------------------------------------------------


class S3World(World):
    """A coordinator whose blobs are in a bucket; its directory may be lost."""

    url = URL

    def open_blobs(self) -> Blobs:
        return S3Blobs(self.url, self.root / "cache")

    def place_bundle(self, width: int) -> tuple[str, Any]:
        found = super().place_bundle(width)
        blobs, key = self.open_blobs(), f"bundles/{found[0]}"
        shutil.copytree(self.root / key, blobs.draft(key))
        blobs.commit(blobs.draft(key), key)
        blobs.close()
        for folder in ("bundles", "data", "jobs", "spool"):
            shutil.rmtree(self.root / folder)  # nothing is read there
        return found

    def weights_file(self, job: str) -> bytes:
        return Path(self.coordinator.version_file(job, self.state(job)["version"])[0]).read_bytes()


def rounds_of(world: World, devices: list[str], job: str, *, until: int) -> None:
    while world.state(job)["version"] < until:
        world.round(devices)


@pytest.mark.parametrize("plan", [{}, {"algorithm": "fedadam"}, {"serve": {"combine": "median"}}])
def test_the_same_weights_as_in_a_directory(server: S3Server, prefix: str, tmp_path: Path, plan: Any) -> None:
    plan = {"num_rounds": 3, **ALL_THREE, **plan}
    plain, stored = World(tmp_path / "plain"), type("Own", (S3World,), {"url": prefix})(tmp_path / "stored")
    found = []
    for world in (plain, stored):
        devices = world.fleet("strong", "moderate", "weak")
        job = world.job(**plan)
        rounds_of(world, devices, job, until=3)
        found.append(Path(world.coordinator.version_file(job, 3)[0]).read_bytes())
    assert found[0] == found[1]
    stored.coordinator.delete_job(job)
    plain.end()
    stored.end()
    assert keys(server, prefix.partition(f"{BUCKET}/")[2]) == []


def test_a_lost_machine_takes_nothing_with_it(rclone: S3Server, tmp_path: Path) -> None:
    """In the middle of a round, one update of three acknowledged: another machine has the database and the bucket."""
    world = S3World(tmp_path / "one")
    devices = world.fleet("strong", "moderate", "weak")
    job = world.job(num_rounds=2, **ALL_THREE)
    world.round(devices)
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.end()
    (tmp_path / "two").mkdir()
    for path in (tmp_path / "one").glob("coordinator.db*"):
        shutil.copy(path, tmp_path / "two")
    copy_database(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    world.root = tmp_path / "two"
    world.begin()
    for device in devices[1:]:
        world.send(device, offers[device])
    world.settle()
    assert world.state(job)["version"] == 2
    expected = World(tmp_path / "plain")
    fleet, other = expected.fleet("strong", "moderate", "weak"), expected.job(num_rounds=2, **ALL_THREE)
    rounds_of(expected, fleet, other, until=2)
    assert world.weights_file(job) == Path(expected.coordinator.version_file(other, 2)[0]).read_bytes()
    world.end()
    expected.end()


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("after-spool", 2),
        ("after-complete", 2),
        ("after-check", 2),
        ("after-record", 3),
        ("mid-fold", 2),
        ("mid-commit", 2),
    ],
)
def test_killed_at_a_point(rclone: S3Server, tmp_path: Path, point: str, times: int) -> None:
    """The process is killed and what it had on its disk is gone: the next one ends with the same bits.

    Updates are uploaded by the devices themselves, but for those that come to the process before it is killed.
    """
    plain, stored = World(tmp_path / "plain", width=WIDTH), S3World(tmp_path / "stored", width=WIDTH)
    tokens = []
    for world in (plain, stored):
        world.now = time.time()
        tokens = enrol_all(world)
        job = world.job(num_rounds=ROUNDS, **ALL_THREE)
    rounds_of(
        plain, [row["id"] for row in plain.coordinator.devices()], plain.coordinator.jobs()[0]["id"], until=ROUNDS
    )
    expected = plain.weights(plain.coordinator.jobs()[0]["id"]).tobytes()
    plain.end()
    stored.end()
    elsewhere = "none" if point == "after-spool" else ""
    process, url = start_server(stored.root, point=point, times=times, blobs=URL, storage_url=elsewhere)
    try:
        threads, errors = run_fleet(Prepared(stored.root, stored.manifest, job, tuple(tokens)), url)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        end_process(process)
        process, _ = start_server(stored.root, port=httpx.URL(url).port or 0, blobs=URL)
        for thread in threads:
            thread.join(PATIENCE)
        assert not errors and not any(thread.is_alive() for thread in threads)
        version = "SELECT version FROM jobs WHERE id = :job"
        wait_until(lambda: query(stored.root, version, job=job) == [(ROUNDS,)])
    finally:
        end_process(process)
    blobs = S3Blobs(URL, tmp_path / "look")
    found = map_weights(Versions(blobs).weights(job, ROUNDS), stored.manifest.space)
    assert found.tobytes() == expected
    blobs.close()


@about_postgresql
def test_two_processes_share_a_bucket(rclone: S3Server, prefix: str, tmp_path: Path) -> None:
    """A bundle and a job are sent to one after the other; the keeper is killed, and the other one has the same bits."""
    plain = World(tmp_path / "plain")
    enrol_all(plain)
    other_job = plain.job(num_rounds=ROUNDS, **ALL_THREE)
    rounds_of(plain, [row["id"] for row in plain.coordinator.devices()], other_job, until=ROUNDS)
    expected = plain.weights(other_job).tobytes()
    shared = {"database": database_url(tmp_path / "shared"), "blobs": prefix}
    registry = Registry(Repository(open_database(shared["database"])), time.time)
    admin = registry.set_admin_token() or ""
    tokens = [registry.enrol(registry.invite(1, 600), tier, DeviceProfile(tier=tier))[1] for tier in TIERS]
    registry._repository.close()
    processes = [
        start_server(tmp_path / name, **shared, point=point, times=2)  # type: ignore[arg-type]
        for name, point in (("one", "mid-commit"), ("two", ""))
    ]
    urls = [url for _, url in processes]
    try:
        with httpx.Client(headers={"Authorization": f"Bearer {admin}"}, timeout=PATIENCE, verify=False) as client:
            folder, turns = plain.files.bundle(plain.bundle), itertools.cycle(urls)
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
                sent = (folder / name).read_bytes()
                put = client.put(f"{next(turns)}/v1/bundles/{plain.bundle}/files/{name}", content=sent)
                assert put.status_code == 204, put.text
            assert client.post(f"{next(turns)}/v1/bundles/{plain.bundle}").status_code == 204
            plan = {"bundle": "tiny", "num_rounds": ROUNDS, **ALL_THREE}
            made = client.post(f"{urls[0]}/v1/jobs", json={"bundle": plain.bundle, "plan": plan})
            assert made.status_code == 201, made.text
        start = Start(tmp_path / "shared", plain, made.json()["id"], tuple(tokens))
        with fleet(start, urls):
            assert processes[0][0].wait(PATIENCE) == -signal.SIGKILL
        wait_until(lambda: version_of(start) == ROUNDS)
    finally:
        for process, _ in processes:
            end_process(process)
    blobs = S3Blobs(prefix, tmp_path / "look")
    assert map_weights(Versions(blobs).weights(start.job, ROUNDS), plain.manifest.space).tobytes() == expected
    blobs.close()
    plain.end()


def test_a_server_that_is_away_is_waited_for(rclone: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is told to come back, and the round closes when the server is there again."""
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    directory = tmp_path / "served"
    made = S3World(directory)
    job = made.job(num_rounds=1)
    token = made.registry.enrol(made.registry.invite(1, 60), "d", DeviceProfile(tier="strong"))[1]
    made.end()
    with serving(directory, blobs=URL) as site, site.http(token) as client:
        offer = Offer(client.post("/v1/tasks/next?wait=5").json())
        body = body_of(made.manifest, offer)
        rclone.kill()
        answer = put_update(client, offer, body)
        assert (answer.status_code, answer.json()["title"]) == (503, "Object storage not available")
        rclone.start()
        assert put_update(client, offer, body).status_code == 201
        site.settle()
        assert site.server.coordinator.job(job)["version"] == 1


def harm(server: S3Server, world: S3World, key: str) -> None:
    """Change a byte of a blob in the bucket, and lose the copy on this machine."""
    (facts,) = world.coordinator._blobs._ref(key).values()  # type: ignore[attr-defined]
    path = server.folder / BUCKET / "some/where" / facts["object"]
    found = bytearray(path.read_bytes())
    found[-1] ^= 1
    path.write_bytes(found)
    world.coordinator._blobs.drop(key)


@about_postgresql
def test_a_partial_sum_that_the_bucket_has_harmed_is_folded_again(
    rclone: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "BATCH", 1)
    found = []
    for harmed in (False, True):
        world = S3World(tmp_path / str(harmed))
        devices, job = (
            world.fleet("weak", "weak"),
            world.job(num_rounds=1, participate=BOTH),
        )
        offers = world.offers(devices)
        world.send(devices[0], offers[devices[0]])
        world.settle()
        (key,) = [key for key in world.coordinator._blobs.list("spool") if key.endswith(".sums")]
        if harmed:
            harm(rclone, world, key)
        world.send(devices[1], offers[devices[1]])
        wait_until(lambda world=world, job=job: world.state(job)["version"] == 1)  # type: ignore[misc]
        assert ("SumLost" in world.kinds(job)) is harmed
        found.append(world.weights_file(job))
        world.end()
    assert found[0] == found[1]


def test_a_body_that_the_bucket_has_harmed_ends_its_job_in_time(rclone: S3Server, tmp_path: Path) -> None:
    """As one that it has lost does: it is acknowledged, and no version can be made without it."""
    world = S3World(tmp_path / "one")
    devices, job = world.fleet("weak", "weak"), world.job(num_rounds=1, participate=BOTH)
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.settle()
    world.restart()  # what was folded is gone with the process
    (key,) = [key for key in world.coordinator._blobs.list("spool") if key.endswith(".body")]
    harm(rclone, world, key)
    world.coordinator._folding._folded.clear()
    world.send(devices[1], offers[devices[1]])

    def fails() -> bool:
        world.later(1000)
        return bool(world.state(job)["state"] == "failed")

    wait_until(fails)
    assert "another sha256" in world.state(job)["message"] and "CloseFailed" in world.kinds(job)
    world.end()


def test_a_check_keeps_no_copies_of_bodies(rclone: S3Server, tmp_path: Path) -> None:
    """A round may have more of them than a disk takes."""
    world = S3World(tmp_path / "one")
    devices, job = (
        world.fleet("strong", "weak"),
        world.job(num_rounds=1, participate=BOTH),
    )
    world.send(devices[0], world.offers(devices)[devices[0]])
    world.settle()
    with closing(S3Blobs(URL, tmp_path / "copies")) as blobs:
        (found,) = Check(world.coordinator.repository, blobs).jobs()
        assert (found.job, found.wrong) == (job, ()) and list((tmp_path / "copies" / "spool").iterdir()) == []
    world.end()


def test_old_versions_and_bodies_go_from_a_bucket(rclone: S3Server, tmp_path: Path) -> None:
    world = type("Own", (S3World,), {"url": f"s3://{BUCKET}/old", "keep": Keep(keep_versions=9)})(tmp_path / "old")

    def stored() -> list[int]:
        names = (key.rpartition("/")[2] for key in keys(rclone, "old/refs/jobs"))
        return sorted(int(name.partition(".")[0]) for name in names if name.endswith(".safetensors.ref"))

    device, job = world.device(), world.job(num_rounds=4)
    rounds_of(world, [device], job, until=4)
    world.finish(job)
    write(world.coordinator._blobs, f"spool/{job}-0-0-1.aa.body", b"left behind")
    assert stored() == [0, 1, 2, 3, 4]
    command = ("admin", "prune", "--data", world.root, "--database", database_url(world.root), "--blobs", world.url)
    assert (run(*command, "--dry-run").code, stored()) == (0, [0, 1, 2, 3, 4])
    assert run(*command).code == 0
    assert stored() == [3, 4] and keys(rclone, "old/refs/spool") == []
    assert world.weights_file(job)
    world.end()


def test_objects_that_no_ref_names_go_once_they_are_old(server: S3Server, tmp_path: Path) -> None:
    """A writer that is killed leaves bytes behind that no key names."""
    prefix = f"unnamed-{tmp_path.name}"
    blobs = S3Blobs(f"s3://{BUCKET}/{prefix}", tmp_path / "cache")
    write(blobs, "spool/kept", b"kept")
    blobs._upload(blobs.file("spool/kept"))
    assert len(keys(server, f"{prefix}/objects/")) == 2
    assert blobs.remove_unnamed(time.time() - 600) == 0 and len(keys(server, f"{prefix}/objects/")) == 2
    assert blobs.remove_unnamed(time.time() + 600) == 1
    blobs.drop("spool/kept")
    assert blobs.file("spool/kept").read_bytes() == b"kept"
    blobs.close()
