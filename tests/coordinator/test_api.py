"""The REST interface over real sockets: wrong bodies, ranges of weights, events, a full disk, a crowd that waits."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from coordinator import keeper
from coordinator.admin_client import AdminClient
from coordinator.api import device_routes
from coordinator.plan import plan_from
from federation.weights import map_weights
from federation.wire import encode_layers
from tests.coordinator.harness import Site, body_of, place_bundle, report_header, scripted, serving, write_bundle


class Offer:
    """A task as JSON, with the fields as attributes."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.__dict__.update(found)

    id: str
    job: str
    work: dict[str, Any]


@pytest.fixture
def held(site: Site) -> Iterator[tuple[httpx.Client, Offer]]:
    """A device that holds a task, of a job that no other test has."""
    service = site.server.coordinator
    for row in service.devices():
        if not row["revoked"]:
            service.revoke(row["id"])
    job = service.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    with site.http(site.enrol()[1]) as client:
        yield client, Offer(client.post("/v1/tasks/next?wait=5").json())
    site.settle()
    if service.job(job)["state"] == "running":
        service.set_state(job, "stopped")


def put(client: httpx.Client, offer: Offer, body: Any, **headers: str) -> httpx.Response:
    return client.put(f"/v1/tasks/{offer.id}/update", content=body, headers={**report_header(), **headers})


def changed(site: Site, offer: Offer, change: Any) -> bytes:
    """A body whose vector was tampered with."""
    manifest = site.manifest  # type: ignore[attr-defined]
    vector = scripted(manifest, offer)
    change(vector)
    return body_of(manifest, offer, vector)


def set_first(value: float) -> Any:
    def change(vector: np.ndarray) -> None:
        vector[0] = value

    return change


BAD_BODIES = {
    "empty": lambda s, o: b"",
    "truncated": lambda s, o: body_of(s.manifest, o)[:-1],
    "header only": lambda s, o: body_of(s.manifest, o)[:8],
    "goes on": lambda s, o: body_of(s.manifest, o) + b"x",
    "nan": lambda s, o: changed(s, o, set_first(np.nan)),
    "inf": lambda s, o: changed(s, o, set_first(-np.inf)),
    "too large": lambda s, o: changed(s, o, set_first(1e6)),
    "wrong shape": lambda s, o: body_of(s.manifest, o).replace(b"[2,3]", b"[3,2]"),
    "wrong name": lambda s, o: body_of(s.manifest, o).replace(b"stem.w", b"stem.x"),
    "another boundary": lambda s, o: b"".join(map(bytes, encode_layers(s.manifest.space, 1, np.ones(13, np.float32)))),
    "huge header": lambda s, o: (2**62).to_bytes(8, "little") + b"{}",
    "noise": lambda s, o: os.urandom(300),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_a_bad_body_leaves_nothing_and_a_good_one_may_follow(site: Site, held: Any, kind: str) -> None:
    client, offer = held
    answer = put(client, offer, BAD_BODIES[kind](site, offer))
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json()
    assert found["status"] == answer.status_code and found["title"] and found["detail"]
    assert site.spool() == []
    assert put(client, offer, body_of(site.manifest, offer)).status_code == 201  # type: ignore[attr-defined]


def test_the_digest_is_checked_if_it_is_given(site: Site, held: Any) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]
    right = base64.b64encode(hashlib.sha256(body).digest()).decode()
    wrong = base64.b64encode(hashlib.sha256(b"").digest()).decode()
    answer = put(client, offer, body, **{"Content-Digest": f"sha-256=:{wrong}:"})
    assert answer.status_code == 400 and "Content-Digest" in answer.json()["detail"] and site.spool() == []
    answer = put(client, offer, body, **{"Content-Digest": f"sha-256=:{right}:"})
    assert answer.status_code == 201 and answer.json()["sha256"] == hashlib.sha256(body).hexdigest()
    again = put(client, offer, body)
    assert again.status_code == 409 and again.json()["reason"] == "duplicate"


@pytest.mark.parametrize(
    "report",
    [
        "", "no json", "[]", "{}", '{"samples": 0}', '{"samples": 1, "loss": NaN}', '{"samples": 1, "loss": 1e999}',
        '{"samples": ' + "9" * 5000 + "}", "[" * 10_000,
    ],
)  # fmt: skip
def test_a_bad_report_is_the_devices_mistake(site: Site, held: Any, report: str) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]
    answer = put(client, offer, body, **{"Embrace-Report": report})
    assert answer.status_code in (400, 422), answer.text
    assert site.spool() == []
    assert put(client, offer, body).status_code == 201


def test_an_upload_in_small_pieces_and_one_without_a_length(site: Site, held: Any) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]
    assert put(client, offer, (body[i : i + 7] for i in range(0, len(body), 7))).status_code == 201
    site.settle()
    assert site.server.coordinator.job(offer.job)["version"] == 1


def test_a_connection_that_breaks_leaves_nothing(site: Site, held: Any) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]

    def half() -> Iterator[bytes]:
        yield body[:100]
        until = time.monotonic() + 30
        while not site.spool() and time.monotonic() < until:
            time.sleep(0.01)
        assert len(site.spool()) == 1
        raise ConnectionError("the cable was pulled")

    with pytest.raises(ConnectionError):
        put(client, offer, half())
    until = time.monotonic() + 30
    while site.spool() and time.monotonic() < until:
        time.sleep(0.01)
    assert site.spool() == []
    assert put(client, offer, body).status_code == 201


# --- weights ---------------------------------------------------------------------------------------


def test_weights_whole_by_bytes_and_by_layers(site: Site, held: Any) -> None:
    client, offer = held
    path = site.server.coordinator.files.version(offer.job, 0)
    everything, space = path.read_bytes(), site.manifest.space  # type: ignore[attr-defined]
    url = f"/v1/jobs/{offer.job}/versions/0/weights"
    whole = client.get(url)
    assert whole.content == everything and whole.headers["etag"] == f'"{offer.job}-0"'
    part = client.get(url, headers={"Range": "bytes=10-29"})
    assert part.status_code == 206 and part.content == everything[10:30]
    assert part.headers["content-range"] == f"bytes 10-29/{len(everything)}"
    assert client.get(url, headers={"Range": f"bytes={len(everything)}-"}).status_code == 416
    same = client.get(url, headers={"Range": "bytes=10-29", "If-Range": whole.headers["etag"]})
    other = client.get(url, headers={"Range": "bytes=10-29", "If-Range": '"another"'})
    assert (same.status_code, other.status_code) == (206, 200)
    vector = map_weights(path, space)
    for first in range(3):
        for end in range(first + 1, 4):
            answer = client.get(url, params={"from_layer": first, "to_layer": end})
            tensors = load(answer.content)
            assert set(tensors) == {p.name for layer in space.layers[first:end] for p in layer}
            for name, value in tensors.items():
                assert value.tobytes() == vector[space.slice_of(name)].tobytes()
    assert load(client.get(url, params={"from_layer": 2}).content).keys() == {"head.w", "head.b"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("versions/1/weights", 404),
        ("versions/-1/weights", 404),
        (f"versions/{10**300}/weights", 404),
        ("versions/x/weights", 422),
        ("versions/0/weights?from_layer=3", 400),
        ("versions/0/weights?from_layer=2&to_layer=1", 400),
        ("versions/0/weights?to_layer=4", 400),
        ("versions/0/weights?from_layer=-1", 422),
    ],
)
def test_weights_that_are_not_there(site: Site, held: Any, path: str, status: int) -> None:
    client, offer = held
    assert client.get(f"/v1/jobs/{offer.job}/{path}").status_code == status


@pytest.mark.parametrize("name", ["..", "../x", "%2e%2e", "..%2f..%2fcoordinator.db", ".hidden", "x%00", "a" * 200])
def test_names_do_not_lead_out_of_the_directory(site: Site, held: Any, name: str) -> None:
    client, _ = held
    for path in (f"/v1/jobs/{name}/versions/0/weights", f"/v1/bundles/{name}/manifest", f"/v1/graphs/{name}"):
        answer = client.send(client.build_request("GET", httpx.URL(site.url).copy_with(raw_path=path.encode())))
        assert answer.status_code in (400, 401, 404, 405), (path, answer.status_code)
        assert b"SQLite" not in answer.content


# --- bundles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "%2e%2e/evil",
        "a/../../evil",
        "/etc/evil",
        "a/b/c/d",
        ".evil",
        "..%2f..%2fevil",
        "a%00b",
        "a%5cb",
        "a//b",
    ],
)
def test_no_file_of_a_bundle_lies_outside_of_it(site: Site, name: str) -> None:
    before = {path for path in site.directory.rglob("*") if "coordinator.db" not in path.name}
    with site.http(site.admin) as admin:
        raw = f"/v1/bundles/{'a' * 64}/files/{name}".encode()
        answer = admin.send(admin.build_request("PUT", httpx.URL(site.url).copy_with(raw_path=raw), content=b"evil"))
    assert 400 <= answer.status_code < 500, answer.status_code
    after = {path for path in site.directory.rglob("*") if "coordinator.db" not in path.name}
    assert after - before <= {site.directory / "bundles" / f"{'a' * 64}.draft"}
    assert not (site.directory.parent / "evil").exists()


def test_a_bundle_is_taken_only_as_its_manifest_says(site: Site, tmp_path: Path) -> None:
    digest, manifest = write_bundle(tmp_path / "bundle", width=4)
    names = ["manifest.json", *(file.name for file in manifest.files())]
    bundles = site.directory / "bundles"
    with site.http(site.admin) as admin:

        def send(name: str, content: bytes) -> None:
            assert admin.put(f"/v1/bundles/{digest}/files/{name}", content=content).status_code == 204

        assert admin.post(f"/v1/bundles/{digest}").status_code == 400  # nothing has come
        for name in names[:-1]:
            send(name, (tmp_path / "bundle" / name).read_bytes())
        assert admin.post(f"/v1/bundles/{digest}").status_code == 400  # one is missing
        send(names[-1], b"something else")
        assert admin.post(f"/v1/bundles/{digest}").status_code == 400
        assert not (bundles / digest).exists()
        send(names[-1], (tmp_path / "bundle" / names[-1]).read_bytes())
        assert admin.post(f"/v1/bundles/{digest}").status_code == 204
        send(names[0], (tmp_path / "bundle" / names[0]).read_bytes())  # sent again by somebody who did not know
        assert admin.post(f"/v1/bundles/{digest}").status_code == 204
        assert (bundles / digest).is_dir() and not (bundles / f"{digest}.draft").exists()
        assert admin.put(f"/v1/bundles/{digest}/files/a", content=b"").status_code == 204
        assert admin.put(f"/v1/bundles/{digest}/files/a/b", content=b"").status_code == 400
        assert admin.put(f"/v1/bundles/{digest}/files/c/d", content=b"").status_code == 204
        assert admin.put(f"/v1/bundles/{digest}/files/c", content=b"").status_code == 400
        other = hashlib.sha256(b"").hexdigest()
        assert admin.put(f"/v1/bundles/{other}/files/manifest.json", content=b"{}").status_code == 204
        assert admin.post(f"/v1/bundles/{other}").status_code == 400
        assert admin.post("/v1/jobs", json={"bundle": other, "plan": {"bundle": "x"}}).status_code == 400


def test_bad_plans_name_the_key(site: Site) -> None:
    with site.http(site.admin) as admin:
        for plan, word in (
            ({}, "bundle"), ({"bundle": "x", "rounds": 3}, "rounds"), ({"bundle": "x", "num_rounds": "3"}, "num_"),
            ({"bundle": "x", "seed": -1}, "seed"), ({"bundle": "x", "name": "\ud800"}, "name"),
        ):  # fmt: skip
            body = json.dumps({"bundle": site.bundle, "plan": plan})  # type: ignore[attr-defined]
            answer = admin.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 422) and word in answer.json()["detail"], (plan, answer.text)


def test_errors_of_the_framework_are_problem_documents_too(site: Site) -> None:
    with site.http(site.admin) as admin:
        for answer, status in (
            (admin.get("/v1/nowhere"), 404), (admin.patch("/v1/jobs"), 405), (admin.get("/v1/jobs/none"), 404),
            (admin.post("/v1/jobs", content=b"{"), 422), (admin.post("/v1/enrolments", json={"uses": 0}), 422),
            (admin.post("/v1/jobs/none/stop"), 404), (admin.delete("/v1/devices/none"), 404),
            (admin.post("/v1/jobs/none/explode"), 404), (admin.get("/v1/jobs/none/rounds"), 404),
        ):  # fmt: skip
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status and answer.json()["title"]
        assert admin.patch("/v1/jobs").headers["allow"]


# --- events ----------------------------------------------------------------------------------------


def sse(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def test_events_come_in_order_and_go_on_where_they_were(site: Site, held: Any) -> None:
    client, offer = held
    url = f"/v1/jobs/{offer.job}/events"
    with site.http(site.admin) as admin, admin.stream("GET", url) as live:
        lines = live.iter_lines()
        early = [next(line for line in lines if line.startswith("event: ")) for _ in range(2)]  # while the job runs
        assert early == ["event: JobCreated", "event: GrantLease"]
        assert put(client, offer, body_of(site.manifest, offer)).status_code == 201  # type: ignore[attr-defined]
        site.settle()
        site.server.coordinator.set_state(offer.job, "stopped")
        kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]  # ends with the job
        assert kinds == ["AcceptUpdate", "CloseRound", "RoundCommitted", "JobState", "RoundAbandoned"]
        whole = sse(admin.get(url).text)
        ids = [number for number, _, _ in whole]
        assert ids == sorted(set(ids)) and len(ids) == 7
        assert sse(admin.get(url, headers={"Last-Event-ID": str(ids[2])}).text) == whole[3:]
        assert sse(admin.get(url, params={"after": ids[4]}).text) == whole[5:]
        watcher = AdminClient(site.url, site.admin)
        assert list(watcher.events(offer.job)) == [data for _, _, data in whole]
        watcher.close()


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30, "²", "1;2"])
def test_a_bad_last_event_is_the_clients_mistake(site: Site, held: Any, last: str) -> None:
    _, offer = held
    with site.http(site.admin) as admin:
        answer = admin.get(f"/v1/jobs/{offer.job}/events", headers={"Last-Event-ID": last.encode("latin-1")})
        assert answer.status_code in (400, 422) and "Last-Event-ID" in answer.json()["detail"]
        assert admin.get(f"/v1/jobs/{offer.job}/events", params={"after": "9" * 30}).status_code in (400, 422)
        assert admin.get("/v1/jobs/none/events").status_code == 404


# --- many at once ----------------------------------------------------------------------------------


def test_a_crowd_that_waits_does_not_keep_others_from_being_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the threads that a server has: waiting takes none. All hear of it when there is something to do."""
    monkeypatch.setattr(device_routes, "PRESENCE", 1e6)  # nobody asks again by itself
    with serving(tmp_path) as site:
        place_bundle(site.directory)
        bundle = next(path.name for path in (site.directory / "bundles").iterdir())
        tokens = [site.enrol()[1] for _ in range(60)]
        found: list[int] = []

        def wait(token: str) -> None:
            with site.http(token) as client:
                found.append(client.post("/v1/tasks/next?wait=60").status_code)

        threads = [threading.Thread(target=wait, args=(token,), daemon=True) for token in tokens]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while len(site.server.coordinator.bell._waiting) < 60 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(site.server.coordinator.bell._waiting) == 60
        with site.http(site.admin) as admin:
            admin.get("/v1/jobs", timeout=10).raise_for_status()
            plan = {"bundle": "x", "participate": {"min_available": 61}}
            admin.post("/v1/jobs", json={"bundle": bundle, "plan": plan}).raise_for_status()
        wait(site.enrol()[1])  # the one that was missing
        for thread in threads:
            thread.join(60)
        assert found == [200] * 61


def test_a_device_that_went_away_while_it_waited_gets_no_task(tmp_path: Path) -> None:
    with serving(tmp_path) as site:
        bundle, _ = place_bundle(site.directory)
        service = site.server.coordinator
        with site.http(site.enrol()[1]) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/tasks/next?wait=60", timeout=0.5)
        job = service.create_job(plan_from({"bundle": "x"}), bundle)
        until = time.monotonic() + 30
        with site.http() as watcher:  # until its request is over, which nobody hears the answer of
            while "/v1/tasks/next" not in watcher.get("/metrics").text and time.monotonic() < until:
                time.sleep(0.05)
            assert "/v1/tasks/next" in watcher.get("/metrics").text
        assert service.job(job)["round"]["state"] == "selecting"


# --- a full disk -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """A file that takes all but so many bytes."""
    found = os.statvfs(place)
    filler = place / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)
    return filler


def test_a_full_disk_refuses_uploads_and_work_goes_on_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "TRY_AGAIN", 0.2)
    directory = small_disk / "data"
    with serving(directory) as site:
        bundle, manifest = place_bundle(directory, width=30_000)  # 480 kB
        service = site.server.coordinator
        job = service.create_job(plan_from({"bundle": "x", "num_rounds": 2}), bundle)
        before = np.array(map_weights(service.files.version(job, 0), manifest.space))
        with site.http(site.enrol()[1]) as client:
            offer = Offer(client.post("/v1/tasks/next?wait=5").json())
            body = body_of(manifest, offer)
            filler = fill(small_disk, leave=100_000)
            for _ in range(2):
                answer = put(client, offer, body)
                assert answer.status_code == 507, answer.text
                assert answer.headers["content-type"] == "application/problem+json"
                assert int(answer.headers["retry-after"]) > 0 and answer.json()["status"] == 507
                assert site.spool() == []
            assert client.get(f"/v1/jobs/{job}/versions/0/weights").status_code == 200
            filler.unlink()
            fill(small_disk, leave=800_000)  # room for the body, not for the new version beside it
            assert put(client, offer, body).status_code == 201
            site.settle()
            assert service.job(job)["round"]["state"] == "closing" and service.job(job)["version"] == 0
            filler.unlink()
            until = time.monotonic() + 60
            while service.job(job)["version"] == 0 and time.monotonic() < until:  # it is tried again
                time.sleep(0.05)
            after = np.array(map_weights(service.files.version(job, 1), manifest.space))
            expected = (before.astype(np.float64) + scripted(manifest, offer)).astype(np.float32)
            np.testing.assert_array_max_ulp(after, expected, maxulp=1)
            offer = Offer(client.post("/v1/tasks/next?wait=30").json())
            assert put(client, offer, body_of(manifest, offer)).status_code == 201
            site.settle()
            assert service.job(job)["state"] == "done" and site.spool() == []
