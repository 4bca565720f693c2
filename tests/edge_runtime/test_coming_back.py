"""A device that is told to come back stays away for as long, within its own bounds, and stops when it is asked to."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from edge_runtime.agent import Agent, Device
from edge_runtime.client import LONGEST_AWAY, SOONEST_BACK, DeviceClient
from tests.edge_runtime.test_client import little, reply


def steered(told: str, tmp_path: Path, until_pauses: float) -> tuple[list[float], list[str], int]:
    """(pauses, notices, requests) of an agent whose coordinator always says the same."""
    pauses: list[float] = []
    notices: list[str] = []
    headers = {"Retry-After": told, "Embrace-Waiting": quote("job digits trains with other devices", " ")}

    def answer(request: BaseHTTPRequestHandler, number: int) -> None:
        reply(request, 204, **{name.replace("-", "_"): value for name, value in headers.items()})

    with little(answer) as server, DeviceClient(server.url, "t") as client:
        device = Device((np.zeros((2, 1)), np.zeros(2)), tmp_path)
        agent = Agent(client, device, sleep=pauses.append, on_notice=notices.append)
        assert agent.run(wait=5.0, until=lambda: sum(pauses) >= until_pauses) == 0
        return pauses, notices, len(server.seen)


def test_it_stays_away_for_as_long_and_says_so_once(tmp_path: Path) -> None:
    pauses, notices, requests = steered("90", tmp_path, 180.0)
    assert sum(pauses) == 180.0 and requests == 2
    assert notices == ["enrolled as a device, waiting: job digits trains with other devices; asks again in 90 s"]


def test_it_looks_every_second_whether_it_is_to_stop(tmp_path: Path) -> None:
    pauses, _, requests = steered("90", tmp_path, 3.0)
    assert pauses == [1.0, 1.0, 1.0] and requests == 1


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("0", SOONEST_BACK), ("1", SOONEST_BACK), ("999999999", LONGEST_AWAY)],
)
def test_a_coordinator_cannot_make_it_hurry_or_send_it_away_for_good(told: str, seconds: float, tmp_path: Path) -> None:
    pauses, _, requests = steered(told, tmp_path, seconds)
    assert sum(pauses) == seconds and requests == 1


@pytest.mark.parametrize("told", ["-5", "1e9", "nan", "Wed, 18 Nov 2026 07:28:00 GMT", "9" * 30])
def test_what_is_no_number_of_seconds_is_not_heeded(told: str, tmp_path: Path) -> None:
    pauses, _, requests = steered(told, tmp_path, 3.0)
    assert requests > 1 and max(pauses) <= 1.0, "it rests a little, as without it"
