"""What users meet when TLS is not as it should be: one line at once, from every command that talks to a coordinator."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import embrace as public
from edge_runtime.client import DeviceClient
from federation.errors import EmbraceError
from tests.certificates import FAR_AWAY, LAST_YEAR, LONG_AGO, Authority, tls_options
from tests.embrace.cli.conftest import Embrace
from tests.live_server import LiveServer, live_server

JOB, DEVICE = "1f2e3d4c5b6a7988", "9c1f0b7e2a4d"
ADMINISTRATOR = [
    *(("job", verb, JOB) for verb in ("show", "watch", "pause", "resume", "stop")),
    ("job", "export", JOB, "--out", "nowhere"),
    *((("job", "list"), ("device", "list"), ("device", "revoke", DEVICE), ("device", "invite"))),
]
BAD = {
    "unknown authority": ("the certificate is not trusted (", "--certificate FILE"),
    "expired": ("the certificate has expired", "clock"),
    "not yet": ("the certificate is not valid yet", "clock"),
    "other host": ("the certificate is for another host than 127.0.0.1", "--server"),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "authority")


@pytest.fixture(scope="module")
def coordinator(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("coordinator"), *tls_options(authority.issue("good"))) as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    return tmp_path / "data.npz"


@pytest.fixture
def agent(embrace: Embrace, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embrace:
    """`embrace agent`, which must not wait for a better time."""

    def sleep(seconds: float) -> None:
        raise AssertionError("it waits to try again")

    monkeypatch.setitem(DeviceClient.__init__.__kwdefaults__, "sleep", sleep)
    options = ("--token", "embrace_enrol_x", "--data", data, "--work", tmp_path / "work")
    return lambda *arguments: embrace("agent", *options, *arguments)


@contextmanager
def listening(certificate: Path | None, location: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server that counts the tokens it is sent, and answers with a redirect."""
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def any(self) -> None:
            tokens.append(self.headers["Authorization"])
            self.send_response(307)
            if location is not None:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_PUT = do_POST = do_DELETE = any

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that refuses the certificate."""

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_address[1]}", tokens
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module", params=BAD)
def bad(request: pytest.FixtureRequest, authority: Authority) -> Iterator[tuple[str, list[str], Path, tuple[str, str]]]:
    """A server with a certificate that is to be refused, and the file that its clients trust."""
    kind = request.param
    if kind == "unknown authority":
        certificate = Authority(authority.folder / "other").issue("unknown")
    elif kind == "expired":
        certificate = authority.issue("expired", start=LONG_AGO, end=LAST_YEAR)
    elif kind == "not yet":
        certificate = authority.issue("early", start=FAR_AWAY)
    else:
        certificate = authority.issue("other", host="DNS:elsewhere.example")
    with listening(certificate) as (url, tokens):
        yield url, tokens, authority.file, BAD[kind]


def test_an_agent_says_at_once_what_is_wrong_with_a_certificate(
    agent: Embrace, bad: tuple[str, list[str], Path, tuple[str, str]]
) -> None:
    url, tokens, trusted, said = bad
    answer = agent("--server", url, "--certificate", trusted)
    assert answer.code == 1 and all(words in answer.error for words in said), answer.err
    assert tokens == []


@pytest.mark.parametrize("command", ADMINISTRATOR, ids=" ".join)
def test_an_administrator_s_command_says_it_too(
    embrace: Embrace, bad: tuple[str, list[str], Path, tuple[str, str]], command: tuple[str, ...]
) -> None:
    url, tokens, trusted, said = bad
    answer = embrace(*command, "--server", url, "--token", "embrace_admin_x", "--certificate", trusted)
    assert answer.code == 1 and all(words in answer.error for words in said), answer.err
    assert tokens == []


def test_the_client_in_python_says_it_too(bad: tuple[str, list[str], Path, tuple[str, str]]) -> None:
    url, tokens, trusted, said = bad
    with public.Client(url, "token", certificate=trusted) as client, pytest.raises(EmbraceError) as caught:
        client.jobs()
    assert all(words in str(caught.value) for words in said)
    assert tokens == []


def test_every_command_takes_the_authority_to_trust(
    embrace: Embrace, coordinator: LiveServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBRACE_SERVER", coordinator.url)
    monkeypatch.setenv("EMBRACE_ADMIN_TOKEN", coordinator.admin)
    assert embrace("job", "list", "--json", "--certificate", authority.file).json == []
    assert "not trusted" in embrace("job", "list").error
    monkeypatch.setenv("EMBRACE_CERTIFICATE", str(authority.file))
    assert embrace("device", "list", "--json").json == []
    assert embrace("device", "invite", "--json").json["token"].startswith("embrace_enrol_")
    link = embrace("device", "invite", "--link").out
    assert link.startswith(f"{coordinator.url}/join#embrace_enrol_") and link.count("\n") == 1
    for command in ADMINISTRATOR[:6]:
        assert "there is no job" in embrace(*command).error


def test_plain_http_to_a_port_with_tls(agent: Embrace, embrace: Embrace, coordinator: LiveServer) -> None:
    plain = coordinator.url.replace("https://", "http://")
    for answer in (
        agent("--server", plain),
        embrace("job", "list", "--server", plain, "--token", coordinator.admin),
    ):
        assert answer.code == 1 and "speaks TLS: give --server https://" in answer.error


def test_tls_to_a_port_without(agent: Embrace, embrace: Embrace, tmp_path: Path) -> None:
    with live_server(tmp_path / "plain") as server:
        secure = server.url.replace("http://", "https://")
        for answer in (
            agent("--server", secure),
            embrace("job", "list", "--server", secure, "--token", server.admin),
        ):
            assert answer.code == 1 and "does not speak TLS: give --server http://" in answer.error


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_token_does_not_follow_a_redirect(
    agent: Embrace, embrace: Embrace, authority: Authority, tmp_path: Path, scheme: str
) -> None:
    """Neither to another origin nor from TLS to plain http."""
    certificate = authority.issue("redirecting") if scheme == "https" else None
    with listening(None) as (target, stolen), listening(certificate, f"{target}/v1/jobs") as (url, given):
        trust = ("--certificate", authority.file)
        told = [agent("--server", url, *trust)]
        for command in ADMINISTRATOR:
            told.append(embrace(*command, "--server", url, "--token", "embrace_admin_x", *trust))
        with public.Client(url, "token", certificate=authority.file) as client:
            with pytest.raises(EmbraceError, match="redirects to"):
                client.save_weights(JOB, 0, tmp_path / "weights")
            with pytest.raises(EmbraceError, match="redirects to"):
                list(client.watch(JOB))
    assert given and stolen == []
    for answer in told:
        assert answer.code == 2 and answer.error.startswith(f"{url}/ redirects to {target}/v1/jobs; give"), answer.err
