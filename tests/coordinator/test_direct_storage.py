"""Bytes that go past the coordinator: devices read and write object storage by URLs that it signs."""

from __future__ import annotations

import hashlib
import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pytest

from coordinator.errors import StoreAway
from coordinator.store import s3
from coordinator.store.presign import Credentials, presign
from coordinator.store.s3 import S3Blobs
from edge_runtime.agent import Agent
from edge_runtime.bundle_files import file_ref, map_weights, read_manifest
from edge_runtime.client import Declined, DeviceClient
from edge_runtime.device import Device
from edge_runtime.engine.session import RuntimeSettings
from federation.axes.cover import DeviceProfile
from federation.job import plan_from
from federation.manifest import MANIFEST_NAME
from federation.messages import TaskOffer
from simulation.datasets.digits import DIGITS
from tests.coordinator.databases import query
from tests.coordinator.harness import (
    Site,
    World,
    body_of,
    end_process,
    report_header,
    report_of,
    scripted,
    serving,
    start_server,
)
from tests.coordinator.s3_servers import BUCKET, KEY, SECRET, S3Server, s3_server
from tests.coordinator.test_kill import enrol_all
from tests.coordinator.test_s3 import S3World, keys, write
from tests.waiting import PATIENCE, wait_until

SHIPPED = Path(__file__).resolve().parents[2] / "embrace" / "demo" / "digits" / "model"
ALIKE = RuntimeSettings(threads=1)


@pytest.fixture(scope="module", params=["rclone", "moto"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(request.param, tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}"


def below(prefix: str) -> str:
    return prefix.partition(f"{BUCKET}/")[2]


@pytest.fixture
def stored(prefix: str) -> type[S3World]:
    return type("Own", (S3World,), {"url": prefix})


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1234])
@pytest.mark.parametrize("token", [None, "temporary/+="])
def test_a_signature_is_the_one_that_boto3_makes(size: int | None, token: str | None) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is missing: make test-scale")
    client = boto3.client(
        "s3",
        endpoint_url="http://storage.example:9000",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        aws_session_token=token,
        region_name="eu-west-1",
        config=boto3.session.Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    place: dict[str, Any] = {"Bucket": "b", "Key": "some where/üñ~a+b"}
    method = "GET" if size is None else "PUT"
    more = {} if size is None else {"ContentLength": size}
    oracle = client.generate_presigned_url(f"{method.lower()}_object", Params={**place, **more}, ExpiresIn=777)
    at = parse_qs(urlsplit(oracle).query)["X-Amz-Date"][0]
    seconds = time.mktime(time.strptime(at, "%Y%m%dT%H%M%SZ")) - time.timezone
    headers = {} if size is None else {"Content-Length": str(size)}
    ours = presign(
        method, oracle.partition("?")[0], Credentials(KEY, SECRET, token), "eu-west-1", seconds, 777, headers
    )
    assert parse_qs(urlsplit(ours).query) == parse_qs(urlsplit(oracle).query)


def test_all_devices_get_the_same_url_for_a_while(server: S3Server, prefix: str, tmp_path: Path) -> None:
    key = "jobs/a/versions/0.safetensors"
    with closing(S3Blobs(prefix, tmp_path / "one")) as one, closing(S3Blobs(prefix, tmp_path / "two")) as other:
        write(one, key, bytes(range(256)) * 10)
        url = str(one.download_url(key))
        with pytest.MonkeyPatch.context() as patch:
            now = (int(time.time()) // s3.WINDOW + 1000) * s3.WINDOW + 5.0
            patch.setattr(s3, "time", SimpleNamespace(time=lambda: now))
            first = one.download_url(key)
            now += s3.WINDOW - 10
            assert other.download_url(key) == one.download_url(key) == first is not None
            now += 10
            assert one.download_url(key) not in (first, None)
            assert one.download_url("jobs/a/versions/1.safetensors") is None
    answer = httpx.get(url, headers={"Range": "bytes=3-5"})
    assert answer.is_success and answer.content == b"\3\4\5"
    assert answer.headers["Cache-Control"] == s3.IMMUTABLE


def test_nothing_is_signed_where_devices_do_not_reach_the_storage(server: S3Server, prefix: str, tmp_path) -> None:
    with closing(S3Blobs(prefix, tmp_path / "one", "none")) as blobs:
        write(blobs, "data/a", b"x")
        assert blobs.download_url("data/a") is None and blobs.upload_url("spool/a", 3) is None
    with closing(S3Blobs(prefix, tmp_path / "two", "https://storage.example")) as outside:
        place = f"https://storage.example/{BUCKET}/{below(prefix)}/objects/"
        assert str(outside.download_url("data/a")).startswith(place)


# --- real agents -----------------------------------------------------------------------------------------------------


def digits_job(world: World, **plan: Any) -> str:
    """A job on a model that can be run."""
    digest = file_ref(SHIPPED, MANIFEST_NAME).sha256
    blobs = world.open_blobs()
    draft = blobs.draft(f"bundles/{digest}")
    shutil.copytree(SHIPPED, draft)
    blobs.commit(draft, f"bundles/{digest}")
    blobs.close()
    rule = {"min_available": 2, "quorum": 1.0}
    full = {"bundle": "digits", "num_rounds": 2, "local": {"steps": 3, "batch": 8}, "participate": rule, **plan}
    return world.coordinator.create_job(plan_from(full), digest)


def run_agents(url: str, tokens: list[str], folder: Path, rounds: int = 2) -> None:
    """Two agents with a half of the digits each, until each has answered in every round."""
    from edge_runtime.data import load_samples

    x, y = load_samples(DIGITS, read_manifest(SHIPPED)).batch(np.arange(200))
    errors: list[BaseException] = []

    def run(number: int, token: str) -> None:
        tier = ("strong", "weak")[number]
        device = Device((x[number::2], y[number::2]), folder / tier, tier=tier, engine="portable", settings=ALIKE)
        try:
            client = DeviceClient(url, token, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
            with Agent(client, device) as agent:
                agent.run(most_tasks=rounds, wait=5.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(tokens)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors and not any(thread.is_alive() for thread in threads)


def trained(world: World, folder: Path, **settings: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """What two agents make of a job, and the lines of the coordinator's access log."""
    world.now = time.time()
    job = digits_job(world)
    tokens = [
        world.registry.enrol(world.registry.invite(1, 60), tier, DeviceProfile(tier=tier))[1]
        for tier in ("strong", "weak")
    ]
    world.end()
    lines: list[dict[str, Any]] = []
    logging.getLogger("embrace.access").setLevel(logging.INFO)

    class Access(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.facts)  # type: ignore[attr-defined]

    log, handler = logging.getLogger("embrace.access"), Access()
    log.addHandler(handler)
    try:
        with serving(world.root, **settings) as site:
            run_agents(site.url, tokens, folder)
            wait_until(lambda: site.server.coordinator.job(job)["version"] == 2)
            weights = Path(site.server.coordinator.version_file(job, 2)[0]).read_bytes()
    finally:
        log.removeHandler(handler)
    return weights, lines


def test_agents_read_and_write_the_storage_themselves(
    server: S3Server, stored: type[S3World], prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bits as through the coordinator, which sees no body and sends no weights."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.INFO)  # as the coordinator does
    expected, plain = trained(World(tmp_path / "plain"), tmp_path / "plain agents")
    found, direct = trained(stored(tmp_path / "stored"), tmp_path / "agents", blobs=prefix)
    assert found == expected

    def count(lines: list[dict[str, Any]], method: str, end: str) -> int:
        return sum(line["method"] == method and line["path"].endswith(end) for line in lines)

    assert count(plain, "PUT", "/update") == 4 and count(plain, "GET", "/weights") > 0
    assert count(direct, "PUT", "/update") == count(direct, "GET", "/weights") == 0
    assert count(direct, "POST", "/upload") == 4 and count(direct, "POST", "/complete") >= 4
    assert max(line["received"] for line in plain) > 30_000 > 3_000 > max(line["received"] for line in direct)
    assert "X-Amz-Signature" not in caplog.text and SECRET not in caplog.text
    assert not [key for key in keys(server, below(prefix)) if "/uploads/" in key or "/spool/" in key]


def test_an_agent_that_does_not_reach_the_storage_goes_through_the_coordinator(
    server: S3Server, stored: type[S3World], prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = trained(World(tmp_path / "plain"), tmp_path / "plain agents")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    found, lines = trained(stored(tmp_path / "stored"), tmp_path / "agents", blobs=prefix, storage_url=nowhere)
    assert found == expected
    assert sum(line["path"].endswith("/update") for line in lines) == 4
    told = [record.getMessage() for record in caplog.records if "object storage" in record.getMessage()]
    assert len(told) == 2, "each says so once, and does not try again soon"
    assert not any("http" in line.replace("HTTP", "") for line in told)


# --- devices that do not do what they should -------------------------------------------------------------------------


@dataclass
class Uploader:
    """A device at work on a task, step by step."""

    client: httpx.Client
    offer: TaskOffer

    def grant(self, size: int) -> httpx.Response:
        return self.client.post(f"/v1/tasks/{self.offer.id}/upload", json={"bytes": size})

    def put(self, body: bytes, granted: int | None = None) -> str:
        """Upload a body; return its name."""
        found = self.grant(len(body) if granted is None else granted).json()
        put = httpx.put(found["url"], content=body)
        assert put.is_success, put.text
        return str(found["name"])

    def complete(self, name: str, body: bytes, wait: float = 20.0, **other: Any) -> httpx.Response:
        said = {"name": name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), **other}
        place = f"/v1/tasks/{self.offer.id}/complete"
        return self.client.post(place, json=said, headers=report_header(), params={"wait": wait})


@dataclass
class Served:
    """A coordinator with a job of one round for one device."""

    site: Site
    world: S3World
    job: str
    tokens: list[str]
    held: ExitStack

    def http(self, number: int) -> httpx.Client:
        return self.held.enter_context(self.site.http(self.tokens[number]))

    def take(self, number: int = 0) -> Uploader:
        """A task of a device."""
        client = self.http(number)
        told = client.post("/v1/tasks/next?wait=5&storage=1").json()
        assert told["storage"].startswith("http")
        return Uploader(client, TaskOffer(**told))

    def wait_for(self, version: int) -> None:
        wait_until(lambda: self.site.server.coordinator.job(self.job)["version"] >= version)


@pytest.fixture
def served(server: S3Server, stored: type[S3World], prefix: str, tmp_path: Path) -> Iterator[Served]:
    world = stored(tmp_path / "served")
    world.now = time.time()
    job = world.job(num_rounds=1)
    tokens = [world.registry.enrol(world.registry.invite(1, 60), "d", DeviceProfile(tier="strong"))[1] for _ in "ab"]
    world.end()
    with ExitStack() as held, serving(world.root, blobs=prefix) as site:
        yield Served(site, world, job, tokens, held)


def unsound(world: World, offer: TaskOffer, what: str) -> bytes:
    body, vector = body_of(world.manifest, offer), scripted(world.manifest, offer)
    if what == "not finite":
        return body_of(world.manifest, offer, np.full_like(vector, np.nan))
    return body.replace(b"[2,3]", b"[3,2]") if what == "another shape" else body


WHY = {
    "not finite": "finite",
    "another shape": "shape",
    "another digest": "another sha256",
    "another size": "bytes instead of",
}


@pytest.mark.parametrize(
    "what", ["not finite", "another shape", "another digest", "another size", "nothing", "of another task", "made up"]
)
def test_an_unsound_upload_is_refused_and_its_device_hears_why(
    served: Served, server: S3Server, prefix: str, what: str
) -> None:
    device = served.take()
    body, other = unsound(served.world, device.offer, what), {}
    if what == "nothing":
        name = device.grant(len(body)).json()["name"]
    elif what == "made up":
        name = "0" * 48
    elif what == "of another task":  # which lies there, but below another name
        name = device.put(body)
        client = server.client()
        (key,) = [key for key in keys(server, below(prefix)) if "/uploads/" in key]
        moved = key.replace(device.offer.id, device.offer.id[:-1] + "7")
        client.put_object(Bucket=BUCKET, Key=moved, Body=body)
        client.delete_object(Bucket=BUCKET, Key=key)
    else:
        name = device.put(body)
        other = {"another digest": {"sha256": "1" * 64}, "another size": {"bytes": len(body) - 1}}.get(what, {})
    answer = device.complete(name, body, **other)
    assert answer.status_code == 400, answer.text
    assert WHY.get(what, "nothing instead of") in answer.json()["detail"]
    assert device.complete(name, body, **other).json()["detail"] == answer.json()["detail"], "also if it asks again"
    assert "X-Amz" not in answer.text
    coordinator = served.site.server.coordinator
    told = [event["body"] for event in coordinator.events(served.job, 0)[0] if event["kind"] == "TaskFailed"]
    assert [row["reason"] for row in told] == ["refused"] and "X-Amz" not in str(told)
    again = served.take(1)  # the seat is free for another device
    good = body_of(served.world.manifest, again.offer)
    answer = again.complete(again.put(good), good)
    assert answer.status_code == 201, answer.text
    served.wait_for(1)
    left = [key for key in keys(server, below(prefix)) if "/spool/" in key and f"{device.offer.id}." in key]
    assert left == [], "nothing of it is left"


def test_an_agent_logs_a_refusal_and_counts_a_failed_task(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = DeviceClient(served.site.url, served.tokens[0])
    offer = client.next_task(5.0)
    assert offer is not None and offer.storage is not None
    body = unsound(served.world, offer, "not finite")
    with pytest.raises(Declined, match="finite") as refusal:
        client.send_update(offer.id, lambda: [body], report_of(offer), storage=True)
    assert refusal.value.answer == 400
    agent = Agent(client, Device(([], []), served.world.root / "agent"))
    monkeypatch.setattr(agent, "_work", lambda offer: (_ for _ in ()).throw(refusal.value))
    assert agent.answer(offer) is False and agent._failed == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "embrace.agent"]
    assert "finite" in line and "\n" not in line
    client.close()


def test_the_length_of_an_upload_is_bounded_and_signed(served: Served, server: S3Server) -> None:
    device = served.take()
    body = body_of(served.world.manifest, device.offer)
    refused = device.grant(10 << 20)
    assert refused.status_code == 400 and "the most that it can have" in refused.json()["detail"]
    assert device.grant(0).status_code == 422
    url = device.grant(len(body)).json()["url"]
    assert "content-length" in parse_qs(urlsplit(url).query)["X-Amz-SignedHeaders"][0]
    if server.kind == "rclone":  # moto checks no signatures
        assert httpx.put(url, content=body + b"more").status_code == 403
        assert httpx.get(url).status_code == 403, "it is for writing"
        stranger = served.http(1)
        assert stranger.post(f"/v1/tasks/{device.offer.id}/upload", json={"bytes": 5}).status_code == 404


def test_a_body_that_is_written_over_after_its_check_changes_nothing(served: Served, server: S3Server) -> None:
    device = served.take()
    body = body_of(served.world.manifest, device.offer)
    granted = device.grant(len(body)).json()
    assert httpx.put(granted["url"], content=body).is_success
    assert device.complete(granted["name"], body).status_code == 201
    assert httpx.put(granted["url"], content=bytes(len(body))).is_success
    served.wait_for(1)
    coordinator = served.site.server.coordinator
    before, after = (
        map_weights(coordinator.version_file(served.job, version)[0], served.world.manifest.space) for version in (0, 1)
    )
    sent = scripted(served.world.manifest, device.offer)
    np.testing.assert_array_max_ulp(after, (before.astype(np.float64) + sent).astype(np.float32), maxulp=1)


def test_retries_and_lost_answers_are_harmless(served: Served) -> None:
    device = served.take()
    body = body_of(served.world.manifest, device.offer)
    device.put(body)  # and never completed
    name = device.put(body)
    assert device.complete(name, body, wait=0).status_code in (201, 202)
    for _ in range(2):
        assert device.complete(name, body).status_code == 201
    plain = device.client.put(f"/v1/tasks/{device.offer.id}/update", content=body, headers=report_header())
    assert (plain.status_code, plain.json()["reason"]) == (409, "duplicate")


def test_a_ref_that_is_written_but_not_answered_keeps_its_object(server: S3Server, prefix: str, tmp_path) -> None:
    exceptions = pytest.importorskip("botocore.exceptions", reason="boto3 is missing: make test-scale")
    key, body = "spool/a-0-0-1.x.body", b"an update"
    said = (key, len(body), hashlib.sha256(body).hexdigest())
    with closing(S3Blobs(prefix, tmp_path / "one")) as blobs, closing(S3Blobs(prefix, tmp_path / "two")) as other:
        assert httpx.put(str(blobs.upload_url(key, len(body))), content=body).is_success
        put = blobs._client.put_object

        def lose_answer(**request: Any) -> None:
            put(**request)
            raise exceptions.ReadTimeoutError(endpoint_url="storage")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blobs._client, "put_object", lose_answer)
            with pytest.raises(StoreAway):
                blobs.take_upload(*said)
        assert list(blobs.uploads("spool")) == [key], "what was not read yet stays"
        blobs.take_upload(*said)
        assert blobs.file(key).read_bytes() == other.file(key).read_bytes() == body
        assert list(blobs.uploads("spool")) == []


def test_an_upload_that_another_process_takes_meanwhile_is_not_missed(server: S3Server, prefix: str, tmp_path) -> None:
    key, body = "spool/a-0-0-1.x.body", b"an update"
    said = (key, len(body), hashlib.sha256(body).hexdigest())
    with closing(S3Blobs(prefix, tmp_path / "one")) as blobs, closing(S3Blobs(prefix, tmp_path / "two")) as other:
        assert httpx.put(str(blobs.upload_url(key, len(body))), content=body).is_success
        size_of = blobs._size_of

        def look_late(name: str) -> int | None:
            other.take_upload(*said)
            return size_of(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blobs, "_size_of", look_late)
            blobs.take_upload(*said)
        assert blobs.file(key).read_bytes() == body


def test_an_update_that_the_storage_has_lost_is_not_waited_for(served: Served, server: S3Server, prefix: str) -> None:
    """Its seat is free for another device, and its own is not to blame."""
    device = served.take()
    body = body_of(served.world.manifest, device.offer)
    name = device.put(body)
    key = f"spool/{device.offer.id}.{name}.body"
    with closing(S3Blobs(prefix, served.world.root / "other")) as other:
        facts = set(keys(server, f"{below(prefix)}/objects/"))
        other.take_upload(key, len(body), hashlib.sha256(body).hexdigest())
        (lost,) = set(keys(server, f"{below(prefix)}/objects/")) - facts
        server.client().delete_object(Bucket=BUCKET, Key=lost)
        other.drop(key)
        with pytest.raises(FileNotFoundError, match="has lost an object"):
            other.file(key)
    assert device.complete(name, body).status_code in (404, 409)
    again = served.take(1)
    good = body_of(served.world.manifest, again.offer)
    assert again.complete(again.put(good), good).status_code == 201
    served.wait_for(1)
    events = served.site.server.coordinator.events(served.job, 0)[0]
    assert "TaskFailed" not in [event["kind"] for event in events]


def test_a_device_that_never_completes_holds_nothing_up(
    server: S3Server, stored: type[S3World], prefix: str, tmp_path: Path
) -> None:
    """Its lease runs out, and what it has uploaded goes."""
    world = stored(tmp_path / "served")
    world.now = time.time()
    job = world.job(num_rounds=3, participate={"count": 1}, bounds={"lease": 1.0, "offer": 60})
    tokens = [world.registry.enrol(world.registry.invite(1, 60), "d", DeviceProfile(tier="strong"))[1] for _ in "ab"]
    world.end()
    with ExitStack() as held, serving(world.root, blobs=prefix) as site:
        served = Served(site, world, job, tokens, held)
        first = [served.http(number).post("/v1/tasks/next?wait=0&storage=1") for number in range(2)]
        drawn = next(number for number, answer in enumerate(first) if answer.status_code == 200)
        lost = Uploader(served.http(drawn), TaskOffer(**first[drawn].json()))
        name = lost.put(b"x" * 100)
        assert [key for key in keys(server, below(prefix)) if "/uploads/" in key]
        other = held.enter_context(DeviceClient(site.url, tokens[1 - drawn]))
        while site.server.coordinator.job(job)["version"] < 3:
            offer = other.next_task(5.0)
            if offer is not None:
                body = body_of(world.manifest, offer)
                other.send_update(offer.id, lambda body=body: [body], report_of(offer), storage=True)
        assert lost.complete(name, b"x" * 100).status_code in (404, 409)
        wait_until(lambda: not [key for key in keys(server, below(prefix)) if "/uploads/" in key])


@pytest.mark.parametrize("moment", ["uploaded", "completed"])
def test_killed_between_upload_complete_and_verdict(
    server: S3Server, stored: type[S3World], prefix: str, tmp_path: Path, moment: str
) -> None:
    """kill -9 where a device has uploaded, and where it was told that this is recorded."""
    world = stored(tmp_path / "served")
    world.now = time.time()
    (token, *_), job = enrol_all(world), world.job(num_rounds=1)
    world.end()
    # At 'after-check' the body was looked at, and nothing was settled.
    process, url = start_server(world.root, blobs=prefix, point="after-check", times=1)
    try:
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)
        device = Uploader(client, TaskOffer(**client.post("/v1/tasks/next?wait=5&storage=1").json()))
        body = body_of(world.manifest, device.offer)
        name = device.put(body)
        if moment == "completed":
            with pytest.raises(httpx.TransportError):
                device.complete(name, body)
            assert process.wait(PATIENCE) == -signal.SIGKILL
            assert query(world.root, "SELECT checked FROM updates WHERE job = :job", job=job)[0][0] in (0, False)
        end_process(process)
        process, _ = start_server(world.root, port=httpx.URL(url).port or 0, blobs=prefix)
        assert device.complete(name, body).status_code == 201
        wait_until(lambda: query(world.root, "SELECT version FROM jobs WHERE id = :job", job=job) == [(1,)])
        client.close()
    finally:
        end_process(process)
