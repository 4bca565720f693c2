"""The emulated interpreter of `make test-arm64`, and what the tests measured, in a table at the end."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def arm_python() -> Path:
    """Return an interpreter that is an aarch64 one."""
    if platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this machine is an aarch64 one: every other test runs on it as it is")
    found = os.environ.get("EMBRACE_ARM64_PYTHON")
    if not found:
        pytest.skip("needs `make test-arm64`, or EMBRACE_ARM64_PYTHON")
    return Path(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", ()):
        facts = dict(report.user_properties)
        if facts:
            name = report.nodeid.rpartition("::")[2]
            terminalreporter.write_line(f"{name:45} " + ", ".join(f"{key} {value}" for key, value in facts.items()))
