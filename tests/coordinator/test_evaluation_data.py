"""Evaluation data over the API: uploaded numbers, or a name in the operator's folder. No code, no other path.

The attacks are those with which the administrator's token once was code execution on the coordinator's machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.evaluation_data import EvaluationData
from edge_runtime.bundle_files import read_manifest
from edge_runtime.data import load_samples
from edge_runtime.sample_file import map_samples, write_samples
from federation.errors import InputError
from federation.safetensors_codec import encode_header
from simulation.datasets.digits import DIGITS
from tests.coordinator.harness import ROOT, Site, serving, write_bundle
from tests.waiting import wait_until

MODEL = ROOT / "embrace" / "demo" / "digits" / "model"
MOST = 1 << 20


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the operator, with a link that leads out of it."""
    folder = tmp_path_factory.mktemp("operator")
    np.savez(folder / "test.npz", x=np.zeros((3, 1, 8, 8), np.float32), y=np.zeros(3, np.int64))
    (folder / "mine.py").write_text("def load():\n    raise AssertionError\n")
    (folder.parent / "secret.npz").write_bytes(b"secret")
    (folder / "link.npz").symlink_to(folder.parent / "secret.npz")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, operator: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    with serving(directory, evaluation_data=str(operator), evaluation_bytes=MOST) as found:
        yield found


@pytest.fixture
def admin(site: Site) -> Iterator[httpx.Client]:
    with site.http(site.admin) as client:
        yield client


def send_bundle(admin: httpx.Client, directory: Path) -> str:
    manifest = read_manifest(directory)
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    for name in ("manifest.json", *(file.name for file in manifest.files())):
        answer = admin.put(f"/v1/bundles/{digest}/files/{name}", content=(directory / name).read_bytes())
        assert answer.status_code == 204, answer.text
    assert admin.post(f"/v1/bundles/{digest}").status_code == 204
    return digest


def create(admin: httpx.Client, bundle: str, data: str) -> httpx.Response:
    return admin.post("/v1/jobs", json={"bundle": bundle, "plan": {"bundle": "x", "evaluate": {"data": data}}})


def file_of(x: Any, y: Any, folder: Path) -> bytes:
    """A file of samples, written by the client's own code."""

    class Plain:
        labels = np.asarray(y)

        def __len__(self) -> int:
            return len(self.labels)

        def batch(self, indices: Any) -> Any:
            return np.asarray(x)[indices], self.labels[indices]

    write_samples(Plain(), folder / "samples")
    return (folder / "samples").read_bytes()


def put(admin: httpx.Client, body: bytes, digest: str | None = None) -> httpx.Response:
    return admin.put(f"/v1/evaluation-data/{digest or hashlib.sha256(body).hexdigest()}", content=body)


def test_a_bundle_cannot_carry_code(site: Site, admin: httpx.Client, tmp_path: Path) -> None:
    """evil.py beside the graphs, then `evaluate.data = .../evil.py:load`."""
    digest, _ = write_bundle(tmp_path / "bundle")
    evil = f"def load():\n    open({str(tmp_path / 'pwned')!r}, 'w')\n".encode()
    early = admin.put(f"/v1/bundles/{digest}/files/evil.py", content=evil)
    assert early.status_code == 400 and "send manifest.json first" in early.json()["detail"]
    send_bundle(admin, tmp_path / "bundle")
    late = admin.put(f"/v1/bundles/{digest}/files/evil.py", content=evil)
    assert late.status_code == 400 and "its manifest does not name it" in late.json()["detail"]
    (site.directory / "bundles" / digest / "evil.py").write_bytes(evil)  # as if an earlier program had taken it
    answer = create(admin, digest, f"{site.directory}/bundles/{digest}/evil.py:load")
    assert answer.status_code == 400 and answer.json()["detail"].startswith("evaluate.data: expected sha256:DIGEST")
    assert not (tmp_path / "pwned").exists()


def test_what_an_earlier_program_took_goes_when_a_bundle_is_completed(
    site: Site, admin: httpx.Client, tmp_path: Path
) -> None:
    digest, manifest = write_bundle(tmp_path / "bundle", width=5)
    draft = site.directory / "bundles" / f"{digest}.draft"
    (draft / "deep").mkdir(parents=True)
    for name in ("evil.py", "deep/evil.py"):
        (draft / name).write_text("raise AssertionError")
    send_bundle(admin, tmp_path / "bundle")
    found = {str(p.relative_to(draft.with_suffix(""))) for p in draft.with_suffix("").rglob("*") if p.is_file()}
    assert found == {"manifest.json", *(file.name for file in manifest.files())}


def test_a_file_of_a_bundle_is_no_longer_than_its_manifest_says(admin: httpx.Client, tmp_path: Path) -> None:
    digest, manifest = write_bundle(tmp_path / "bundle", width=6)
    text = (tmp_path / "bundle" / "manifest.json").read_bytes()
    assert admin.put(f"/v1/bundles/{digest}/files/manifest.json", content=text + b" ").status_code == 400
    assert admin.put(f"/v1/bundles/{digest}/files/manifest.json", content=text).status_code == 204
    graph = manifest.layers[0].forward
    for body in (bytes(graph.bytes + 1), iter([bytes(graph.bytes), b"x"])):
        answer = admin.put(f"/v1/bundles/{digest}/files/{graph.name}", content=body)
        assert answer.status_code in (400, 413), answer.text


@pytest.mark.parametrize("ending", ["", ":load"])
def test_no_path_of_the_machine_can_be_probed(admin: httpx.Client, tmp_path: Path, ending: str) -> None:
    digest, _ = write_bundle(tmp_path / "bundle")
    send_bundle(admin, tmp_path / "bundle")
    (tmp_path / "there.py").touch()
    (tmp_path / "there.npz").touch()
    names = ("there.py", "there.npz", "not.npz", "not.py", "..", ".")
    answers = {create(admin, digest, f"{tmp_path}/{name}{ending}").text for name in names}
    answers |= {create(admin, digest, name).text for name in ("/etc/passwd", "/etc/nothing", "test.npz", "sha256:1")}
    assert len(answers) == 1 and json.loads(answers.pop())["status"] == 400


@pytest.mark.parametrize(
    "name",
    ["link.npz", "../secret.npz", "none.npz", "mine.py", "mine.py:load", "/etc/passwd", ".", "", "a/../test.npz"],
)
def test_the_operators_folder_has_an_edge(operator: Path, admin: httpx.Client, tmp_path: Path, name: str) -> None:
    digest = send_bundle(admin, MODEL)
    answer = create(admin, digest, f"coordinator:{name}")
    assert answer.status_code == 400 and answer.json()["detail"].endswith(f"the operator's folder has no data {name!r}")
    assert create(admin, digest, "coordinator:test.npz").status_code == 201


def test_without_a_folder_no_name_is_known(tmp_path: Path) -> None:
    data = EvaluationData(DirectoryBlobs(tmp_path))
    for reference in ("coordinator:test.npz", "coordinator:none.npz"):
        with pytest.raises(InputError, match="expected sha256:DIGEST of data that was uploaded"):
            data.find(reference)


def test_uploaded_data_is_kept_once_and_scored(site: Site, admin: httpx.Client, tmp_path: Path) -> None:
    """The numbers that the coordinator has are those that a device would train on."""
    samples = load_samples(DIGITS, read_manifest(MODEL)).split(0.1, 0)[1]
    write_samples(samples, tmp_path / "file")
    body = (tmp_path / "file").read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    for _ in range(2):
        answer = put(admin, body)
        assert (answer.status_code, answer.json()) == (201, {"sha256": digest, "bytes": len(body)})
    assert {"sha256": digest, "bytes": len(body)} in admin.get("/v1/evaluation-data").json()
    x, y = map_samples(site.directory / "data" / f"{digest}.safetensors")
    expected = samples.batch(np.arange(len(samples)))
    np.testing.assert_array_equal(x, expected[0])
    np.testing.assert_array_equal(y, expected[1])
    assert create(admin, send_bundle(admin, MODEL), f"sha256:{digest}").status_code == 201
    parts = [path.name for path in (site.directory / "data").iterdir() if path.suffix == ".part"]
    assert parts == []


def test_data_that_does_not_fit_the_model_is_refused_when_the_job_is_created(
    admin: httpx.Client, tmp_path: Path
) -> None:
    bundle = send_bundle(admin, MODEL)
    shape = read_manifest(MODEL).input.shape
    for x, y, said in (
        (np.zeros((3, 5), np.float32), np.zeros(3, np.int64), "evaluate.data has samples of 5"),
        (np.zeros((3, *shape), np.float32), np.full(3, 77), "sample 0 has label 77"),
    ):
        body = file_of(x, y, tmp_path)
        assert put(admin, body).status_code == 201
        answer = create(admin, bundle, f"sha256:{hashlib.sha256(body).hexdigest()}")
        assert answer.status_code == 400 and said in answer.json()["detail"]
    assert "was not uploaded" in create(admin, bundle, f"sha256:{'0' * 64}").json()["detail"]


def bad_files(folder: Path) -> dict[str, bytes]:
    good = file_of(np.zeros((2, 3), np.float32), np.zeros(2, np.int64), folder)
    types = {"x": "F32", "y": "I64"}
    return {
        "empty": b"",
        "header too long": (1 << 40).to_bytes(8, "little"),
        "no JSON": (4).to_bytes(8, "little") + b"none",
        "too short": good[:-1],
        "too long": good + b"x",
        "not finite": file_of(np.full((2, 3), np.nan, np.float32), np.zeros(2, np.int64), folder),
        "label not finite": file_of(np.zeros((2, 3), np.float32), np.array([0, np.inf]), folder),
        "other counts": encode_header([("x", (2,)), ("y", (3,))], 8, dtypes=types) + bytes(8 + 24),
        "no samples": encode_header([("x", (0,)), ("y", (0,))], 8, dtypes=types),
        "no numbers": encode_header([("x", (1, 0)), ("y", (1,))], 8, dtypes=types) + bytes(8),
        "huge": encode_header([("x", (1, 0, 1 << 40)), ("y", (1,))], 8, dtypes=types) + bytes(8),
        "other names": encode_header([("a", (1,)), ("b", (1,))], 8) + bytes(8),
        "one name": encode_header([("x", (1,))], 8) + bytes(4),
        "pickle": b"\x80\x04\x95",
    }


@pytest.mark.parametrize(
    "case",
    [
        "empty",
        "header too long",
        "no JSON",
        "too short",
        "too long",
        "not finite",
        "label not finite",
        "other counts",
        "no samples",
        "no numbers",
        "huge",
        "other names",
        "one name",
        "pickle",
    ],
)
def test_hostile_files_are_refused(site: Site, admin: httpx.Client, tmp_path: Path, case: str) -> None:
    body = bad_files(tmp_path)[case]
    before = sorted((site.directory / "data").iterdir())
    answer = put(admin, body)
    assert answer.status_code == 400, answer.text
    assert sorted((site.directory / "data").iterdir()) == before


def test_an_upload_is_bounded_and_is_what_it_says(site: Site, admin: httpx.Client, tmp_path: Path) -> None:
    before = sorted((site.directory / "data").iterdir())
    announced = put(admin, bytes(MOST + 1))
    assert announced.status_code == 413
    counted = admin.put(f"/v1/evaluation-data/{'a' * 64}", content=iter([bytes(MOST), b"x"]))
    assert counted.status_code == 400 and f"goes on after {MOST} bytes" in counted.json()["detail"]
    good = file_of(np.zeros((2, 3), np.float32), np.zeros(2, np.int64), tmp_path)
    other = put(admin, good, "b" * 64)
    assert other.status_code == 400 and "send it again" in other.json()["detail"]
    assert put(admin, good, "..%2f..%2fevil").status_code in (400, 404)
    wait_until(lambda: sorted((site.directory / "data").iterdir()) == before)
