"""The REST interface over real sockets: problem documents, events, a crowd that waits."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.api import device_routes
from embrace.client import Client
from federation.job import plan_from
from tests.coordinator.harness import Site, body_of, place_bundle, put_update, serving
from tests.waiting import PATIENCE, wait_until


def test_bad_plans_name_the_key(site: Site) -> None:
    with site.http(site.admin) as admin:
        for plan, word in (
            ({}, "bundle"),
            ({"bundle": "x", "rounds": 3}, "rounds"),
            ({"bundle": "x", "num_rounds": "3"}, "num_"),
            ({"bundle": "x", "seed": -1}, "seed"),
            ({"bundle": "x", "name": "\ud800"}, "name"),
        ):
            body = json.dumps({"bundle": site.bundle, "plan": plan})  # type: ignore[attr-defined]
            answer = admin.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 422) and word in answer.json()["detail"], (plan, answer.text)


def test_errors_of_the_framework_are_problem_documents_too(site: Site) -> None:
    with site.http(site.admin) as admin:
        for answer, status in (
            (admin.get("/v1/nowhere"), 404),
            (admin.patch("/v1/jobs"), 405),
            (admin.get("/v1/jobs/none"), 404),
            (admin.post("/v1/jobs", content=b"{"), 422),
            (admin.post("/v1/enrolments", json={"uses": 0}), 422),
            (admin.post("/v1/jobs/none/stop"), 404),
            (admin.delete("/v1/devices/none"), 404),
            (admin.post("/v1/jobs/none/explode"), 404),
            (admin.get("/v1/jobs/none/rounds"), 404),
        ):
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status and answer.json()["title"]
        assert admin.patch("/v1/jobs").headers["allow"]


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
        assert put_update(client, offer, body_of(site.manifest, offer)).status_code == 201  # type: ignore[attr-defined]
        site.settle()
        site.server.coordinator.set_state(offer.job, "stopped")
        kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]  # ends with the job
        assert kinds == ["AcceptUpdate", "CloseRound", "RoundCommitted", "JobState", "RoundAbandoned"]
        whole = sse(admin.get(url).text)
        ids = [number for number, _, _ in whole]
        assert ids == sorted(set(ids)) and len(ids) == 7
        assert sse(admin.get(url, headers={"Last-Event-ID": str(ids[2])}).text) == whole[3:]
        assert sse(admin.get(url, params={"after": ids[4]}).text) == whole[5:]
        watcher = Client(site.url, site.admin)
        assert list(watcher.watch(offer.job)) == [data for _, _, data in whole]
        watcher.close()


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30, "²", "1;2"])
def test_a_bad_last_event_is_the_clients_mistake(site: Site, held: Any, last: str) -> None:
    _, offer = held
    with site.http(site.admin) as admin:
        answer = admin.get(f"/v1/jobs/{offer.job}/events", headers={"Last-Event-ID": last.encode("latin-1")})
        assert answer.status_code in (400, 422) and "Last-Event-ID" in answer.json()["detail"]
        assert admin.get(f"/v1/jobs/{offer.job}/events", params={"after": "9" * 30}).status_code in (400, 422)
        assert admin.get("/v1/jobs/none/events").status_code == 404


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
        wait_until(lambda: len(site.server.coordinator.notifier._waiting) == 60)
        with site.http(site.admin) as admin:
            admin.get("/v1/jobs").raise_for_status()
            plan = {"bundle": "x", "participate": {"min_available": 61}}
            admin.post("/v1/jobs", json={"bundle": bundle, "plan": plan}).raise_for_status()
        wait(site.enrol()[1])  # the one that was missing
        for thread in threads:
            thread.join(PATIENCE)
        assert found == [200] * 61


def test_a_device_that_went_away_while_it_waited_gets_no_task(tmp_path: Path) -> None:
    with serving(tmp_path) as site:
        bundle, _ = place_bundle(site.directory)
        service = site.server.coordinator
        with site.http(site.enrol()[1]) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/tasks/next?wait=60", timeout=0.5)
        job = service.create_job(plan_from({"bundle": "x"}), bundle)
        with site.http() as watcher:  # until its request is over, whose answer no client hears
            wait_until(lambda: "/v1/tasks/next" in watcher.get("/metrics").text)
        assert service.job(job)["round"]["state"] == "selecting"
