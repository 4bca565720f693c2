"""A coordinator, as its administrator sees it: the administrator's side of the REST interface."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from edge_runtime.bundle_files import check_bundle, file_ref, map_weights, own_tokenizer, read_manifest
from edge_runtime.connection import Unreachable, mend, open_http, redirect
from edge_runtime.signing import read_key, read_signer
from federation.errors import DataError, InputError
from federation.job import ON_COORDINATOR, UPLOADED
from federation.manifest import MANIFEST_NAME
from federation.printable import printable
from federation.signature import SIGNATURE_NAME

if TYPE_CHECKING:
    from edge_runtime.data.load import Data
    from embrace.bundles import Bundle
    from embrace.jobs import Job
    from embrace.trackers import OnRound, Tracker

TIMEOUT = httpx.Timeout(30.0, read=120.0)
MOST_CANDIDATES = 8  # that are listed where a name has several meanings
_CHUNK = 1 << 20


class Client:
    """Bundles, jobs and devices of one coordinator.

    >>> with embrace.Client(server, token) as client:
    ...     job = client.create(embrace.Job(bundle, num_rounds=1))
    ...     print(client.job(job)["state"])
    ...     print(client.stop(job)["state"])
    running
    stopped
    """

    def __init__(self, server: str, token: str, *, certificate: str | Path | None = None) -> None:
        """`token` is the administrator's; `certificate` is a PEM file of the authority to trust."""
        self._http = open_http(server, token, certificate=certificate, timeout=TIMEOUT)

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
            raise self._unreachable(error) from None
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
        if read_signer(directory) is not None:
            self._put_file(f"/bundles/{digest}/files/{SIGNATURE_NAME}", directory / SIGNATURE_NAME)
        try:
            self.call("POST", f"/bundles/{digest}")
            return digest
        except InputError:  # it is not there, or not all of it
            pass
        for name in (MANIFEST_NAME, *(file.name for file in manifest.files())):
            self._put_file(f"/bundles/{digest}/files/{name}", directory / name)
        self.call("POST", f"/bundles/{digest}")
        return digest

    def create(self, job: Job | str | Path, *, evaluation_data: Data | None = None) -> str:
        """Send a job, its bundle and its evaluation data; return the id of the job, which runs from now on.

        `evaluation_data` is anything that a device can train on, arrays too, instead of the job's `evaluate.data`.
        """
        from embrace.jobs import Job

        job = job if isinstance(job, Job) else Job.from_file(job, own_rules=False)
        plan = job.to_json()  # before anything is sent: it refuses rules that devices do not have
        data = job.plan.evaluate.data if evaluation_data is None else evaluation_data
        if data is not None and not (isinstance(data, str) and data.startswith((UPLOADED, ON_COORDINATOR))):
            sent = f"{UPLOADED}{self.send_evaluation_data(data, job.bundle)}"
            plan = {**plan, "evaluate": {**plan["evaluate"], "data": sent}}
        digest = self.send_bundle(job.bundle.path)
        return str(self.call("POST", "/jobs", json={"bundle": digest, "plan": plan})["id"])

    def send_evaluation_data(self, data: Data, bundle: Bundle) -> str:
        """Read samples on this machine and send them as the model takes them, unless they are there already.

        Returns their sha256. FILE.py:NAME runs here; the coordinator gets numbers.
        """
        from edge_runtime.data import load_samples
        from edge_runtime.sample_file import write_samples

        try:
            tokenizer = own_tokenizer(bundle.path, bundle.manifest)
            samples = load_samples(data, bundle.manifest, tokenizer=tokenizer)
        except DataError as error:
            raise DataError(f"evaluate.data: {error}") from None
        with tempfile.TemporaryDirectory(prefix="embrace-") as folder:
            file = Path(folder) / "samples.safetensors"
            write_samples(samples, file)
            digest = file_ref(file.parent, file.name).sha256
            if all(known["sha256"] != digest for known in self.call("GET", "/evaluation-data")):
                try:
                    self._put_file(f"/evaluation-data/{digest}", file)
                except InputError as error:
                    raise InputError(f"evaluate.data: {error}") from None
        return digest

    def _put_file(self, path: str, file: Path) -> None:
        """Send a file; its length comes first, so that one that is too long is refused before it is sent."""
        length = {"Content-Length": str(file.stat().st_size)}
        self.call("PUT", path, content=_pieces(file), headers=length)

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

    def benchmarks(self, bundle: str | None = None) -> list[dict[str, Any]]:
        """List what training costs on the devices that measured it, the newest first; `bundle` is a sha256."""
        asked = {"limit": "1000", **({} if bundle is None else {"bundle": bundle})}
        return list(self.call("GET", "/benchmarks", params=asked))

    def find_job(self, text: str) -> str:
        """Return the id of the job with this id, name or beginning of an id; InputError if there are several."""
        return _only(text, "job", self.call("GET", "/jobs", params={"match": text}))

    def find_device(self, text: str) -> str:
        """Return the id of the device with this id, name or beginning of an id; InputError if there are several."""
        return _only(text, "device", self.call("GET", "/devices", params={"match": text}))

    def pause(self, job: str) -> dict[str, Any]:
        """Hand out no more tasks until `resume`; what is under way still counts. Return what changed."""
        return dict(self.call("POST", f"/jobs/{job}/pause"))

    def resume(self, job: str) -> dict[str, Any]:
        """Let a paused job go on where it was. Return what changed."""
        return dict(self.call("POST", f"/jobs/{job}/resume"))

    def stop(self, job: str) -> dict[str, Any]:
        """End a job for good; its weights stay. Return what changed."""
        return dict(self.call("POST", f"/jobs/{job}/stop"))

    def delete(self, job: str, *, force: bool = False) -> dict[str, Any]:
        """Remove a job that is over, and what only it used; `force` stops it first. Returns what became free."""
        return dict(self.call("DELETE", f"/jobs/{job}", params={"force": force}))

    def devices(self) -> list[dict[str, Any]]:
        """List all devices that ever enrolled."""
        return list(self.call("GET", "/devices"))

    def device(self, device: str) -> dict[str, Any]:
        """Return what is known of a device: its state, tasks, failures, the last error, where its time goes."""
        return dict(self.call("GET", f"/devices/{device}"))

    def invite(self, uses: int = 1, seconds: float = 86400.0) -> str:
        """Make a token with which so many devices can enrol for so long."""
        return str(self.call("POST", "/enrolments", json={"uses": uses, "seconds": seconds})["token"])

    def revoke(self, device: str) -> dict[str, Any]:
        """Refuse everything that a device asks for from now on, and give its work to others. Return what changed."""
        return dict(self.call("DELETE", f"/devices/{device}"))

    def watch(self, job: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield events as they happen, until the job or the coordinator ends; `after` is the last one known."""
        return (event for event in self.watch_with_pulse(job, after) if event is not None)

    def follow(self, job: str, on_round: OnRound = lambda record: None, *, track: str | Tracker | None = None) -> str:
        """Wait until a job is over, also over outages of the coordinator; return the state that it ended in.

        `on_round` is called with the record of each round when it is committed, and with its scores (round, test_loss,
        accuracy) when its version was evaluated. `track` keeps both in "tensorboard", "mlflow" or "wandb", or in a
        tracker of your own.
        """
        from embrace.following import follow, record_of
        from embrace.trackers import tracked

        found = self.job(job)
        with tracked(track, found["name"] or job, found["plan"]) as log:
            for event in follow(self, job):
                record = record_of(event) if isinstance(event, dict) else None
                if record is not None:
                    log(record)
                    on_round(record)
        return str(self.job(job)["state"])

    def watch_with_pulse(self, job: str, after: int = 0) -> Iterator[dict[str, Any] | None]:
        """Yield events, and None for each sign of life in between."""
        with self._stream(f"/v1/jobs/{job}/events", after=after) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
                elif line.startswith(":"):
                    yield None

    def export(
        self,
        job: str,
        out: str | Path,
        *,
        bundle: str | Path | None = None,
        best: bool = False,
        sign: str | Path | None = None,
    ) -> Bundle:
        """Fetch the newest weights of a job, or the best by its evaluation, and write the trained bundle.

        `bundle` says where the job's bundle is, if it is not where the job file said. What was trained is a new bundle:
        it has no signature unless `sign` names a private key.
        """
        from edge_runtime.trained_bundle import check_target, write_trained
        from embrace.bundles import Bundle

        key = None if sign is None else read_key(Path(sign))
        check_target(Path(out))
        found = self.job(job)
        directory = Path(bundle or found["plan"]["bundle"])
        manifest = read_manifest(directory)
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.safetensors"
            self.save_weights(job, exported_version(found, best), weights)
            write_trained(directory, manifest, 0, map_weights(weights, manifest.space), Path(out))
        trained = Bundle(out)
        if key is not None:
            trained.sign(key)
        return trained

    def save_weights(self, job: str, version: int, path: Path) -> None:
        """Write the weights of a version to a file."""
        with self._stream(f"/v1/jobs/{job}/versions/{version}/file") as answer, path.open("wb") as file:
            for chunk in answer.iter_bytes(_CHUNK):
                file.write(chunk)

    @contextmanager
    def _stream(self, path: str, **params: int) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", path, params=params) as answer:
                if answer.status_code >= 300:
                    answer.read()
                    raise InputError(_detail(answer))
                yield answer
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        base = self._http.base_url
        return Unreachable(mend(error, base) or f"{base} cannot be reached: {error or type(error).__name__}")


def exported_version(job: Mapping[str, Any], best: bool) -> int:
    """Choose the version of a job to export: the newest, or the best."""
    if best and job["best"] is None:
        raise InputError("no version of this job has a score, so none is the best; leave --best out for the newest")
    return int(job["best"]["version"] if best else job["version"])


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _only(text: str, kind: str, rows: list[dict[str, Any]]) -> str:
    """Choose what a text means: an id, then a name of what is not revoked, then any name, then the begin of an id."""
    by_id = [row for row in rows if row["id"] == text]
    named = [row for row in rows if row["name"] == text]
    active = [row for row in named if not row.get("revoked")]
    found = by_id or active or named or [row for row in rows if row["id"].startswith(text)]
    if len(found) == 1:
        return str(found[0]["id"])
    if not found:
        raise InputError(f"there is no {kind} '{printable(text, 100)}'")
    listed = (f"{row['id']} ({printable(row['name'], 40)}, {row['state']})" for row in found[:MOST_CANDIDATES])
    more = ", and others" if len(found) > MOST_CANDIDATES else ""
    raise InputError(f"'{printable(text, 100)}' may be one of several {kind}s; give an id: {', '.join(listed)}{more}")


def _detail(answer: httpx.Response) -> str:
    if elsewhere := redirect(answer):
        return elsewhere
    try:
        body = answer.json()
        return printable(body.get("detail") or body.get("title"))
    except (ValueError, AttributeError):
        return f"the coordinator answered {answer.status_code}"
