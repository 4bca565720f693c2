"""The coordinator's REST interface as a device uses it. The transport is an argument: both can meet in one process.

What may be repeated is repeated: after a lost connection or a busy server, with a growing and random pause, for as long
as the caller's patience lasts. What the server refuses is not.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import httpx

from edge_runtime.files import replacing
from federation.address import bearer, check_address
from federation.errors import BundleError, EmbraceError, InputError
from federation.messages import Report, TaskOffer

log = logging.getLogger("embrace.client")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
TIMEOUT = httpx.Timeout(30.0, read=90.0)
_AGAIN = {408, 425, 429, 500, 502, 503, 504, 507}
_CHUNK = 1 << 18


class Unreachable(EmbraceError):
    """The coordinator did not answer for longer than was allowed."""

    status = 503


class Declined(InputError):
    """The coordinator answered, and the answer is no."""

    def __init__(self, message: str, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.answer = status
        self.reason = reason


class DeviceClient:
    """One device's connection."""

    def __init__(
        self,
        server: str,
        token: str,
        *,
        transport: httpx.BaseTransport | None = None,
        verify: str | bool = True,
        patience: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        base, headers = check_address(server), bearer(token)
        try:
            trusted = ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
            self._http = httpx.Client(
                base_url=base, headers=headers, transport=transport, timeout=TIMEOUT, verify=trusted
            )
        except httpx.InvalidURL as error:
            raise InputError(f"{server!r} is no address of a server: {error}") from None
        except OSError as error:  # ssl.SSLError is one
            raise InputError(f"cannot use the certificate {verify}: {error.strerror or error}") from None
        self._patience = patience
        self._sleep = sleep
        self.unfit = ""  # why no job can use this device, as the last answer to `next_task` has it

    def __enter__(self) -> DeviceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def enrol(self, name: str, profile: dict[str, Any]) -> tuple[str, str]:
        """Enrol and return (device, its own token); the client's token is an enrolment token here."""
        answer = self._call("POST", "/v1/devices", json={"name": name, "profile": profile}).json()
        return str(answer["device"]), str(answer["token"])

    def set_profile(self, profile: dict[str, Any]) -> None:
        self._call("PUT", "/v1/devices/me/profile", json=profile)

    def next_task(self, wait: float = 30.0) -> TaskOffer | None:
        answer = self._call("POST", "/v1/tasks/next", params={"wait": wait})
        self.unfit = unquote(answer.headers.get("Embrace-Unfit", ""))
        return None if answer.status_code == 204 else TaskOffer(**answer.json())

    def job_state(self, job: str) -> str:
        """Ask whether a job is running or paused, or how it ended."""
        return str(self._call("GET", f"/v1/jobs/{job}/state").json()["state"])

    def manifest(self, bundle: str) -> bytes:
        found = self._call("GET", f"/v1/bundles/{bundle}/manifest").content
        if hashlib.sha256(found).hexdigest() != bundle:
            raise BundleError("the manifest that came does not have the sha256 of the task's bundle")
        return found

    def save_graph(self, sha256: str, path: Path) -> None:
        """Fetch a graph; the file appears only if its bytes are right."""
        digest = hashlib.sha256()
        with replacing(path, durable=False) as file:
            for chunk in self._stream(f"/v1/graphs/{sha256}", None):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != sha256:
                raise BundleError(f"the graph that came does not have the sha256 {sha256}")

    def weights(self, job: str, version: int, start: int, stop: int) -> Iterator[bytes]:
        """Fetch bytes [start, stop) of a version's file; a broken connection is resumed where it was."""
        return self._stream(f"/v1/jobs/{job}/versions/{version}/weights", (start, stop))

    def part(self, job: str, version: int, name: str, boundary: str, unit: int | None) -> Iterator[bytes]:
        """Fetch the body of a part of a vector of a version."""
        asked = {"boundary": boundary, **({} if unit is None else {"unit": str(unit)})}
        return self._stream(f"/v1/jobs/{job}/versions/{version}/parts/{name}?{urlencode(asked)}", None, resume=False)

    def inherited(self, task: str) -> Iterator[bytes]:
        """Fetch the update that the holder of a task goes on with."""
        return self._stream(f"/v1/tasks/{task}/inherited", None)

    def send_update(
        self, task: str, body: Callable[[], Iterable[bytes | memoryview]], report: Report, *, following: bool = False
    ) -> TaskOffer | None:
        """Send a body, which `body` gives anew for every attempt.

        `following`: take the next task, too; None if there is none at once.
        """
        digest, size = hashlib.sha256(), 0
        for part in body():
            digest.update(part)
            size += len(part)
        headers = {
            "Embrace-Report": json.dumps(asdict(report)),
            "Content-Digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:",
            "Content-Length": str(size),
        }
        try:
            answer = self._call(
                "PUT",
                f"/v1/tasks/{task}/update",
                params={"next": 1} if following else None,
                headers=headers,
                content=lambda: (bytes(p) for p in body()),
            )
        except Declined as refusal:
            if refusal.reason != "duplicate":
                raise
            return None  # it did arrive, only the answer was lost
        offer = answer.json().get("next") if following else None
        return None if offer is None else TaskOffer(**offer)

    def fail(self, task: str, reason: str, message: str) -> None:
        self._call("POST", f"/v1/tasks/{task}/failure", json={"reason": reason, "message": message[:2000]})

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        content = options.pop("content", None)
        for pause in self._pauses():
            try:
                given = {**options, "content": content()} if content else options
                answer = self._http.request(method, path, **given)
            except httpx.TransportError as error:
                pause(str(error) or type(error).__name__)
                continue
            if answer.status_code not in _AGAIN:
                return _checked(answer)
            pause(f"the coordinator answered {answer.status_code}")
        raise AssertionError("pauses never end")

    def _stream(self, path: str, part: tuple[int, int] | None, *, resume: bool = True) -> Iterator[bytes]:
        """Fetch an answer in chunks. `resume`: one that breaks off is continued; else Unreachable is raised."""
        done = 0
        for pause in self._pauses():
            headers = {"Range": f"bytes={part[0] + done}-{part[1] - 1}"} if part else {}
            if not part and done:
                headers = {"Range": f"bytes={done}-"}
            try:
                with self._http.stream("GET", path, headers=headers) as answer:
                    if answer.status_code in _AGAIN:
                        pause(f"the coordinator answered {answer.status_code}")
                        continue
                    if answer.status_code >= 400:
                        answer.read()
                    _checked(answer)
                    if headers and answer.status_code != 206:
                        raise Declined("the coordinator sent everything instead of a part", answer.status_code)
                    for chunk in answer.iter_bytes(_CHUNK):
                        done += len(chunk)
                        yield chunk
                if part is None or done >= part[1] - part[0]:
                    return
                pause("the answer was cut off")
            except httpx.TransportError as error:
                if done and not resume:
                    raise Unreachable(f"{path}: the answer broke off: {error}") from None
                pause(str(error) or type(error).__name__)

    def _pauses(self) -> Iterator[Callable[[str], None]]:
        """Count attempts; each gets a function that waits before the next one, or gives up."""
        waited, length = 0.0, FIRST_PAUSE

        def pause(why: str) -> None:
            nonlocal waited, length
            if waited >= self._patience:
                raise Unreachable(f"{self._http.base_url} cannot be reached: {why}")
            if waited == 0:
                log.warning("%s cannot be reached: %s; trying for %.0f s", self._http.base_url, why, self._patience)
            seconds = length * random.uniform(0.5, 1.5)  # so that a fleet does not come back all at once
            self._sleep(seconds)
            waited, length = waited + seconds, min(2 * length, LONGEST_PAUSE)

        while True:
            yield pause


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code < 400:
        return answer
    try:
        body = answer.json()
        message, reason = str(body.get("detail") or body.get("title")), str(body.get("reason", ""))
    except (ValueError, AttributeError):
        message, reason = answer.text[:200], ""
    raise Declined(message, answer.status_code, reason)
