"""Weights and bundles over real sockets: ranges and layers, names that lead nowhere, bundles as their manifests say."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load

from edge_runtime.bundle_files import map_weights
from tests.coordinator.harness import Files, Site, write_bundle


def test_weights_whole_by_bytes_and_by_layers(site: Site, held: Any) -> None:
    client, offer = held
    path = Files(site.directory).version(offer.job, 0)
    everything, space = path.read_bytes(), site.manifest.space  # type: ignore[attr-defined]
    url = f"/v1/jobs/{offer.job}/versions/0/weights"
    whole = client.get(url)
    assert whole.content == everything and whole.headers["etag"] == f'"{offer.job}-0"'
    part = client.get(url, headers={"Range": "bytes=10-29"})
    assert part.status_code == 206 and part.content == everything[10:30]
    assert part.headers["content-range"] == f"bytes 10-29/{len(everything)}"
    assert client.get(url, headers={"Range": f"bytes={len(everything)}-"}).status_code == 416
    same = client.get(url, headers={"Range": "bytes=10-29", "If-Range": whole.headers["etag"]})
    other = client.get(url, headers={"Range": "bytes=10-29", "If-Range": '"another"'})
    assert (same.status_code, other.status_code) == (206, 200)
    vector = map_weights(path, space)
    for first in range(3):
        for end in range(first + 1, 4):
            answer = client.get(url, params={"from_layer": first, "to_layer": end})
            tensors = load(answer.content)
            assert set(tensors) == {p.name for layer in space.layers[first:end] for p in layer}
            for name, value in tensors.items():
                assert value.tobytes() == vector[space.slice_of(name)].tobytes()
    assert load(client.get(url, params={"from_layer": 2}).content).keys() == {"head.w", "head.b"}


def test_a_file_is_sent_without_a_thread_for_every_piece(
    site: Site, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, offer = held
    monkeypatch.setattr("starlette.responses.anyio.open_file", None)
    everything = Files(site.directory).version(offer.job, 0).read_bytes()
    for given, expected in (({}, everything), ({"Range": "bytes=7-80"}, everything[7:81])):
        assert client.get(f"/v1/jobs/{offer.job}/versions/0/weights", headers=given).content == expected


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("versions/1/weights", 404),
        ("versions/-1/weights", 422),
        ("versions/-1/weights?from_layer=0", 422),
        ("versions/1/weights?from_layer=0", 404),
        (f"versions/{10**300}/weights", 422),
        ("versions/x/weights", 422),
        ("versions/0/weights?from_layer=3", 400),
        ("versions/0/weights?from_layer=2&to_layer=1", 400),
        ("versions/0/weights?to_layer=4", 400),
        ("versions/0/weights?from_layer=-1", 422),
    ],
)
def test_weights_that_are_not_there(site: Site, held: Any, path: str, status: int) -> None:
    client, offer = held
    assert client.get(f"/v1/jobs/{offer.job}/{path}").status_code == status


@pytest.mark.parametrize("name", ["..", "../x", "%2e%2e", "..%2f..%2fcoordinator.db", ".hidden", "x%00", "a" * 200])
def test_names_do_not_lead_out_of_the_directory(site: Site, held: Any, name: str) -> None:
    client, _ = held
    for path in (f"/v1/jobs/{name}/versions/0/weights", f"/v1/bundles/{name}/manifest", f"/v1/graphs/{name}"):
        answer = client.send(client.build_request("GET", httpx.URL(site.url).copy_with(raw_path=path.encode())))
        assert answer.status_code in (400, 401, 404, 405), (path, answer.status_code)
        assert b"SQLite" not in answer.content


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "%2e%2e/evil",
        "a/../../evil",
        "/etc/evil",
        "a/b/c/d",
        ".evil",
        "..%2f..%2fevil",
        "a%00b",
        "a%5cb",
        "a//b",
    ],
)
def test_no_file_of_a_bundle_lies_outside_of_it(site: Site, name: str) -> None:
    before = {path for path in site.directory.rglob("*") if "coordinator.db" not in path.name}
    with site.http(site.admin) as admin:
        raw = f"/v1/bundles/{'a' * 64}/files/{name}".encode()
        answer = admin.send(admin.build_request("PUT", httpx.URL(site.url).copy_with(raw_path=raw), content=b"evil"))
    assert 400 <= answer.status_code < 500, answer.status_code
    after = {path for path in site.directory.rglob("*") if "coordinator.db" not in path.name}
    assert after - before <= {site.directory / "bundles" / f"{'a' * 64}.draft"}
    assert not (site.directory.parent / "evil").exists()


def test_a_bundle_is_taken_only_as_its_manifest_says(site: Site, tmp_path: Path) -> None:
    digest, manifest = write_bundle(tmp_path / "bundle", width=4)
    names = ["manifest.json", *(file.name for file in manifest.files())]
    bundles = site.directory / "bundles"
    with site.http(site.admin) as admin:

        def send(name: str, content: bytes) -> None:
            assert admin.put(f"/v1/bundles/{digest}/files/{name}", content=content).status_code == 204

        assert admin.post(f"/v1/bundles/{digest}").status_code == 400  # nothing has come
        for name in names[:-1]:
            send(name, (tmp_path / "bundle" / name).read_bytes())
        assert admin.post(f"/v1/bundles/{digest}").status_code == 400  # one is missing
        send(names[-1], b"something else")
        assert admin.post(f"/v1/bundles/{digest}").status_code == 400
        assert not (bundles / digest).exists()
        send(names[-1], (tmp_path / "bundle" / names[-1]).read_bytes())
        assert admin.post(f"/v1/bundles/{digest}").status_code == 204
        send(names[0], (tmp_path / "bundle" / names[0]).read_bytes())  # sent again by somebody who did not know
        assert admin.post(f"/v1/bundles/{digest}").status_code == 204
        assert (bundles / digest).is_dir() and not (bundles / f"{digest}.draft").exists()
        for name in ("a", "a/b", "weights.safetensors/a"):
            assert admin.put(f"/v1/bundles/{digest}/files/{name}", content=b"").status_code == 400
        other = hashlib.sha256(b"").hexdigest()
        assert admin.put(f"/v1/bundles/{other}/files/manifest.json", content=b"{}").status_code == 400
        assert admin.post(f"/v1/bundles/{other}").status_code == 400
        assert admin.post("/v1/jobs", json={"bundle": other, "plan": {"bundle": "x"}}).status_code == 400
