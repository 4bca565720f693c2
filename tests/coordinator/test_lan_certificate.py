"""`embrace serve --tls auto`: a certificate for the private network that Python's own TLS and openssl accept."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import stat
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import numpy as np
import pytest

from coordinator.lan import Names, is_private, lan_addresses, names_of_this_machine
from coordinator.server import TICKS, Server, _Uvicorn
from coordinator.settings import Settings, is_exposed, load_settings
from federation.errors import InputError
from tests.embrace.cli.conftest import Embrace, embrace  # noqa: F401
from tests.live_server import live_server
from tests.stock_python import ROOT
from tests.waiting import wait_until

pytest.importorskip("cryptography")
from coordinator.lan_certificate import ensure_certificate

DIGITS = ROOT / "embrace" / "demo" / "digits" / "model"
NOW = datetime.now(timezone.utc)
NAMES = Names(("localhost", "board", "board.local"), ("127.0.0.1", "192.168.7.9"), "192.168.7.9")


def test_the_files_are_the_owners_and_are_kept(tmp_path: Path) -> None:
    made = ensure_certificate(tmp_path / "tls", NAMES)
    assert made.is_new and re.fullmatch(r"[0-9A-F]{2}(:[0-9A-F]{2}){31}", made.fingerprint)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.authority.parent.iterdir()}
    assert modes == {"authority.key": 0o600, "server.pem": 0o600, "authority.pem": 0o644}
    assert b"PRIVATE" not in made.authority.read_bytes()
    before = {path: path.read_bytes() for path in made.authority.parent.iterdir()}
    again = ensure_certificate(tmp_path / "tls", NAMES)
    assert not again.is_new and again.fingerprint == made.fingerprint
    assert {path: path.read_bytes() for path in made.authority.parent.iterdir()} == before


def test_it_is_renewed_before_it_ends_and_for_new_addresses_by_the_same_authority(tmp_path: Path) -> None:
    first = ensure_certificate(tmp_path, NAMES)
    content = first.certificate.read_bytes()
    later = ensure_certificate(tmp_path, NAMES, NOW + timedelta(days=70))
    assert (later.fingerprint, later.is_new) == (first.fingerprint, False)
    assert later.certificate.read_bytes() != content
    moved = Names(NAMES.hosts, (*NAMES.addresses, "10.1.2.3"), "10.1.2.3")
    assert ensure_certificate(tmp_path, moved).fingerprint == first.fingerprint
    assert "10.1.2.3" in text_of(first.certificate)
    assert ensure_certificate(tmp_path, NAMES, NOW + timedelta(days=9 * 365 + 300)).is_new  # it would not outlive


def test_a_new_host_name_needs_a_new_authority(tmp_path: Path) -> None:
    first = ensure_certificate(tmp_path, NAMES)
    renamed = ensure_certificate(tmp_path, Names(("localhost", "other"), NAMES.addresses, "other"))
    assert renamed.is_new and renamed.fingerprint != first.fingerprint
    context = ssl.create_default_context(cafile=str(renamed.authority))
    context.load_cert_chain(renamed.certificate)  # a key and a certificate that belong together


@pytest.mark.parametrize("content", [b"", b"no PEM", b"\xff\xfe", b"-----BEGIN PRIVATE KEY-----\nAA==\n"])
def test_an_authority_that_cannot_be_read_is_not_replaced(content: bytes, tmp_path: Path) -> None:
    made = ensure_certificate(tmp_path, NAMES)
    own = made.authority.with_name("authority.key")
    own.write_bytes(content)
    with pytest.raises(InputError, match=r"is no private key with its certificate: put back .* or delete"):
        ensure_certificate(tmp_path, NAMES)
    assert own.read_bytes() == content


def test_a_server_certificate_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    made = ensure_certificate(tmp_path, NAMES)
    made.certificate.write_bytes(b"half of")
    assert ensure_certificate(tmp_path, NAMES).fingerprint == made.fingerprint
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made.certificate)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_accepts_it_for_its_own_names_only(tmp_path: Path) -> None:
    made = ensure_certificate(tmp_path, NAMES)
    leaf = tmp_path / "leaf.pem"
    leaf.write_text(made.certificate.read_text().partition("-----END PRIVATE KEY-----\n")[2])
    for option, name, good in [
        ("-verify_ip", "192.168.7.9", True),
        ("-verify_hostname", "board.local", True),
        ("-verify_ip", "192.168.7.10", False),
        ("-verify_hostname", "elsewhere.example", False),
    ]:
        command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(made.authority)]
        done = subprocess.run([*command, option, name, str(leaf)], capture_output=True, text=True)
        assert (done.returncode == 0) is good, (name, done.stdout, done.stderr)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_authority_can_vouch_for_nothing_in_the_internet(tmp_path: Path) -> None:
    """With its key another certificate is made by openssl: no client may accept it."""
    made = ensure_certificate(tmp_path, NAMES)
    for name in ("DNS:bank.example", "IP:8.8.8.8"):
        run = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        signer = ["-CA", made.authority, "-CAkey", made.authority.with_name("authority.key")]
        about = ["-subj", "/CN=x", "-addext", f"subjectAltName={name}", "-addext", "basicConstraints=CA:FALSE"]
        forged = tmp_path / "forged.pem"
        command = [*run, *signer, *about, "-keyout", tmp_path / "forged.key", "-out", forged]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("this openssl cannot sign so")
        verify = ["openssl", "verify", "-CAfile", str(made.authority), str(forged)]
        done = subprocess.run(verify, capture_output=True, text=True)
        assert done.returncode != 0 and "permitted subtree violation" in done.stdout + done.stderr


def text_of(file: Path) -> str:
    from cryptography import x509

    found = x509.load_pem_x509_certificate(file.read_bytes())
    return str(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


# --- names and settings ------------------------------------------------------------------------------------------


def test_the_names_of_this_machine() -> None:
    names = names_of_this_machine("0.0.0.0")
    assert "localhost" in names.hosts and {"127.0.0.1", "::1"} <= set(names.addresses)
    assert set(lan_addresses()) <= set(names.addresses) and all(map(is_private, names.addresses))
    assert names_of_this_machine("192.168.1.2").link == "192.168.1.2"
    inside = names_of_this_machine("0.0.0.0", "192.168.1.7")  # in a container, whose machine has this address
    assert inside.link == "192.168.1.7" and "192.168.1.7" in inside.addresses
    assert names_of_this_machine("0.0.0.0", "fleet.example").hosts[-1] == "fleet.example"
    assert "gpu.lab.example" in names_of_this_machine("GPU.lab.example").hosts
    assert not is_private("8.8.8.8") and not is_private("2001:4860:4860::8888") and is_private("fd00::2")
    with pytest.raises(InputError, match=r"8\.8\.8\.8 is an address of the internet"):
        names_of_this_machine("8.8.8.8")


def test_tls_auto_is_for_other_machines(tmp_path: Path) -> None:
    found = load_settings(tmp_path, {}, {"tls": "auto"})
    assert found.host == "0.0.0.0" and not is_exposed(found)
    assert load_settings(tmp_path, {"EMBRACE_TLS": "auto"}, {"host": "127.0.0.1"}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls": "on"}, "tls: expected auto, got 'on'"),
        ({"tls": "auto", "tls_certificate": "a", "tls_key": "b"}, "expected either --tls auto or"),
        ({"public_url": "https://fleet.example/path"}, "public_url: expected one origin"),
        ({"host": "0.0.0.0"}, "phones do not train: give --tls auto"),
    ],
)
def test_wrong_settings_say_what_was_expected(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**settings)  # type: ignore[arg-type]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coordinator.lan_certificate", None)
    monkeypatch.delitem(sys.modules, "coordinator.lan_certificate")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InputError, match=r"needs the package cryptography: pip install"):
        Server(tmp_path, Settings(tls="auto"))


# --- a real server, a real agent ---------------------------------------------------------------------------------


def test_an_agent_trains_over_it_and_a_restart_keeps_it(
    tmp_path: Path,
    embrace: Embrace,  # noqa: F811
) -> None:
    authority = tmp_path / "data" / "tls" / "authority.pem"
    with live_server(tmp_path, "--tls", "auto") as server:
        port = httpx.URL(server.url).port
        url = f"https://127.0.0.1:{port}"
        assert server.url == f"https://{bracketed(names_of_this_machine('0.0.0.0').link)}:{port}"
        assert f"{server.url}/join#embrace_enrol_" in server.printed
        fingerprint = re.search(r"SHA-256 ([0-9A-F:]+)", server.printed)
        assert fingerprint and "made now" in server.printed
        trusting = ssl.create_default_context(cafile=str(authority))
        answer = httpx.get(f"{url}/authority.crt", verify=trusting)
        assert answer.content == authority.read_bytes()
        assert answer.headers["content-type"] == "application/x-x509-ca-cert"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/healthz")
        server_options = ("--server", url, "--certificate", authority)
        (tmp_path / "job.toml").write_text(f'bundle = "{DIGITS}"\nnum_rounds = 1\n[local]\nsteps = 2\nbatch = 4\n')
        admin = ("--token", f"@{tmp_path}/data/admin.token")
        assert embrace("job", "create", tmp_path / "job.toml", *server_options, *admin).code == 0
        np.savez(tmp_path / "data.npz", x=np.zeros((8, 1, 8, 8), np.float32), y=np.arange(8))
        agent = ("agent", "--token", server.enrolment, "--data", tmp_path / "data.npz", "--work", tmp_path / "work")
        assert "give --certificate FILE" in embrace(*agent, "--server", url).error
        command = [sys.executable, "-m", "embrace", *map(str, (*agent, *server_options))]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: re.search(r'/update", "status": 201', server.log) is not None, lambda: server.log)
        finally:
            process.kill()
            process.wait()
    with live_server(tmp_path, "--tls", "auto") as server:
        assert fingerprint[1] in server.printed and "as before" in server.printed
        url = f"https://localhost:{httpx.URL(server.url).port}"
        assert httpx.get(f"{url}/healthz", verify=trusting).status_code == 200


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def test_a_running_server_takes_a_renewed_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, Settings(tls="auto", host="127.0.0.1", port=0))
    config = server._config()
    process = _Uvicorn(config, 15.0, lambda: None, server.renewed_certificate)
    before = served_by(config.ssl)

    def look() -> str:
        async def tick() -> None:
            await process.on_tick(TICKS)
            assert process._renewal is not None
            await process._renewal

        asyncio.run(tick())
        return served_by(config.ssl)

    assert look() == before
    later = NOW + timedelta(days=70)
    monkeypatch.setattr(
        "coordinator.lan_certificate.ensure_certificate", lambda folder, names: ensure_certificate(folder, names, later)
    )
    after = look()
    assert after != before and after in (tmp_path / "tls" / "server.pem").read_text()
    (tmp_path / "tls" / "authority.key").write_text("spoilt")
    assert look() == after  # it goes on with what it has


def served_by(context: ssl.SSLContext | None) -> str:
    """The certificate of a handshake in memory."""
    assert context is not None
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    ours, theirs = client.wrap_bio(here, there), context.wrap_bio(there, here, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = ours.getpeercert(binary_form=True)
    assert found
    return ssl.DER_cert_to_PEM_cert(found)
