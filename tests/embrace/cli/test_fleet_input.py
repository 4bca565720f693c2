"""Wrong words for `embrace serve | agent | job | device`: one line that says what was wrong, and an exit code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.embrace.cli.conftest import Embrace
from tests.live_server import LiveServer, live_server, make_bundle
from tests.stock_python import ROOT

NOBODY = "http://127.0.0.1:1"
JOB = "1f2e3d4c5b6a7988"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def admin(embrace: Embrace, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Embrace:
    """The command, with the address of a coordinator and the administrator's token."""
    monkeypatch.setenv("EMBRACE_SERVER", server.url)
    monkeypatch.setenv("EMBRACE_ADMIN_TOKEN", server.admin)
    return embrace


ADMINISTRATOR = [
    *(("job", verb, JOB) for verb in ("show", "watch", "pause", "resume", "stop", "delete")),
    *((("job", "list"), ("device", "list"), ("device", "revoke", "9c1f0b7e2a4d"), ("device", "invite"))),
]


@pytest.mark.parametrize("command", ADMINISTRATOR, ids=" ".join)
class TestEveryCommand:
    def test_without_a_server(self, admin: Embrace, command: tuple[str, ...]) -> None:
        answer = admin(*command, "--server", NOBODY)
        assert answer.code == 1 and answer.error.startswith(f"{NOBODY} cannot be reached: ")

    def test_with_a_wrong_token(self, admin: Embrace, command: tuple[str, ...]) -> None:
        answer = admin(*command, "--token", "embrace_admin_wrong")
        unread = "this coordinator knows no such token; expected the administrator's, or a device's that is enrolled"
        said = unread if command == ("device", "invite") else "this needs the administrator's token"  # it has a body
        assert answer.code == 2 and answer.error.startswith(said)

    def test_with_something_that_is_no_token(self, admin: Embrace, command: tuple[str, ...]) -> None:
        answer = admin(*command, "--token", "")
        assert answer.code == 2 and answer.error.startswith("the token cannot be right")

    def test_with_something_that_is_no_address(self, admin: Embrace, command: tuple[str, ...]) -> None:
        answer = admin(*command, "--server", "nonsense")
        assert answer.code == 2 and answer.error.startswith("'nonsense' is no address of a server")


@pytest.mark.parametrize("token", ["a\nb", "ü", "two words"])
def test_other_things_that_are_no_tokens(admin: Embrace, token: str) -> None:
    answer = admin("job", "list", "--token", token)
    assert answer.code == 2 and answer.error.startswith("the token cannot be right")


@pytest.mark.parametrize("address", ["ftp://x", "http://[::1", "http://h:p", "http://h:0", "http://", "http://a b"])
def test_other_things_that_are_no_addresses(admin: Embrace, address: str) -> None:
    answer = admin("job", "list", "--server", address)
    assert answer.code == 2 and answer.error.startswith(f"{address!r} is no address of a server")


@pytest.mark.parametrize("verb", ["show", "watch", "pause", "resume", "stop", "delete"])
@pytest.mark.parametrize(
    ("job", "said"), [(JOB, f"there is no job '{JOB}'"), ("../x", "there is no job '../x'"), ("", "'' is")]
)
def test_a_job_that_is_not_there(admin: Embrace, verb: str, job: str, said: str) -> None:
    answer = admin("job", verb, job)
    assert answer.code == 2 and answer.error.startswith(said)


@pytest.mark.parametrize(("device", "said"), [("9c1f0b7e2a4d", "there is no device"), ("", "'' is no id and no name")])
def test_a_device_that_is_not_there(admin: Embrace, device: str, said: str) -> None:
    answer = admin("device", "revoke", device)
    assert answer.code == 2 and answer.error.startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"bundle = 'b'\n[local\n", "the job file is no TOML: .*line 2"),
        (b"bundle = 'b'\n[local]\nstep = 3\n", r"line 3: local.step: no such key; expected .*; did you mean 'steps'\?"),
        (b"bundle = 'b'\nnum_rounds = 'many'\n", "line 2: num_rounds: expected int, got 'many'"),
        (
            b"bundle = 'b'\n[local]\nrules = [{rule = 'momentum', factor = 3}]\n",
            r"line 3: local.rules\[0\].factor: expected a number in \[0, 1\), got 3.0",
        ),
        (
            b"bundle = 'b'\n[serve]\nbeta2 = 0.5\n",
            "line 3: serve.beta2: not a constant of the rule 'average', which has only rate",
        ),
        (
            b"bundle = 'b'\n[serve]\nrule = 'mine.py:Mine'\n",
            "line 3: serve.rule: .* a coordinator and its devices run no code of a job",
        ),
        (b"num_rounds = 3\n", "bundle: required, and not given"),
        (b"bundle = 'nowhere'\n", ".*nowhere is not a bundle"),
        (b"bundle = '\xff'\n", ".* is no TOML: expected text in UTF-8"),
    ],
)
def test_a_job_file_that_cannot_be(admin: Embrace, tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "job.toml").write_bytes(text)
    (tmp_path / "mine.py").write_text("raise AssertionError('nothing beside a job file runs')")
    answer = admin("job", "create", tmp_path / "job.toml")
    assert answer.code == 2 and re.match(said, answer.error), answer.error
    missing = admin("job", "create", tmp_path / "none.toml")
    assert missing.code == 2 and missing.error.startswith("cannot read")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("nowhere.npz", "evaluate.data: no such file: nowhere.npz"),
        ("nowhere.py:load", "evaluate.data: no such file: nowhere.py"),
        ("coordinator:nowhere.npz", "evaluate.data: expected sha256:DIGEST of data that was uploaded, or coordinator"),
    ],
)
def test_a_job_that_cannot_be_scored(admin: Embrace, tmp_path: Path, data: str, said: str) -> None:
    make_bundle(tmp_path / "small")
    (tmp_path / "job.toml").write_text(f"bundle = 'small'\n[evaluate]\ndata = '{data}'\n")
    answer = admin("job", "create", tmp_path / "job.toml")
    assert answer.code == 2 and answer.error.startswith(said), answer.error


def test_an_invitation_for_ever(admin: Embrace) -> None:
    assert admin("device", "invite", "--hours", "nan").error == "--hours: expected a number, got nan"
    assert "31622400" in admin("device", "invite", "--hours", "1e6").error


def test_export_to_a_place_that_cannot_be_written(admin: Embrace, server: LiveServer, tmp_path: Path) -> None:
    make_bundle(tmp_path / "small")
    job = server.create_job(tmp_path / "small")
    (tmp_path / "file").touch()
    answer = admin("job", "export", job, "--bundle", tmp_path / "small", "--out", tmp_path / "file" / "out")
    assert answer.code == 2 and str(tmp_path / "file") in answer.error


def agent_options(tmp_path: Path, server: str) -> dict[str, str]:
    data = tmp_path / "data.npz"
    np.savez(data, x=np.zeros((2, 4), np.float32), y=np.zeros(2, np.int64))
    return {"--server": server, "--data": str(data), "--work": str(tmp_path / "work")}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"--server": "nonsense"}, "'nonsense' is no address of a server"),
        ({"--token": "embrace_enrol_wrong"}, "this enrolment token is unknown, used up or expired"),
        ({"--token": "a\nb"}, "the token cannot be right"),
        ({"--token": None}, "this device is not enrolled at http.*: give --token"),
        ({"--data": "nowhere.npz"}, "no such file: nowhere.npz"),
        ({"--data": "nowhere.py:samples"}, "no such file: nowhere.py"),
        ({"--work": "TAKEN/work"}, "cannot use .*work: "),
        ({"--memory": "lots"}, "'lots' is no size"),
        ({"--engine": "warp"}, "no engine is called 'warp': expected auto, portable or ort-training"),
        ({"--profile": "warp"}, "no profile is called 'warp': expected auto, fast or low_memory"),
        ({"--certificate": "nowhere.pem"}, "cannot use the certificate nowhere.pem"),
    ],
    ids=lambda value: " ".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_an_agent(
    embrace: Embrace, server: LiveServer, tmp_path: Path, wrong: dict[str, str | None], said: str
) -> None:
    (tmp_path / "TAKEN").touch()
    given = {**agent_options(tmp_path, server.url), "--token": server.enrolment, **wrong}
    given = {key: value.replace("TAKEN", str(tmp_path / "TAKEN")) for key, value in given.items() if value is not None}
    with server.client(server.admin) as admin:
        before = len(admin.get("/v1/devices").json())
        answer = embrace("agent", *(part for pair in given.items() for part in pair))
        assert answer.code == 2 and re.match(said, answer.error), answer.error
        assert len(admin.get("/v1/devices").json()) == before  # nobody was enrolled for nothing


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ('{"', ".* is damaged: expected tokens as JSON"),
        ("[]", ".* is damaged"),
        (None, "this coordinator knows no such token"),
    ],
)
def test_an_agents_credentials(
    embrace: Embrace, server: LiveServer, tmp_path: Path, kept: str | None, said: str
) -> None:
    (tmp_path / "work").mkdir()
    old = f'{{"{server.url}": "embrace_device_old"}}'
    (tmp_path / "work" / "credentials.json").write_text(old if kept is None else kept)
    given = agent_options(tmp_path, server.url)
    answer = embrace("agent", *(part for pair in given.items() for part in pair))
    assert answer.code == 2 and re.match(said, answer.error), answer.error


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (("--port", "99999"), {}, "port: expected a number from 0 to 65535"),
        (("--host", "0.0.0.0"), {}, "0.0.0.0 is visible to other machines"),
        (("--tls-key", "none.pem"), {}, "TLS needs both"),
        (("--tls-key", "none.pem", "--tls-certificate", "none.pem"), {}, "cannot use none.pem with none.pem"),
        (("--database", "nonsense"), {}, "cannot open the database: Could not parse"),
        (("--database", "sqlite:////proc/none/x.db"), {}, "cannot open the database: unable to open"),
        (("--database", "no_such_kind://host/x"), {}, "cannot open the database: "),
        (("--log-level", "loud"), {}, "log_level: expected debug, info, warning or error"),
        ((), {"EMBRACE_PORT": "abc"}, "EMBRACE_PORT: expected a number, got 'abc'"),
        ((), {"EMBRACE_ADMIN_TOKEN_FILE": "none"}, "admin_token_file: cannot read none: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_serve(
    embrace: Embrace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    environment: dict[str, str],
    said: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    answer = embrace("serve", "--data", tmp_path / "c", *options)
    assert (answer.code, answer.out) == (2, "") and answer.error.startswith(said)


def test_serve_on_a_port_that_is_taken_makes_no_tokens(embrace: Embrace, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = embrace("serve", "--data", tmp_path / "c", "--port", port)
    assert answer.code == 2 and answer.out == "" and f"error: cannot listen on 127.0.0.1:{port}: " in answer.err
    assert not (tmp_path / "c" / "admin.token").exists()


def test_serve_in_a_place_that_cannot_be_used(embrace: Embrace, tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "c"
    file.touch()
    inside = embrace("serve", "--data", file / "c")
    assert inside.code == 2 and inside.error.startswith("cannot use ")
    itself = embrace("serve", "--data", file)
    assert (itself.code, itself.error) == (2, f"cannot use {file}: it is a file, expected a directory")
    other.mkdir()
    (other / "coordinator.db").write_text("this is no database, whatever its name says")
    broken = embrace("serve", "--data", other)
    assert (broken.code, broken.error) == (2, "cannot open the database: file is not a database")


def test_serve_says_where_the_administrators_token_is(tmp_path: Path) -> None:
    file = tmp_path / "data" / "admin.token"
    with live_server(tmp_path) as first:
        assert f"administrator's token, made now and kept only here: {file}\n" in first.printed
    with live_server(tmp_path) as again:
        assert f"administrator's token, as before: {file}\n" in again.printed and again.admin == first.admin
    file.unlink()
    command = [sys.executable, "-m", "embrace", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    environment = {**os.environ, "COLUMNS": "300"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.terminate()
    assert said == f"administrator's token, as before; it is not in {file} any more\n"


def test_two_coordinators_on_one_directory(embrace: Embrace, server: LiveServer) -> None:
    answer = embrace("serve", "--data", server._log.parent / "data", "--port", 0)
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.endswith(f"data is in use: another coordinator runs on it, process {server.process.pid}")


def test_a_job_is_deleted_once_it_is_over(admin: Embrace, server: LiveServer, tmp_path: Path) -> None:
    make_bundle(tmp_path / "small", width=6)
    job = server.create_job(tmp_path / "small")
    refused = admin("job", "delete", job)
    said = f"job {job} is running; stop it first, or delete it with --force"
    assert (refused.code, refused.error) == (2, said)
    answer = admin("job", "delete", job, "--force")
    assert answer.code == 0 and re.fullmatch(rf"job {job} deleted with its bundle: [\d.]+ k?B free\n", answer.out)
    assert admin("job", "show", job).error == f"there is no job '{job}'"
    job = server.create_job(tmp_path / "small")
    assert admin("job", "stop", job).code == 0
    assert set(admin("job", "delete", job, "--json").json) == {"bytes", "bundle", "data"}
