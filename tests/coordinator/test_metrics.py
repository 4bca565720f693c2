"""The numbers for Prometheus, and the tables of results, after real rounds."""

from __future__ import annotations

import csv
import io
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect

from coordinator.api import metrics as prometheus
from coordinator.api.metrics import Metrics
from coordinator.errors import NotAllowed, NotFound, Refused
from federation.errors import InputError
from federation.wire import WireError
from tests.coordinator.databases import database_url
from tests.live_server import LiveServer, live_server, next_task, send_update
from tests.waiting import PATIENCE, wait_until

NOTHING = {"jobs": {}, "devices": 0, "devices_present": 0, "rounds_committed": 0}
SECONDS = {"wall": 2.5, "forward": {"first": 0.25, "second": 0.5}, "training": 1.0, "backward": None, "other": 0.1}


def values(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, labels in the order of their names) -> value."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, tuple(s.labels[key] for key in sorted(s.labels))): s.value for s in samples}


def test_requests_are_counted_by_method_route_and_status() -> None:
    metrics = Metrics(lambda: NOTHING)
    metrics.observe("GET", "/v1/jobs", 200, 0.02, 0)
    metrics.observe("PUT", "/v1/tasks/{task}/update", 201, 0.2, 1000)
    metrics.observe("BREW", "(none)", 405, 0.001, 5)
    found = values(metrics.text().decode())
    assert found["embrace_requests_total", ("GET", "/v1/jobs", "200")] == 1
    assert found["embrace_requests_total", ("other", "(none)", "405")] == 1
    assert found["embrace_request_seconds_sum", ("PUT", "/v1/tasks/{task}/update")] == 0.2
    assert found["embrace_request_seconds_bucket", ("0.03", "GET", "/v1/jobs")] == 1
    assert found["embrace_request_seconds_bucket", ("0.01", "GET", "/v1/jobs")] == 0
    assert found["embrace_received_bytes_total", ()] == 1005
    assert found["process_resident_memory_bytes", ()] > 1e6


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused("too late", "round_closed"), "round_closed"),
        (WireError("nan"), "invalid_body"),
        (NotAllowed("no token"), "not_allowed"),
        (NotFound("no task"), "unknown_task"),
        (InputError("samples"), "invalid_report"),
        (ClientDisconnect(), "cut_off"),
        (OSError(28, "no space"), "storage"),
        (KeyError("a bug"), "other"),
    ],
)
def test_refused_updates_have_a_reason(error: BaseException, reason: str) -> None:
    metrics = Metrics(lambda: NOTHING)
    metrics.refused(error)
    assert values(metrics.text().decode())["embrace_updates_refused_total", (reason,)] == 1


def test_two_applications_count_for_themselves() -> None:
    first, second = Metrics(lambda: NOTHING), Metrics(lambda: NOTHING)
    first.accepted()
    assert values(second.text().decode())["embrace_updates_accepted_total", ()] == 0


def test_words_of_devices_make_no_labels_and_names_are_escaped(tmp_path: Path) -> None:
    """Hostile names and endless fleets: the parser of Prometheus reads all of it, and labels have a bound."""
    from coordinator.reports import MOST_DEVICES, MOST_JOBS
    from coordinator.store.schema import DeviceRecord, JobRecord, MetricRecord, StandingRecord
    from tests.coordinator.harness import World

    world = World(tmp_path)
    repository, name = world.coordinator.repository, 'a"b\\c\nd\x1b[2J'
    with repository.begin() as session:
        for number in range(MOST_JOBS + 9):
            repository.add_job(session, JobRecord(f"j{number}", name, "", {}, "done", version=3, created_at=number))
        scores = [(2, 0.5), (3, 0.75)]
        rows = [MetricRecord(at, "j58", at, "accuracy", value, 0.0) for at, value in scores]
        repository.add_metrics(session, [vars(row) for row in rows])
        for number in range(MOST_DEVICES + 5):
            repository.add_device(session, DeviceRecord(f"d{number}", name, str(number), False, {}, 0.0, 0.0))
            repository.write_standings(session, [StandingRecord("j0", f"d{number}", failures=number)])
    metrics = Metrics(lambda: NOTHING, world.coordinator.figures)
    metrics.given_up("out_of_memory")
    metrics.given_up(name)
    found = values(metrics.text().decode())
    shown = 'a"b\\c\\nd\\x1b[2J'
    assert found["embrace_job_score", ("j58", "accuracy", shown)] == 0.75
    assert sum(key[0] == "embrace_job_version" for key in found) == MOST_JOBS
    failures = {labels: value for (metric, labels), value in found.items() if metric == "embrace_device_failures"}
    assert len(failures) == MOST_DEVICES and failures["d24", shown] == 24 and ("d4", shown) not in failures
    assert found["embrace_tasks_total", ("other",)] == found["embrace_tasks_total", ("out_of_memory",)] == 1
    assert found["embrace_devices_by_state", ("gone",)] == MOST_DEVICES + 5
    world.end()


def test_devices_are_counted_as_they_are_described(tmp_path: Path) -> None:
    """The list of devices is the oracle: one by one it says what the database counts at once."""
    from tests.coordinator.harness import World

    world = World(tmp_path)
    world.job(participate={"quorum": 1.0})
    gone = world.fleet("strong", "strong", "strong")
    world.now += 3600
    works, fails, late, shut_out, _ = fleet = world.fleet(*["strong"] * 5)
    offers = world.offers(fleet)
    world.coordinator.fail_task(fails, offers[fails].id, "data", "no samples")
    for device in (late, shut_out):
        world.send(device, offers[device])
    world.coordinator.revoke(shut_out)
    world.coordinator.revoke(gone[0])
    described = Counter(row["state"] for row in world.coordinator.devices())
    assert described["working"] and described["benched"] and described["gone"] == described["revoked"] == 2
    assert {state: n for state, n in world.coordinator.figures()["states"].items() if n} == described
    assert works in offers
    world.end()


def test_however_many_clients_ask_the_numbers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for one reading, which takes one thread; those that come soon after get the same text."""
    from tests.coordinator.harness import serving

    monkeypatch.setattr(prometheus, "KEPT", PATIENCE)
    release, read = threading.Event(), []
    with serving(tmp_path) as site:
        counts = site.server.app.state.metrics
        write = counts.text

        def held() -> bytes:
            read.append(threading.get_ident())
            release.wait(PATIENCE)
            return bytes(write())

        counts.text = held
        with ThreadPoolExecutor(60) as crowd, site.http() as client, site.http(site.admin) as admin:
            asked = [crowd.submit(client.get, "/metrics") for _ in range(60)]
            wait_until(lambda: read)
            assert admin.get("/v1/jobs").status_code == 200
            release.set()
            texts = {answer.result().text for answer in asked}
        assert len(read) == len(texts) == 1


def test_a_reading_that_fails_is_not_kept(tmp_path: Path) -> None:
    from tests.coordinator.harness import serving

    with serving(tmp_path) as site:
        counts = site.server.app.state.metrics
        write, counts.text = counts.text, lambda: 1 / 0
        assert httpx.get(f"{site.url}/metrics", timeout=PATIENCE).status_code == 500
        counts.text = write
        wait_until(lambda: httpx.get(f"{site.url}/metrics", timeout=PATIENCE).status_code == 200)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("metrics")
    with live_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def job(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job whose two rounds are over, and an update that was refused."""
    made = server.create_job(tmp_path_factory.mktemp("bundle") / "small", num_rounds=2)
    device = server.enrol("kitchen")
    for _ in range(2):
        task = next_task(device)["id"]
        assert send_update(device, task, {"seconds": SECONDS, "boundary": "=1+1"}).status_code == 201
    assert send_update(device, task).status_code in (404, 409)
    admin = server.client(server.admin)
    wait_until(lambda: admin.get(f"/v1/jobs/{made}").json()["state"] == "done")
    return made


def table(server: LiveServer, path: str) -> list[dict[str, str]]:
    answer = server.client(server.admin).get(path)
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_the_numbers_after_two_rounds(server: LiveServer, job: str) -> None:
    answer = server.client("nobody").get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = values(answer.text)
    assert found["embrace_updates_accepted_total", ()] == 2
    assert sum(value for (name, _), value in found.items() if name == "embrace_updates_refused_total") == 1
    assert found["embrace_rounds_committed_total", ()] == 2
    assert found["embrace_jobs", ("done",)] == 1
    assert found["embrace_devices", ()] == found["embrace_devices_present", ()] == 1
    assert found["embrace_requests_total", ("PUT", "/v1/tasks/{task}/update", "201")] == 2
    assert found["embrace_received_bytes_total", ()] > 1000
    assert 1e7 < found["process_resident_memory_bytes", ()] < 1e9
    name = (job, "small")
    assert found["embrace_job_version", name] == 2 and found["embrace_job_training_loss", name] == 1.5
    assert found["embrace_job_round_updates", name] == 1 and found["embrace_job_round_seconds", name] >= 0
    assert found["embrace_job_devices_missing", name] == 0
    assert found["embrace_tasks_total", ("done",)] == 2 and found["embrace_tasks_total", ("refused",)] == 1
    assert found["embrace_tasks_total", ("out_of_memory",)] == 0
    assert found["embrace_devices_by_state", ("waiting",)] == 1


def test_rounds_as_csv(server: LiveServer, job: str) -> None:
    rows = table(server, f"/v1/jobs/{job}/rounds.csv")
    assert [(row["number"], row["state"], row["updates"], row["loss"]) for row in rows] == [
        ("0", "committed", "1", "1.5"),
        ("1", "committed", "1", "1.5"),
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)


def test_timings(server: LiveServer, job: str) -> None:
    rows: list[dict[str, Any]] = server.client(server.admin).get(f"/v1/jobs/{job}/timings").json()
    assert [row["round"] for row in rows] == [0, 1]
    assert rows[0]["seconds"] == {"wall": 2.5, "forward": 0.75, "training": 1.0, "other": 0.1}
    later = server.client(server.admin).get(f"/v1/jobs/{job}/timings", params={"first_round": 1}).json()
    assert [row["round"] for row in later] == [1]


def test_timings_as_csv(server: LiveServer, job: str) -> None:
    rows = table(server, f"/v1/jobs/{job}/timings.csv")
    assert [(row["round"], row["wall"], row["forward"], row["backward"]) for row in rows] == [
        ("0", "2.5", "0.75", ""),
        ("1", "2.5", "0.75", ""),
    ]
    assert rows[0]["boundary"] == "'=1+1"  # no formula for a spreadsheet


def test_scores_as_csv(server: LiveServer, job: str) -> None:
    assert table(server, f"/v1/jobs/{job}/metrics.csv") == []


@pytest.mark.parametrize("name", ["rounds.csv", "metrics.csv", "timings", "timings.csv", "events"])
def test_a_table_of_no_job(server: LiveServer, name: str) -> None:
    answer = server.client(server.admin).get(f"/v1/jobs/0000/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_many_timings_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator import reports
    from coordinator.coordinator import Coordinator
    from coordinator.store.blobs import DirectoryBlobs
    from coordinator.store.database import open_database
    from coordinator.store.repository import Repository
    from coordinator.store.schema import DeviceRecord, JobRecord, UpdateRecord

    monkeypatch.setattr(reports, "UPDATES_AT_ONCE", 7)
    repository = Repository(open_database(database_url(tmp_path)))
    report = {"seconds": "none of these"}
    with repository.begin() as session:
        repository.add_job(session, JobRecord("j", "", "", {}, "done", version=0, created_at=0))
        repository.add_device(session, DeviceRecord("d", "", "", False, {}, enrolled_at=0, seen_at=0))
        slots = [(number, slot) for number in range(5) for slot in range(10)]
        updates = [UpdateRecord(f"j-{n}-{slot}-1", "j", n, slot, "d", "", 1, 1, 1, report, 0) for n, slot in slots]
        repository.add_updates(session, updates)
    coordinator = Coordinator(repository, DirectoryBlobs(tmp_path))
    found = [(row["round"], row["slot"]) for row in coordinator.timings("j", 1)]
    assert found == [(number, slot) for number in range(1, 5) for slot in range(10)]
    repository.close()


def test_a_small_answer_is_not_held_back(server: LiveServer) -> None:
    """A socket that waits for more to send makes every answer take 40 ms."""
    client, seconds = server.client("nobody"), []
    for _ in range(15):
        began = time.perf_counter()
        client.get("/healthz")
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[7] < 0.03
