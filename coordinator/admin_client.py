"""The administrator's side of the REST interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from federation.address import bearer, check_address
from federation.bundle_files import check_bundle, file_ref
from federation.data_reference import file_of
from federation.errors import EmbraceError, InputError
from federation.job import parse_plan, plan_to
from federation.manifest import MANIFEST_NAME, read_manifest

TIMEOUT = httpx.Timeout(30.0, read=120.0)
_CHUNK = 1 << 20


class AdminClient:
    """Bundles, jobs and devices of one coordinator."""

    def __init__(self, server: str, token: str, *, verify: str | bool = True) -> None:
        base, headers = check_address(server), bearer(token)
        try:
            self._http = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT, verify=verify)
        except httpx.InvalidURL as error:
            raise InputError(f"{server!r} is no address of a server: {error}") from None

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The answer as parsed JSON; an error says what the coordinator said."""
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
        """Send a bundle unless it is there already; gives its digest."""
        manifest = read_manifest(directory)
        check_bundle(directory, manifest)
        digest = file_ref(directory, MANIFEST_NAME).sha256
        for name in (MANIFEST_NAME, *(file.name for file in manifest.files())):
            self.call("PUT", f"/bundles/{digest}/files/{name}", content=_pieces(directory / name))
        self.call("POST", f"/bundles/{digest}")
        return digest

    def create_job(self, file: Path) -> str:
        """A job from its file; the bundle is found relative to the file."""
        try:
            plan = parse_plan(file.read_text())
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{file} is no TOML: expected text in UTF-8") from None
        digest = self.send_bundle((file.parent / plan.bundle).resolve())
        data = plan.evaluate.data
        if data is not None and (file.parent / file_of(data)).exists():
            plan = replace(plan, evaluate=replace(plan.evaluate, data=str((file.parent / data).resolve())))
        return str(self.call("POST", "/jobs", json={"bundle": digest, "plan": plan_to(plan)})["id"])

    def events(self, job: str, after: int = 0, *, pulse: bool = False) -> Iterator[dict[str, Any] | None]:
        """What happens, as it happens, until the job or the coordinator ends. `pulse`: None for each sign of life."""
        with self._stream(f"/v1/jobs/{job}/events", after=after) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
                elif pulse and line.startswith(":"):
                    yield None

    def save_weights(self, job: str, version: int, path: Path) -> None:
        """The weights of a version, to a file."""
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
