"""A coordinator, as its administrator sees it: the administrator's side of the REST interface."""

from __future__ import annotations

import json
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from edge_runtime.bundle_files import check_bundle, file_ref, map_weights, read_manifest
from federation.address import bearer, check_address
from federation.errors import EmbraceError, InputError
from federation.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from embrace.bundles import Bundle
    from embrace.jobs import Job

TIMEOUT = httpx.Timeout(30.0, read=120.0)
_CHUNK = 1 << 20


class Client:
    """Bundles, jobs and devices of one coordinator.

    >>> with embrace.Client(server, token) as client:
    ...     job = client.create(embrace.Job(bundle, num_rounds=1))
    ...     print(client.job(job)["state"])
    ...     client.stop(job)
    running
    """

    def __init__(self, server: str, token: str, *, certificate: str | Path | None = None) -> None:
        """`token` is the administrator's; `certificate` is a PEM file of the authority to trust."""
        base, headers = check_address(server), bearer(token)
        try:
            verify = True if certificate is None else ssl.create_default_context(cafile=str(certificate))
            self._http = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT, verify=verify)
        except httpx.InvalidURL as error:
            raise InputError(f"{server!r} is no address of a server: {error}") from None
        except OSError as error:  # no such file, or no certificate in it
            raise InputError(f"cannot use the certificate {certificate}: {error.strerror or error}") from None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Send a request; return the answer as parsed JSON. An error says what the coordinator said."""
        try:
            answer = self._http.request(method, f"/v1{path}", **options)
        except httpx.TransportError as error:
            raise EmbraceError(f"{self._http.base_url} cannot be reached: {error}") from None
        if answer.status_code >= 300:
            raise InputError(_detail(answer))
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise InputError(f"{self._http.base_url} is no coordinator: expected JSON") from None

    def send_bundle(self, directory: Path) -> str:
        """Send a bundle unless it is there already; return its digest."""
        manifest = read_manifest(directory)
        check_bundle(directory, manifest)
        digest = file_ref(directory, MANIFEST_NAME).sha256
        for name in (MANIFEST_NAME, *(file.name for file in manifest.files())):
            self.call("PUT", f"/bundles/{digest}/files/{name}", content=_pieces(directory / name))
        self.call("POST", f"/bundles/{digest}")
        return digest

    def create(self, job: Job | str | Path) -> str:
        """Send a job and its bundle; return the id of the job, which runs from now on."""
        from embrace.jobs import Job

        job = job if isinstance(job, Job) else Job.from_file(job, own_rules=False)
        plan = job.to_json()  # before anything is sent: it refuses rules that devices do not have
        digest = self.send_bundle(job.bundle.path)
        return str(self.call("POST", "/jobs", json={"bundle": digest, "plan": plan})["id"])

    def jobs(self) -> list[dict[str, Any]]:
        """List all jobs, the oldest first."""
        return list(self.call("GET", "/jobs"))

    def job(self, job: str) -> dict[str, Any]:
        """Return the state of a job, its plan and its newest round."""
        return dict(self.call("GET", f"/jobs/{job}"))

    def rounds(self, job: str) -> list[dict[str, Any]]:
        """List the rounds of a job; `summary` says what a committed round came to."""
        return list(self.call("GET", f"/jobs/{job}/rounds"))

    def metrics(self, job: str) -> list[dict[str, Any]]:
        """List the scores of the versions of a job."""
        return list(self.call("GET", f"/jobs/{job}/metrics"))

    def timings(self, job: str, first_round: int = 0) -> list[dict[str, Any]]:
        """List the accepted updates of a job with the seconds that each part took."""
        return list(self.call("GET", f"/jobs/{job}/timings", params={"first_round": first_round}))

    def pause(self, job: str) -> None:
        """Hand out no more tasks until `resume`; what is under way still counts."""
        self.call("POST", f"/jobs/{job}/pause")

    def resume(self, job: str) -> None:
        """Let a paused job go on where it was."""
        self.call("POST", f"/jobs/{job}/resume")

    def stop(self, job: str) -> None:
        """End a job for good; its weights stay."""
        self.call("POST", f"/jobs/{job}/stop")

    def devices(self) -> list[dict[str, Any]]:
        """List all devices that ever enrolled."""
        return list(self.call("GET", "/devices"))

    def invite(self, uses: int = 1, seconds: float = 86400.0) -> str:
        """Make a token with which so many devices can enrol for so long."""
        return str(self.call("POST", "/enrolments", json={"uses": uses, "seconds": seconds})["token"])

    def revoke(self, device: str) -> None:
        """Refuse everything that a device asks for from now on, and give its work to others."""
        self.call("DELETE", f"/devices/{device}")

    def watch(self, job: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield events as they happen, until the job or the coordinator ends; `after` is the last one known."""
        return (event for event in self.watch_with_pulse(job, after) if event is not None)

    def watch_with_pulse(self, job: str, after: int = 0) -> Iterator[dict[str, Any] | None]:
        """Yield events, and None for each sign of life in between."""
        with self._stream(f"/v1/jobs/{job}/events", after=after) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
                elif line.startswith(":"):
                    yield None

    def export(self, job: str, out: str | Path, *, bundle: str | Path | None = None) -> Bundle:
        """Fetch the newest weights of a job and write the trained bundle.

        `bundle` says where the job's bundle is, if it is not where the job file said.
        """
        from edge_runtime.trained_bundle import check_target, write_trained
        from embrace.bundles import Bundle

        check_target(Path(out))
        found = self.job(job)
        directory = Path(bundle or found["plan"]["bundle"])
        manifest = read_manifest(directory)
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.safetensors"
            self.save_weights(job, found["version"], weights)
            write_trained(directory, manifest, 0, map_weights(weights, manifest.space), Path(out))
        return Bundle(out)

    def save_weights(self, job: str, version: int, path: Path) -> None:
        """Write the weights of a version to a file."""
        with self._stream(f"/v1/jobs/{job}/versions/{version}/file") as answer, path.open("wb") as file:
            for chunk in answer.iter_bytes(_CHUNK):
                file.write(chunk)

    @contextmanager
    def _stream(self, path: str, **params: int) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", path, params=params) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise InputError(_detail(answer))
                yield answer
        except httpx.TransportError as error:
            raise EmbraceError(f"{self._http.base_url} cannot be reached: {error}") from None


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _detail(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return str(body.get("detail") or body.get("title"))
    except (ValueError, AttributeError):
        return f"the coordinator answered {answer.status_code}"
