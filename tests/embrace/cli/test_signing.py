"""From `embrace key new` to a device that trains what this key signed, and nothing else: over real sockets."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embrace as public
from federation.manifest import MANIFEST_NAME
from federation.signature import SIGNATURE_NAME, SigningKey
from tests.embrace.cli.conftest import Answer, Embrace
from tests.hostile_bundles import DEMO
from tests.live_server import LiveServer, live_server

PLAN = {"num_rounds": 1, "local": {"steps": 1, "batch": 4, "rate": "0.1"}, "participate": {"min_available": 1}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("signing")) as running:
        yield running


@pytest.fixture
def keys(embrace: Embrace, tmp_path: Path) -> dict[str, str]:
    """Two public keys; the private ones are the files `mine` and `other`."""
    return {name: embrace("key", "new", tmp_path / name, "--json").json["key"] for name in ("mine", "other")}


def signed_copy(embrace: Embrace, folder: Path, name: str, key: str | None) -> Path:
    """A bundle of its own, signed or not."""
    shutil.copytree(DEMO, folder / name)
    manifest = json.loads((folder / name / MANIFEST_NAME).read_text())
    (folder / name / MANIFEST_NAME).write_text(json.dumps({**manifest, "name": f"{folder.name}-{name}"}))
    if key is not None:
        assert embrace("key", "sign", folder / key, folder / name).code == 0
    return folder / name


class Device:
    """One device, started again and again with the same work folder."""

    def __init__(self, embrace: Embrace, server: LiveServer, folder: Path) -> None:
        self.embrace = embrace
        self.server = server
        self.folder = folder
        rng = np.random.default_rng(0)
        np.savez(folder / "data.npz", x=rng.random((8, 1, 8, 8), np.float32), y=np.arange(8))

    def meets(self, bundle: Path, *options: object) -> list[str]:
        """Let it take the one task of a job on a bundle; what it says of a bundle that it refuses."""
        job = self.server.create_job(bundle, **PLAN)
        data = str(self.folder / "data.npz")
        keys = [str(options[i + 1]) for i, option in enumerate(options) if option == "--trust"]
        with public.Agent.join(
            self.server.url, data, token=self.server.enrolment, tier="weak", work=self.folder / "work", trust=keys
        ) as agent:
            offer = agent.client.next_task(30.0)
            assert offer is not None and offer.job == job
            done = agent.answer(offer)
        with public.Client(self.server.url, self.server.admin) as client:
            if not done:
                client.stop(job)
            told = list(client.watch(job))
        failures = [event for event in told if event["kind"] == "TaskFailed"]  # it is benched, too
        found = [text for text in map(json.dumps, failures) if "untrusted" in text]
        assert done == (not found)
        return found


@pytest.fixture
def device(embrace: Embrace, server: LiveServer, tmp_path: Path) -> Iterator[Device]:
    yield Device(embrace, server, tmp_path)
    server.retire_devices()


# --- keys and bundles ------------------------------------------------------------------------------


def test_a_new_key_is_its_owner_s_alone(embrace: Embrace, keys: dict[str, str], tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o600
    assert (tmp_path / "mine.pub").read_text() == keys["mine"] + "\n"
    assert embrace("key", "show", tmp_path / "mine").out.strip() == keys["mine"] != keys["other"]
    assert SigningKey.from_pem((tmp_path / "mine").read_text()).public == keys["mine"]
    again = embrace("key", "new", tmp_path / "mine")
    assert again.code == 2 and "exists" in again.error
    (tmp_path / "mine").chmod(0o644)
    assert "chmod 600" in embrace("key", "show", tmp_path / "mine").error


@pytest.mark.parametrize("content", [None, b"", b"no key", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_key(embrace: Embrace, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
    for command in (["key", "show", tmp_path / "key"], ["export", "mnist_lr", "--sign", tmp_path / "key"]):
        answer = embrace(*command)
        assert answer.code == 2 and "key" in answer.error


def test_export_signs_and_inspect_and_verify_show_it(embrace: Embrace, keys: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = embrace("export", "mnist_lr", "--out", tmp_path / "bundle", "--sign", tmp_path / "mine", "--json")
    assert made.json["signer"] == keys["mine"]
    assert f"signed by {keys['mine']}" in embrace("inspect", tmp_path / "bundle").out
    assert embrace("inspect", tmp_path / "bundle", "--json").json["signer"] == keys["mine"]
    assert embrace("verify", tmp_path / "bundle", "--json").json["signer"] == keys["mine"]
    assert embrace("key", "sign", tmp_path / "other", tmp_path / "bundle").code == 0  # in place of the first
    assert f"signed by {keys['other']}" in embrace("verify", tmp_path / "bundle").out
    (tmp_path / "bundle" / SIGNATURE_NAME).unlink()
    assert "not signed" in embrace("inspect", tmp_path / "bundle").out


def test_a_signature_of_other_bytes_is_refused_everywhere(
    embrace: Embrace, server: LiveServer, keys: dict[str, str], tmp_path: Path
) -> None:
    bundle = signed_copy(embrace, tmp_path, "bundle", "mine")
    other = signed_copy(embrace, tmp_path, "changed", None)
    shutil.copy(bundle / SIGNATURE_NAME, other / SIGNATURE_NAME)
    answer = embrace("inspect", other)
    assert answer.code == 2 and "not a signature of this bundle" in answer.error
    with public.Client(server.url, server.admin) as client:
        with pytest.raises(public.errors.InputError, match="not a signature of this bundle"):
            client.send_bundle(other)
        (other / SIGNATURE_NAME).unlink()
        digest = client.send_bundle(other)
        with pytest.raises(public.errors.InputError, match="not a signature of this bundle"):  # past our own check
            client.call(
                "PUT", f"/bundles/{digest}/files/{SIGNATURE_NAME}", content=(bundle / SIGNATURE_NAME).read_bytes()
            )
        with pytest.raises(public.errors.InputError, match="4096"):
            client.call("PUT", f"/bundles/{digest}/files/{SIGNATURE_NAME}", content=b" " * 5000)


def test_a_trained_bundle_is_signed_anew(
    embrace: Embrace, server: LiveServer, device: Device, keys: dict[str, str], tmp_path: Path
) -> None:
    bundle = signed_copy(embrace, tmp_path, "bundle", "mine")
    assert device.meets(bundle) == []
    with public.Client(server.url, server.admin) as client:
        job = client.jobs()[-1]["id"]
    admin = ("--server", server.url, "--token", server.admin, "--bundle", bundle)
    assert embrace("job", "export", job, "--out", tmp_path / "plain", *admin).code == 0
    assert public.load(tmp_path / "plain").signer is None
    assert embrace("job", "export", job, "--out", tmp_path / "signed", "--sign", tmp_path / "other", *admin).code == 0
    assert public.load(tmp_path / "signed").signer == keys["other"]


# --- devices ---------------------------------------------------------------------------------------


def test_the_first_signer_is_remembered(embrace: Embrace, device: Device, keys: dict[str, str], tmp_path: Path) -> None:
    assert device.meets(signed_copy(embrace, tmp_path, "a", "mine")) == []
    assert device.meets(signed_copy(embrace, tmp_path, "b", "mine")) == []
    [refused] = device.meets(signed_copy(embrace, tmp_path, "c", "other"))
    assert keys["mine"] in refused and keys["other"] in refused and "--trust KEY or remove" in refused
    [refused] = device.meets(signed_copy(embrace, tmp_path, "d", None))
    assert "it is not signed" in refused and keys["mine"] in refused
    assert device.meets(tmp_path / "a") == []
    (tmp_path / "work" / "trust.json").unlink()  # as the message says
    assert device.meets(tmp_path / "c") == []


def test_bundles_without_a_signature_may_get_one(
    embrace: Embrace, device: Device, keys: dict[str, str], tmp_path: Path
) -> None:
    assert device.meets(signed_copy(embrace, tmp_path, "a", None)) == []
    assert device.meets(signed_copy(embrace, tmp_path, "b", "mine")) == []
    assert len(device.meets(tmp_path / "a")) == 1
    assert embrace("key", "sign", tmp_path / "mine", tmp_path / "a").code == 0
    assert device.meets(tmp_path / "a") == []  # the coordinator has it already: the signature comes later


def test_only_bundles_of_the_keys_that_are_given(
    embrace: Embrace, device: Device, keys: dict[str, str], tmp_path: Path
) -> None:
    mine = signed_copy(embrace, tmp_path, "a", "mine")
    other = signed_copy(embrace, tmp_path, "b", "other")
    assert device.meets(mine, "--trust", keys["mine"]) == []
    [refused] = device.meets(other, "--trust", keys["mine"])
    assert "--trust names other keys only" in refused
    [refused] = device.meets(signed_copy(embrace, tmp_path, "c", None), "--trust", keys["mine"])
    assert "it is not signed" in refused
    assert device.meets(other, "--trust", keys["mine"], "--trust", tmp_path / "other.pub") == []
    assert not (tmp_path / "work" / "trust.json").exists()


def test_the_command_takes_keys(embrace: Embrace, server: LiveServer, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((1, 2), np.float32), y=np.zeros(1, np.int64))
    started: Answer = embrace("agent", "--server", server.url, "--data", tmp_path / "data.npz", "--trust", "nonsense")
    assert started.code == 2 and started.error.startswith("'nonsense' is no public key")
