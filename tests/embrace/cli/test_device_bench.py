"""The third use across a fleet: devices measure what a job trains, send it, and are compared in one table and chart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from embrace.cli.device_bench import choose
from federation.benchmark import Benchmark
from federation.decode import decode
from federation.errors import InputError
from tests.embrace.cli.conftest import Embrace
from tests.live_server import LiveServer, live_server
from tests.stock_python import ROOT, STOCK_PYTHON, needs_stock_python
from tests.waiting import PATIENCE

DIGITS = ROOT / "embrace" / "demo" / "digits" / "model"
QUICK = ("--iterations", "1", "--batch", "2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("live")) as found:
        yield found


@needs_stock_python
def test_a_device_measures_what_is_trained_and_the_administrator_compares(
    server: LiveServer, tmp_path: Path, embrace: Embrace
) -> None:
    job = server.create_job(DIGITS, name="digits")
    there = ("--server", server.url, "--token", server.enrolment)
    command = (STOCK_PYTHON, "-m", "embrace", "device", "bench", *there, "--work", tmp_path / "pi", "--name", "pi")
    told = subprocess.run(
        [*map(str, command), *QUICK, "--submit", "--json"], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert told.returncode == 0, told.stderr
    sent = decode(Benchmark, json.loads(told.stdout))
    assert {tier for cost in sent.costs for tier in cost.tiers} == {"strong", "moderate", "weak"}

    own = embrace(
        "device", "bench", DIGITS, *there, *QUICK, "--submit", "--work", tmp_path / "laptop", "--name", "book"
    )
    assert own.code == 0 and "sent as book" in own.out, own.err

    admin = ("--server", server.url, "--token", server.admin)
    picture = tmp_path / "devices.png"
    compared = embrace("device", "compare", *admin, "--out", picture)
    assert compared.code == 0, compared.err
    for words in ("digits: one batch of 2", "pi, onnxruntime", "book, onnxruntime", "(weak)", "peak MB"):
        assert words in compared.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    listed = embrace("device", "compare", *admin, "--bundle", sent.bundle[:8], "--batch", "2", "--json").json
    assert {row["name"]: decode(Benchmark, row["benchmark"]).bundle for row in listed} == dict.fromkeys(
        ("pi", "book"), sent.bundle
    )
    assert decode(Benchmark, next(row["benchmark"] for row in listed if row["name"] == "pi")) == sent
    assert "there is: digits" in embrace("device", "compare", *admin, "--batch", "3").error
    embrace("job", "stop", job, *admin)
    again = embrace("device", "bench", "--server", server.url, "--work", tmp_path / "pi", *QUICK)
    assert "no job that runs" in again.error  # its credential is kept, and no token is needed


def test_a_local_bundle_needs_no_coordinator(embrace: Embrace) -> None:
    found = embrace("device", "bench", DIGITS, *QUICK, "--boundaries", "classifier")
    assert found.code == 0 and "classifier" in found.out and "sent" not in found.out, found.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --server, or a bundle"),
        ((DIGITS, "--submit"), "give --server"),
        ((DIGITS, "--job", "x"), "both say what is measured"),
        (("nowhere",), "not a bundle"),
        ((DIGITS, "--boundaries", "nowhere"), "nowhere"),
        ((DIGITS, "--profile", "quick"), "expected fast or low_memory"),
        ((DIGITS, "--engine", "steam"), "no engine is called 'steam'"),
    ],
)
def test_a_mistake_is_one_line(embrace: Embrace, arguments: tuple[object, ...], words: str) -> None:
    found = embrace("device", "bench", *arguments)
    assert found.code == 2 and words in found.error


def test_measuring_beside_an_agent_is_refused(embrace: Embrace, tmp_path: Path) -> None:
    from edge_runtime.files import sole_user

    with sole_user(tmp_path / "agent.lock", "in use"):
        found = embrace("device", "bench", "--server", "http://127.0.0.1:9", "--token", "x", "--work", tmp_path)
    assert found.code == 2 and "stop it first" in found.error


def test_nothing_to_compare_says_what_to_do() -> None:
    with pytest.raises(InputError, match="device bench --submit"):
        choose([], None, None)
