"""What is acknowledged is on the disk: the order of system calls before an answer, as strace sees it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from edge_runtime.bundle_files import file_ref, read_manifest
from embrace import Client, Job
from embrace.demo.digits_demo import SHIPPED
from federation.manifest import MANIFEST_NAME
from tests.live_server import LiveServer, live_server, make_bundle, next_task, send_update
from tests.stock_python import ROOT
from tests.waiting import PATIENCE, wait_until

CALLS = "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,sendto,write,sendmsg"


@pytest.fixture(scope="module", autouse=True)
def strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"strace may not trace here: {tried.stderr.strip()[:100]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("durability")
    with live_server(folder) as running:
        yield running


@contextmanager
def traced(server: LiveServer, file: Path) -> Iterator[None]:
    """Trace the coordinator while the block runs."""
    command = ["strace", "-f", "-y", "-s", "40", "-e", f"trace={CALLS}", "-o", str(file), "-p", str(server.process.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert tracer.stderr is not None
        told = tracer.stderr.readline()
        if "attach" not in told or "not permitted" in told:
            pytest.skip(f"strace may not attach here: {told.strip()}")
        yield
    finally:
        tracer.terminate()
        tracer.communicate(timeout=PATIENCE)


def calls_before_the_answer(server: LiveServer, file: Path, ask: Callable[[], httpx.Response], status: int) -> str:
    """The calls until an answer with this status goes out."""
    with traced(server, file):
        answer = ask()
        assert answer.status_code == status, answer.text
        wait_until(lambda: f'"HTTP/1.1 {status} ' in file.read_text())
    before, _, _ = file.read_text().partition(f'"HTTP/1.1 {status} ')
    return before


def in_order(text: str, *patterns: str) -> None:
    """Each pattern matches after the one before; calls that a thread's switch cut in two count where they end."""
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(text, at)
        assert found, f"{pattern!r} is missing after {at} in:\n{text}"
        at = found.end()


WAL = r"f(data)?sync\(\d+<[^>]*/coordinator\.db-wal>"


def test_an_enrolment(server: LiveServer, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {server.enrolment}"}
    before = calls_before_the_answer(
        server,
        tmp_path / "calls",
        lambda: httpx.post(f"{server.url}/v1/devices", json={"name": "d"}, headers=headers, timeout=PATIENCE),
        201,
    )
    in_order(before, WAL)
    server.retire_devices()


def test_a_bundle_a_job_an_update_and_a_failure(server: LiveServer, tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle")
    admin = server.client(server.admin)
    digest = file_ref(tmp_path / "bundle", MANIFEST_NAME).sha256
    for name in (MANIFEST_NAME, *(file.name for file in read_manifest(tmp_path / "bundle").files())):
        content = (tmp_path / "bundle" / name).read_bytes()
        assert admin.put(f"/v1/bundles/{digest}/files/{name}", content=content).status_code == 204
    before = calls_before_the_answer(server, tmp_path / "1", lambda: admin.post(f"/v1/bundles/{digest}"), 204)
    folder = rf"/bundles/{digest}\.draft"
    for name in ("manifest.json", "weights.safetensors", "train.first.onnx"):
        in_order(before, rf"fsync\(\d+<[^>]*{folder}/{re.escape(name)}>", r"rename\w*\(", r"fsync\(\d+<[^>]*/bundles>")
    in_order(before, rf"fsync\(\d+<[^>]*{folder}>", r"rename\w*\(")

    plan = {"bundle": "small", "num_rounds": 100}
    create = {"bundle": digest, "plan": plan}
    before = calls_before_the_answer(server, tmp_path / "2", lambda: admin.post("/v1/jobs", json=create), 201)
    in_order(before, r"fsync\(\d+<[^>]*/versions/[^>]*>", r"rename\w*\(", r"fsync\(\d+<[^>]*/versions>", WAL)
    in_order(before, r"mkdir\w*\([^\n]*/jobs/", r"fsync\(\d+<[^>]*/data/jobs>")

    device = server.enrol()
    task = next_task(device)["id"]
    before = calls_before_the_answer(server, tmp_path / "3", lambda: send_update(device, task), 201)
    in_order(before, r"fsync\(\d+<[^>]*/spool/[^>]*>", r"rename\w*\(", r"fsync\(\d+<[^>]*/spool>", WAL)

    task = next_task(device)["id"]
    failed = {"reason": "failed", "message": "on purpose"}
    before = calls_before_the_answer(
        server, tmp_path / "4", lambda: device.post(f"/v1/tasks/{task}/failure", json=failed), 204
    )
    in_order(before, WAL)


def test_a_device_s_credential(server: LiveServer, tmp_path: Path) -> None:
    """The file, its rename, its folder, and the folders above one that is new; then the agent goes on."""
    work = tmp_path / "new" / "work"
    script = (
        "import numpy as np, embrace\n"
        "data = np.zeros((2, 4), np.float32), np.arange(2)\n"
        f"with embrace.Agent.join({server.url!r}, data, token={server.enrolment!r}, work={str(work)!r}):\n"
        "    print('acknowledged', flush=True)\n"
    )
    trace = tmp_path / "calls"
    command = ["strace", "-f", "-y", "-e", f"trace={CALLS}", "-o", str(trace), sys.executable, "-c", script]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    before, _, _ = trace.read_text().partition('"acknowledged')
    in_order(
        before,
        rf"mkdir\w*\([^\n]*{re.escape(str(work.parent))}",
        rf"fsync\(\d+<{re.escape(str(tmp_path))}>",
        rf"fsync\(\d+<{re.escape(str(work.parent))}>",
        r"fsync\(\d+<[^>]*/credentials\.json\.new>",
        r"rename\w*\([^\n]*credentials\.json",
        rf"fsync\(\d+<{re.escape(str(work))}>",
    )
    server.retire_devices()


def test_what_a_device_keeps_of_a_task(server: LiveServer, tmp_path: Path) -> None:
    """State that lasts longer than a task is on the device's disk before its update leaves: the file and its names."""
    model = SHIPPED / "model"
    shape = read_manifest(model).input.shape
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(1).random((20, *shape), np.float32), y=np.arange(20) % 10)
    with Client(server.url, server.admin) as admin:
        job = admin.create(Job(model, algorithm="scaffold", num_rounds=1, local={"steps": 1, "batch": 4}))
    trace, work = tmp_path / "calls", tmp_path / "work"
    agent = [sys.executable, "-m", "embrace", "agent", "--server", server.url, "--data", str(tmp_path / "data.npz")]
    agent += ["--work", str(work), "--tier", "weak", "--engine", "portable", "--tasks", "1"]
    command = ["strace", "-f", "-y", "-s", "40", "-e", f"trace={CALLS}", "-o", str(trace), *agent]
    own = {**os.environ, "EMBRACE_TOKEN": server.enrolment}
    subprocess.run(command, check=True, cwd=ROOT, env=own, capture_output=True, timeout=PATIENCE)
    before, sent, _ = trace.read_text().partition('"PUT /v1/tasks/')
    assert sent
    folder = re.escape(str(work / "kept" / job))
    in_order(
        before,
        rf"mkdir\w*\([^\n]*{folder}",
        rf"fsync\(\d+<{re.escape(str(work / 'kept'))}>",
        rf"fsync\(\d+<{folder}/[^>]*\.kept\.new>",
        r"rename\w*\([^\n]*\.kept",
        rf"fsync\(\d+<{folder}>",
    )
    server.retire_devices()
