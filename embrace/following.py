"""Follow a job of a coordinator over outages, and see its events as records of rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from federation.errors import EmbraceError, InputError

if TYPE_CHECKING:
    from embrace.client import Client

OVER = ("done", "failed", "stopped")
AGAIN, PATIENCE = 1.0, 600.0  # seconds: between attempts to reach a coordinator, and for all of them


def follow(client: Client, job: str) -> Iterator[dict[str, Any] | EmbraceError | None]:
    """Yield a job's events until it is over; None when none came for a moment, an error while no answer comes."""
    last, heard = 0, time.monotonic()
    while True:
        try:
            for event in client.watch_with_pulse(job, last):
                heard = time.monotonic()
                last = last if event is None else event["id"]
                yield event
            if client.call("GET", f"/jobs/{job}")["state"] in OVER:
                return
        except InputError:  # it answers, and the answer is no
            raise
        except EmbraceError as error:
            if time.monotonic() - heard > PATIENCE:
                raise
            yield error
        time.sleep(AGAIN)


def record_of(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what an event tells about a round: that it was committed, or how its version scores. None: neither."""
    body = dict(event["body"])
    if event["kind"] == "RoundCommitted":
        return body
    if event["kind"] != "Evaluated" or "error" in body:
        return None
    if "mean_loss" in body:
        body["test_loss"] = body.pop("mean_loss")
    return {"round": int(body["version"]) - 1, **body}
