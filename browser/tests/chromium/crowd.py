"""Many devices in one process: they speak the protocol and do not train. `python crowd.py URL TOKEN COUNT ROUNDS`.

Their names and their errors are what a hostile or a careless person would choose; what they report is made up.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from edge_runtime.bundle_files import read_manifest
from federation.manifest import Manifest
from federation.wire import encode_layers

BUNDLE = Path(__file__).resolve().parents[3] / "embrace" / "demo" / "digits" / "model"
TIERS = ("strong", "moderate", "weak", "weak")
NAMES = (
    "a-very-long-name-of-a-device-because-a-person-thought-it-should-say-where-it-stands-and-for-how-long",
    "<img src=x onerror=alert(1)>",
    "küche 🫖 台所",
)


def main(url: str, token: str, count: int, rounds: int) -> None:
    manifest, over = read_manifest(BUNDLE), threading.Event()
    with httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        devices = [_enrol(http, token, number) for number in range(count)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda number: _work(http, devices[number], manifest, number, rounds, over), range(count)))
    print("done", flush=True)


def _work(
    http: httpx.Client, headers: dict[str, str], manifest: Manifest, number: int, rounds: int, over: threading.Event
) -> None:
    """Take tasks until one of the round after the last comes to any device."""
    while not over.is_set():
        offer = http.post("/v1/tasks/next?wait=5", headers=headers)
        if offer.status_code == 200:
            if offer.json()["work"]["round"] >= rounds:
                over.set()
            else:
                _answer(http, headers, manifest, offer.json(), number)


def _enrol(http: httpx.Client, token: str, number: int) -> dict[str, str]:
    name = NAMES[number] if number < len(NAMES) else f"board-{number:03}"
    profile = {"tier": TIERS[number % len(TIERS)], "memory": 64_000_000 + 1_000_000 * number}
    body = {"name": name, "profile": profile}
    answer = http.post("/v1/devices", headers={"Authorization": f"Bearer {token}"}, json=body).raise_for_status()
    return {"Authorization": f"Bearer {answer.json()['token']}"}


def _answer(http: httpx.Client, headers: dict[str, str], manifest: Manifest, task: dict[str, Any], number: int) -> None:
    boundary = manifest.boundary(task["work"]["boundary"])
    if number % 17 == 1:
        failure = {"reason": "out_of_memory", "message": "needs 77 MB, 64 MB are allowed\n\x1b[2J\u202e<b>bold</b>"}
        http.post(f"/v1/tasks/{task['id']}/failure", headers=headers, json=failure)
        return
    where = manifest.space.suffix(boundary.layer)
    body = b"".join(
        bytes(part)
        for part in encode_layers(manifest.space, boundary.layer, np.zeros(where.stop - where.start, np.float32))
    )
    seconds = {"wall": 1.0 + number % 7, "download": 0.2, "forward": 0.1 * (number % 4), "training": 0.7 + number % 7}
    memory = {
        "anonymous": 30_000_000,
        "process": 55_000_000 + 500_000 * (number % 40),
        "allowed": 64_000_000 + 1_000_000 * number,
    }
    report = {
        "samples": 100,
        "loss": 2.0 / (1 + task["work"]["round"]),
        "boundary": boundary.name,
        "engine": "portable",
    }
    told = {"Embrace-Report": json.dumps({**report, "seconds": seconds, "memory": memory})}
    http.put(f"/v1/tasks/{task['id']}/update", headers={**headers, **told}, content=body)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
