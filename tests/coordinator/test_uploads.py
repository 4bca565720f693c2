"""Updates over real sockets: wrong bodies, digests and reports, small pieces, connections that break."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from coordinator import body_check
from federation.job import plan_from
from federation.wire import encode_layers
from tests.coordinator.harness import Offer, Site, body_of, put_update, report_header, scripted
from tests.waiting import wait_until


@pytest.fixture(autouse=True, params=["in the event loop", "in a thread"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bodies are checked by the event loop, large ones in a thread: every test is made both ways."""
    if request.param == "in a thread":
        monkeypatch.setattr(body_check, "LARGE", -1)


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
    answer = put_update(client, offer, BAD_BODIES[kind](site, offer))
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json()
    assert found["status"] == answer.status_code and found["title"] and found["detail"]
    assert site.spool() == []
    assert put_update(client, offer, body_of(site.manifest, offer)).status_code == 201  # type: ignore[attr-defined]


def test_the_digest_is_checked_if_it_is_given(site: Site, held: Any) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]
    right = base64.b64encode(hashlib.sha256(body).digest()).decode()
    wrong = base64.b64encode(hashlib.sha256(b"").digest()).decode()
    answer = put_update(client, offer, body, **{"Content-Digest": f"sha-256=:{wrong}:"})
    assert answer.status_code == 400 and "Content-Digest" in answer.json()["detail"] and site.spool() == []
    answer = put_update(client, offer, body, **{"Content-Digest": f"sha-256=:{right}:"})
    assert answer.status_code == 201 and answer.json()["sha256"] == hashlib.sha256(body).hexdigest()
    again = put_update(client, offer, body)
    assert again.status_code == 409 and again.json()["reason"] == "duplicate"


@pytest.mark.parametrize(
    "report",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"samples": 0}',
        '{"samples": 1, "loss": NaN}',
        '{"samples": 1, "loss": 1e999}',
        '{"samples": ' + "9" * 5000 + "}",
        "[" * 10_000,
    ],
)
def test_a_bad_report_is_the_devices_mistake(site: Site, held: Any, report: str) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]
    answer = put_update(client, offer, body, **{"Embrace-Report": report})
    assert answer.status_code in (400, 422), answer.text
    assert site.spool() == []
    assert put_update(client, offer, body).status_code == 201


def test_the_next_task_comes_with_the_answer_if_it_is_asked_for(site: Site, held: Any) -> None:
    client, offer = held
    service = site.server.coordinator
    other = service.create_job(plan_from({"bundle": "x", "num_rounds": 1}), site.bundle)  # type: ignore[attr-defined]
    service.set_state(offer.job, "paused")  # it hands out no task of its next round
    url, body = f"/v1/tasks/{offer.id}/update?next=1", body_of(site.manifest, offer)  # type: ignore[attr-defined]
    answer = client.put(url, content=body, headers=report_header())
    following = Offer(answer.json()["next"])
    assert answer.status_code == 201 and following.job == other
    assert client.post("/v1/tasks/next?wait=0").json()["id"] == following.id  # it is the device's
    last = client.put(
        f"/v1/tasks/{following.id}/update?next=1",
        content=body_of(site.manifest, following),  # type: ignore[attr-defined]
        headers=report_header(),
    )
    assert last.status_code == 201 and last.json()["next"] is None
    service.set_state(offer.job, "stopped")


def test_without_being_asked_the_answer_has_no_task(site: Site, held: Any) -> None:
    client, offer = held
    answer = put_update(client, offer, body_of(site.manifest, offer))  # type: ignore[attr-defined]
    assert set(answer.json()) == {"status", "sha256"}


def test_an_upload_in_small_pieces_and_one_without_a_length(site: Site, held: Any) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]
    assert put_update(client, offer, (body[i : i + 7] for i in range(0, len(body), 7))).status_code == 201
    site.settle()
    assert site.server.coordinator.job(offer.job)["version"] == 1


def test_a_connection_that_breaks_leaves_nothing(site: Site, held: Any) -> None:
    client, offer = held
    body = body_of(site.manifest, offer)  # type: ignore[attr-defined]

    def half() -> Iterator[bytes]:
        yield body[:100]
        wait_until(lambda: len(site.spool()) == 1)
        raise ConnectionError("the cable was pulled")

    with pytest.raises(ConnectionError):
        put_update(client, offer, half())
    wait_until(lambda: not site.spool())
    assert put_update(client, offer, body).status_code == 201
