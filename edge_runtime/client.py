"""The coordinator's REST interface as a device uses it. The transport is an argument: both can meet in one process.

What may be repeated is repeated: after a lost connection or a busy server, with a growing and random pause, for as long
as the caller's patience lasts. What the server refuses is not.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlencode

import httpx

from edge_runtime.connection import Unreachable, WrongConnection, mend, open_http, redirect
from edge_runtime.files import replacing
from edge_runtime.logs import get_logger
from edge_runtime.object_storage import ObjectStorage, StorageFailed
from edge_runtime.own_limits import Deadline
from federation.benchmark import Benchmark
from federation.decode import decode, encode
from federation.errors import BundleError, EmbraceError, InputError
from federation.identity import is_plain
from federation.manifest import MAX_MANIFEST_BYTES
from federation.messages import Report, TaskOffer
from federation.printable import printable
from federation.signature import MAX_SIGNATURE_BYTES

log = get_logger("embrace.client")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
TIMEOUT = httpx.Timeout(30.0, read=90.0)
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0)
LONGEST_LEASE = 30 * 86400.0  # seconds
SOONEST_BACK, LONGEST_AWAY = 2.0, 4 * 3600.0  # seconds that a device stays away, whatever the coordinator says
_AGAIN = {408, 425, 429, 500, 502, 503, 504, 507}
_CHUNK = 1 << 18
MOST_ANSWER = 1 << 20  # bytes of an answer in JSON
T = TypeVar("T")


class NotUnderstood(EmbraceError):
    """The coordinator answered, and the answer makes no sense here: no JSON, another kind of value, far too long."""

    status = 502


class Declined(InputError):
    """The coordinator answered, and the answer is no."""

    def __init__(self, message: str, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.answer = status
        self.reason = reason


@dataclass(frozen=True)
class OpenJob:
    """A job that runs, as far as a device needs to know it before it has a task."""

    id: str
    name: str
    bundle: str
    round: int  # rounds that are done: the newest version
    batch: int


class DeviceClient:
    """One device's connection."""

    def __init__(
        self,
        server: str,
        token: str,
        *,
        transport: httpx.BaseTransport | None = None,
        certificate: str | Path | None = None,
        patience: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http = open_http(server, token, certificate=certificate, timeout=TIMEOUT, transport=transport)
        self._is_real = transport is None
        self.server = str(self._http.base_url)
        self.deadline = Deadline()  # of the task that is under way
        self._storage = ObjectStorage(self.server, self.deadline, certificate)
        self._patience = patience
        self._sleep = sleep
        self.name = ""  # of this device, as the coordinator has it; empty until it has said so
        self.unfit = ""  # why no job can use this device, as the last answer to `next_task` has it
        self.waiting = ""  # why there is no task, as that answer has it
        self.come_back: float | None = None  # seconds after which to ask for a task, if the last answer says so
        self.lease: float | None = None  # seconds for which the last task that came may be worked at in silence

    def __enter__(self) -> DeviceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()
        self._storage.close()

    def enrol(self, name: str, profile: dict[str, Any]) -> tuple[str, str]:
        """Enrol and return (device, its own token); the client's token is an enrolment token here."""
        answer = self._call("POST", "/v1/devices", json={"name": name, "profile": profile})
        self._learn_name(answer)
        return _text(answer, "device"), _text(answer, "token")

    def set_profile(self, profile: dict[str, Any]) -> None:
        self._learn_name(self._call("PUT", "/v1/devices/me/profile", json=profile))

    def open_jobs(self) -> list[OpenJob]:
        """Ask what is trained there now."""
        told = _json(self._call("GET", "/v1/jobs/open", most=MAX_MANIFEST_BYTES)).get("jobs")
        return [_open_job(job) for job in told] if isinstance(told, list) else []

    def send_benchmark(self, found: Benchmark) -> None:
        """Tell what training costs here, in place of what was told before under the same conditions."""
        self._learn_name(self._call("PUT", "/v1/devices/me/benchmark", json=encode(found)))

    def _learn_name(self, answer: httpx.Response) -> None:
        """Take the device's name from an answer; older coordinators do not say it."""
        if answer.content:
            self.name = printable(_json(answer).get("name") or self.name)

    def next_task(self, wait: float = 30.0) -> TaskOffer | None:
        answer = self._call("POST", "/v1/tasks/next", params={"wait": wait, **self._abilities()})
        self.unfit = printable(unquote(answer.headers.get("Embrace-Unfit", "")))
        self.waiting = printable(unquote(answer.headers.get("Embrace-Waiting", "")))
        self.come_back = _away(answer)
        return None if answer.status_code == 204 else self._offer(answer, _json(answer))

    def _abilities(self) -> dict[str, Any]:
        """Say in a query that this device can use object storage; a coordinator without it takes no notice."""
        return {"storage": 1} if self._is_real and self._storage.is_usable else {}

    def job_state(self, job: str) -> str:
        """Ask whether a job is running or paused, or how it ended."""
        return _text(self._call("GET", f"/v1/jobs/{job}/state"), "state")

    def signature(self, bundle: str) -> bytes | None:
        """Fetch the signature of a bundle; None if it has none."""
        try:
            return self._call("GET", f"/v1/bundles/{bundle}/signature", most=MAX_SIGNATURE_BYTES).content
        except Declined as refusal:
            if refusal.answer != 404:
                raise
            return None

    def manifest(self, bundle: str) -> bytes:
        found = self._call("GET", f"/v1/bundles/{bundle}/manifest", most=MAX_MANIFEST_BYTES).content
        if hashlib.sha256(found).hexdigest() != bundle:
            raise BundleError("the manifest that came does not have the sha256 of the task's bundle")
        return found

    def save_graph(self, sha256: str, path: Path, size: int) -> None:
        """Fetch a graph of so many bytes; the file appears only if they are right."""
        digest = hashlib.sha256()
        with replacing(path, durable=False) as file:
            for chunk in self._stream(f"/v1/graphs/{sha256}", None, most=size):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != sha256:
                raise BundleError(f"the graph that came does not have the sha256 {sha256}")

    def weights(self, job: str, version: int, start: int, stop: int, storage: str | None = None) -> Iterator[bytes]:
        """Fetch bytes [start, stop) of a version's file; a broken connection is resumed where it was.

        `storage` is the URL of an object with the same bytes; if it fails, the coordinator is asked for the rest.
        """
        if storage is not None and self._storage.is_usable:
            try:
                for chunk in self._storage.read(storage, start, stop):
                    start += len(chunk)
                    yield chunk
            except StorageFailed as error:
                log.warning("object storage: %s; the weights come from the coordinator", error)
        if start < stop:
            yield from self._stream(f"/v1/jobs/{job}/versions/{version}/weights", (start, stop))

    def part(self, job: str, version: int, name: str, boundary: str, unit: int | None) -> Iterator[bytes]:
        """Fetch the body of a part of a vector of a version."""
        asked = {"boundary": boundary, **({} if unit is None else {"unit": str(unit)})}
        return self._stream(f"/v1/jobs/{job}/versions/{version}/parts/{name}?{urlencode(asked)}", None, resume=False)

    def inherited(self, task: str) -> Iterator[bytes]:
        """Fetch the update that the holder of a task goes on with."""
        return self._stream(f"/v1/tasks/{task}/inherited", None)

    def send_update(
        self,
        task: str,
        body: Callable[[], Iterable[bytes | memoryview]],
        report: Report,
        *,
        following: bool = False,
        storage: bool = False,
    ) -> TaskOffer | None:
        """Send a body, which `body` gives anew for every attempt.

        `following`: take the next task, too; None if there is none at once. `storage`: upload it to object storage, if
        that can be done. Either way it counts when this returns.
        """
        digest, size = hashlib.sha256(), 0
        for part in body():
            digest.update(part)
            size += len(part)
        params = {"next": 1, **self._abilities()} if following else None
        options: dict[str, Any] = {"params": params, "headers": {"Embrace-Report": json.dumps(asdict(report))}}
        name = self._upload(task, body, size) if storage and self._storage.is_usable else None
        try:
            if name is not None:
                answer = self._complete(task, {"name": name, "bytes": size, "sha256": digest.hexdigest()}, options)
            else:
                options["headers"] |= {
                    "Content-Digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:",
                    "Content-Length": str(size),
                }
                content = lambda: (bytes(p) for p in body())  # noqa: E731
                answer = self._call("PUT", f"/v1/tasks/{task}/update", content=content, **options)
        except Declined as refusal:
            if refusal.reason != "duplicate":
                raise
            return None  # it did arrive, only the answer was lost
        offer = _json(answer).get("next") if following else None
        self.come_back = _away(answer)
        return None if offer is None else self._offer(answer, offer)

    def _upload(self, task: str, body: Callable[[], Iterable[bytes | memoryview]], size: int) -> str | None:
        """Put a body into object storage; return its name there, None if that is not possible."""
        try:
            answer = self._call("POST", f"/v1/tasks/{task}/upload", json={"bytes": size})
            self._storage.write(_text(answer, "url"), size, body)
        except StorageFailed as error:
            log.warning("object storage: %s; the update goes to the coordinator", error)
            return None
        except Declined as refusal:
            if refusal.answer != 404:
                raise
            return None
        return _text(answer, "name")

    def _complete(self, task: str, said: dict[str, Any], options: dict[str, Any]) -> httpx.Response:
        """Say that a body lies in object storage, again and again until it is checked."""
        until = time.monotonic() + self._patience
        while (answer := self._call("POST", f"/v1/tasks/{task}/complete", json=said, **options)).status_code == 202:
            self.deadline.check()
            if time.monotonic() > until:
                raise Unreachable(f"{self._http.base_url} has not checked the update for {self._patience:.0f} s")
            self._sleep(FIRST_PAUSE * random.uniform(0.5, 1.5))
        return answer

    def _offer(self, answer: httpx.Response, told: Any) -> TaskOffer:
        offer = _offer(told)
        self.lease = _seconds(answer.headers.get("Embrace-Lease"))
        return offer

    def heartbeat(self, task: str) -> float | None:
        """Say that a task is being worked at; return for how long the device may be silent, if that is told.

        One attempt: the next heartbeat follows soon. Declined: the task is no longer this device's.
        """
        try:
            with self._http.stream("POST", f"/v1/tasks/{task}/heartbeat", timeout=HEARTBEAT_TIMEOUT) as streamed:
                answer = _whole(streamed, MOST_ANSWER, self.deadline)
            if answer.status_code in (401, 403, 404, 409, 410):
                _checked(answer)
            return _seconds(_json(answer).get("seconds")) if answer.status_code == 200 else None
        except (httpx.HTTPError, NotUnderstood) as error:
            log.debug("no heartbeat: %s", error)
            return None

    def fail(self, task: str, reason: str, message: str) -> None:
        self._call("POST", f"/v1/tasks/{task}/failure", json={"reason": reason, "message": message[:2000]})

    def _call(self, method: str, path: str, *, most: int = MOST_ANSWER, **options: Any) -> httpx.Response:
        content = options.pop("content", None)
        for pause in self._pauses():
            try:
                given = {**options, "content": content()} if content else options
                with self._http.stream(method, path, **given) as streamed:
                    answer = _whole(streamed, most, self.deadline)
            except httpx.TransportError as error:
                pause(self._why(error))
                continue
            if answer.status_code not in _AGAIN:
                return _checked(answer)
            pause(f"the coordinator answered {answer.status_code}")
        raise AssertionError("pauses never end")

    def _stream(
        self, path: str, part: tuple[int, int] | None, *, resume: bool = True, most: int | None = None
    ) -> Iterator[bytes]:
        """Fetch an answer in chunks. `resume`: one that breaks off is continued; else Unreachable is raised.

        An answer that goes on after `most` bytes, or after its part, is refused.
        """
        done, most = 0, part[1] - part[0] if part else most
        for pause in self._pauses():
            headers = {"Range": f"bytes={part[0] + done}-{part[1] - 1}"} if part else {}
            if not part and done:
                headers = {"Range": f"bytes={done}-"}
            try:
                with self._http.stream("GET", path, headers=headers) as answer:
                    if answer.status_code in _AGAIN:
                        pause(f"the coordinator answered {answer.status_code}")
                        continue
                    if answer.status_code >= 300:
                        _checked(_whole(answer, MOST_ANSWER, self.deadline))
                    if headers and answer.status_code != 206:
                        raise Declined("the coordinator sent everything instead of a part", answer.status_code)
                    for chunk in answer.iter_bytes(_CHUNK):
                        self.deadline.check()
                        done += len(chunk)
                        if most is not None and done > most:
                            raise NotUnderstood(f"{path}: the coordinator's answer goes on after {most} bytes")
                        yield chunk
                if part is None or done >= part[1] - part[0]:
                    return
                pause("the answer was cut off")
            except httpx.TransportError as error:
                if done and not resume:
                    raise Unreachable(f"{path}: the answer broke off: {error}") from None
                pause(self._why(error))

    def _why(self, error: httpx.TransportError) -> str:
        """Say why there was no answer; raise WrongConnection where waiting does not help."""
        if wrong := mend(error, self._http.base_url, probe=self._is_real):
            raise WrongConnection(wrong) from None
        return str(error) or type(error).__name__

    def _pauses(self) -> Iterator[Callable[[str], None]]:
        """Count attempts; each gets a function that waits before the next one, or gives up."""
        waited, length = 0.0, FIRST_PAUSE

        def pause(why: str) -> None:
            nonlocal waited, length
            self.deadline.check()
            if waited >= self._patience:
                raise Unreachable(f"{self._http.base_url} cannot be reached: {why}")
            if waited == 0:
                log.warning("%s cannot be reached: %s; trying for %.0f s", self._http.base_url, why, self._patience)
            seconds = length * random.uniform(0.5, 1.5)  # so that a fleet does not come back all at once
            self._sleep(seconds)
            waited, length = waited + seconds, min(2 * length, LONGEST_PAUSE)

        while True:
            yield pause


def _whole(answer: httpx.Response, most: int, deadline: Deadline) -> httpx.Response:
    """Read the body of an answer, which is not believed to be short; what came compressed stays so."""
    body = bytearray()
    for chunk in answer.iter_raw():
        deadline.check()
        body += chunk
        if len(body) > most:
            raise NotUnderstood(f"the coordinator's answer goes on after {most} bytes")
    headers = [(name, value) for name, value in answer.headers.multi_items() if name.lower() != "content-encoding"]
    return httpx.Response(answer.status_code, headers=headers, content=bytes(body), request=answer.request)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NotUnderstood(f"expected a JSON object from the coordinator, got {answer.text[:80]!r}")
    return found


def _text(answer: httpx.Response, name: str) -> str:
    found = _json(answer).get(name)
    if not isinstance(found, str):
        raise NotUnderstood(f"expected a text {name!r} in the coordinator's answer")
    return found


def _seconds(told: Any) -> float | None:
    """Read a duration that makes sense."""
    try:
        found = float(told)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 < found <= LONGEST_LEASE else None


def _away(answer: httpx.Response) -> float | None:
    """Read in how many seconds to come back, within the device's own bounds."""
    told = answer.headers.get("Retry-After", "")
    return min(max(SOONEST_BACK, float(told)), LONGEST_AWAY) if told.isdecimal() and len(told) < 10 else None


def _offer(told: Any) -> TaskOffer:
    return _known(TaskOffer, told, "task")


def _open_job(told: Any) -> OpenJob:
    found = _known(OpenJob, told, "job")
    if not (is_plain(found.id) and is_plain(found.bundle)):  # they become parts of paths
        raise NotUnderstood(f"a job's id is {printable(found.id, 80)!r}: expected letters, digits, '_', '-' and '.'")
    return found


def _known(kind: type[T], told: Any, what: str) -> T:
    """Read a value; what a newer coordinator says beyond it is left out."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    known = {name: told[name] for name in names if name in told} if isinstance(told, dict) else told
    try:
        return decode(kind, known, what, defaults=True)
    except InputError as error:
        raise NotUnderstood(f"the coordinator's {what} makes no sense: {error}") from None


def _checked(answer: httpx.Response) -> httpx.Response:
    if elsewhere := redirect(answer):
        raise Declined(elsewhere, answer.status_code)
    if answer.status_code < 400:
        return answer
    try:
        body = answer.json()
        message, reason = printable(body.get("detail") or body.get("title")), printable(body.get("reason", ""))
    except (ValueError, AttributeError, RecursionError):
        message, reason = printable(answer.text, 200), ""
    raise Declined(message, answer.status_code, reason)
