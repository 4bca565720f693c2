"""The REST interface under fire: schemathesis reads the OpenAPI document of a coordinator and tries to break it.

    make fuzz

It makes requests that fit the document and requests that do not, with the names of things that exist and of things that
do not, as the administrator, as a device, as somebody with an enrolment token and as nobody. An answer above 499, a
status or a form that the document does not promise, or a door that opens without its token is a failure. Afterwards
the log must have no traceback, and a coordinator must be able to go on with the directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from edge_runtime.bundle_files import read_manifest
from edge_runtime.client import DeviceClient
from embrace.client import Client
from embrace.demo.processes import COORDINATOR, Processes, served_at
from federation.errors import EmbraceError
from federation.manifest import Manifest
from federation.messages import Report, TaskOffer
from federation.wire import encode_layers
from tests.soak.soak import update_of

BUNDLE = Path(__file__).resolve().parents[2] / "embrace" / "demo" / "digits" / "model"
PATIENCE = 60.0  # seconds for the coordinator to start
TWICE = 2  # a request that may wait does so for up to a minute: these many times the time that was given is the end
# What schemathesis would also like: that every request is granted that has the right form (an update of a task that was
# answered is not), and that a thing is there once its name was answered (a job's file is there once it is trained).
LEFT_OUT = ("positive_data_acceptance", "ensure_resource_availability", "object_level_authorization")
# Half of all requests name something that exists.
KNOWN = 0.5


def fuzz(seconds: int, directory: Path, seed: int | None = None) -> int:
    """Run, and check what is left; the exit code of schemathesis, or 1."""
    with Processes(directory) as processes:
        url = _serve(processes, directory)
        config = directory / "schemathesis.toml"
        config.write_text(configuration(*_furnish(url, (directory / COORDINATOR / "admin.token").read_text().strip())))
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "--config-file",
            str(config),
            "run",
            f"{url}/openapi.json",
            "--max-time",
            str(seconds),
            "--continue-on-failure",
            *(() if seed is None else ("--seed", str(seed))),
        ]
        code = subprocess.run(command, cwd=directory, timeout=TWICE * seconds + 120).returncode
        problems = _afterwards(processes, directory, url)
    for problem in problems:
        print(problem)
    return code or int(bool(problems))


def _serve(processes: Processes, directory: Path, name: str = COORDINATOR) -> str:
    """Start the coordinator; its address."""
    processes.start(
        name,
        "serve",
        "--data",
        str(directory / COORDINATOR),
        "--port",
        "0",
        "--devices",
        "0",
        EMBRACE_REQUESTS_PER_SECOND="1000000",
    )
    until = time.monotonic() + PATIENCE
    while (url := served_at(processes.output(name))) is None:
        if time.monotonic() > until or processes.ended(name):
            raise EmbraceError(f"the coordinator did not start: {processes.last_words(name)}")
        time.sleep(0.1)
    return url


def _furnish(url: str, token: str) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """A job that is over, one that runs, a device that holds a task of it: their tokens and names."""
    admin = Client(url, token)
    manifest, digest = read_manifest(BUNDLE), admin.send_bundle(BUNDLE)
    enrolment = admin.call("POST", "/enrolments", json={"uses": 1_000_000, "seconds": 86400})["token"]
    spare, _ = DeviceClient(url, enrolment).enrol("to be revoked", {"tier": "weak"})
    admin.call("DELETE", f"/devices/{spare}")
    _, own = DeviceClient(url, enrolment).enrol("fuzzed", {"tier": "strong"})
    device = DeviceClient(url, own, patience=30)
    over = _create(admin, digest, 1)
    _answer(device, manifest, _next(device))
    while admin.call("GET", f"/jobs/{over}")["state"] != "done":
        time.sleep(0.05)
    running = _create(admin, digest, 1_000_000)
    things = {
        "job": [over, running],
        "task": [_next(device).id],
        "device": [spare],
        "digest": [digest],
        "version": [0, 1],
        "name": ["manifest.json", *(file.name for file in manifest.files())],
        "sha256": [file.sha256 for file in manifest.files()],
    }
    return {"admin": token, "enrolment": enrolment, "device": own}, things


def _create(admin: Client, digest: str, rounds: int) -> str:
    plan = {"bundle": "digits", "num_rounds": rounds, "participate": {"count": 1}}
    return str(admin.call("POST", "/jobs", json={"bundle": digest, "plan": plan})["id"])


def _next(device: DeviceClient) -> TaskOffer:
    offer = device.next_task(10)
    if offer is None:
        raise EmbraceError("there is no task for the only device")
    return offer


def _answer(device: DeviceClient, manifest: Manifest, offer: TaskOffer) -> None:
    layer = manifest.boundary(offer.work["boundary"]).layer
    where = manifest.space.suffix(layer)
    delta = update_of(offer.id, where.stop - where.start)
    report = Report("done", "", "none", "fast", 0, 1, 1, 10, None, None)
    device.send_update(offer.id, lambda: encode_layers(manifest.space, layer, delta), report)


def configuration(tokens: Mapping[str, str], things: Mapping[str, list[Any]]) -> str:
    """schemathesis.toml: who asks what, and the names of things that exist. JSON strings and lists are TOML, too."""
    lines = ["request-timeout = 90.0", "max-stream-events = 3"]
    lines += ["[checks]", *(f"{name}.enabled = false" for name in LEFT_OUT)]
    # There, a request counts as wrong for a header that schemathesis left out and this file puts in again.
    lines += ["[phases.stateful.checks]", "negative_data_rejection.enabled = false"]
    # The time is for requests, not for waiting and watching.
    lines += ["[parameters]", '"query.wait" = 0.01', '"query.seconds" = 0.01']
    lines += [f'"path.{name}" = {{ dictionary = "{name}", probability = {KNOWN} }}' for name in things]
    lines.append(f'"body.bundle" = {{ dictionary = "digest", probability = {KNOWN} }}')
    for name, values in things.items():
        lines += [f"[dictionaries.{name}]", f"values = {json.dumps(values)}"]
    for who, chosen in (
        ("enrolment", 'include-name = "POST /v1/devices"'),
        ("admin", 'include-tag = "admin"'),
        ("device", 'include-tag = "device"\nexclude-name = "POST /v1/devices"'),
    ):
        lines += ["[[operations]]", chosen, f'headers = {{ Authorization = "Bearer {tokens[who]}" }}']
    return "\n".join(lines) + "\n"


def _afterwards(processes: Processes, directory: Path, url: str) -> list[str]:
    """What is wrong with the coordinator now, and with one that goes on with what it left."""
    if ended := processes.ended(COORDINATOR):
        return [ended]
    found = [] if _is_ready(url) else ["the coordinator is not ready any more"]
    log = processes.log(COORDINATOR).read_text(errors="replace")
    if "Traceback" in log:
        found.append(f"the log has a traceback: {log[log.index('Traceback') :][:4000]}")
    processes.running[COORDINATOR].terminate()
    if code := processes.running[COORDINATOR].wait(PATIENCE):
        found.append(f"the coordinator ended with exit code {code}")
    if not _is_ready(_serve(processes, directory, "afterwards")):
        found.append("a coordinator that goes on with this directory is not ready")
    return found


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--seed", type=int, help="repeat a run")
    parser.add_argument("--keep", type=Path, help="an empty directory for the coordinator and its log")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        sys.exit(fuzz(given.seconds, given.keep, given.seed))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(fuzz(given.seconds, Path(folder), given.seed))


if __name__ == "__main__":
    main()
