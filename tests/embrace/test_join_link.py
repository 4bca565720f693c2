"""The link that `embrace serve` prints for browsers, and its QR code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from embrace.join_link import describe_link, join_link, qr_code
from tests.live_server import live_server
from tests.stock_python import ROOT

LINK = "https://coordinator.example:8470/join#embrace_enrol_Zw9"


def test_a_coordinator_prints_a_link_that_it_serves(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        found = re.search(r"joins with.*: (\S+)/join#(\S+)", server.printed)
        assert found and found.groups() == (server.url, server.enrolment)
        answer = httpx.get(join_link(*found.groups()))
        assert answer.status_code in (200, 503)  # 503: the page was not built, and the answer says how
        assert "embrace_enrol" not in server.log  # the fragment does not travel
        assert "phones need https: --tls auto" in server.printed
    assert "█" not in server.printed and "▀" not in server.printed  # a QR code is for terminals


def test_the_link_has_the_address_that_devices_see(tmp_path: Path) -> None:
    data = tmp_path / "data"
    options = ("--data", str(data), "--port", "0", "--public-url", "https://fleet.example")
    command = [sys.executable, "-m", "embrace", "serve", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        printed = "".join(iter(process.stdout.readline, "coordinator: https://fleet.example\n"))
        process.kill()
    assert re.search(r"joins with.*: https://fleet\.example/join#embrace_enrol_", printed.replace("\n", ""))
    assert "phones need https" not in printed


@pytest.mark.parametrize("built", [True, False])
def test_the_line_says_when_the_page_is_not_built(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.api.pages.is_built", lambda: built)
    line = describe_link("https://coordinator.example:8470", "embrace_enrol_Zw9")
    assert line.endswith(LINK) and ("make web" in line) is not built


def test_a_qr_code_is_square_and_without_the_package_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "segno", None)
        assert qr_code(LINK) == ""
    pytest.importorskip("segno")
    rows = qr_code(LINK).splitlines()
    assert len({len(row) for row in rows}) == 1
    assert abs(2 * len(rows) - len(rows[0])) <= 1  # a character is two modules high
