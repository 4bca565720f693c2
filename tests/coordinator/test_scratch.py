"""Temporary folders: an end removes them, and what a kill leaves the next process removes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.scratch import scratch_folder
from tests.coordinator.harness import ROOT

_WAIT = """
import sys, time
from coordinator.scratch import scratch_folder
with scratch_folder("embrace-tried") as folder:
    (folder / "copy").write_text("of something")
    print(folder, flush=True)
    sys.stdin.read()
"""


def start(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _WAIT],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_the_next_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.scratch._YOUNG", -1.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "embrace-tried-other").mkdir()  # not made here: it has no lock
    living, used = start(tmp_path)
    killed, left = start(tmp_path)
    killed.kill()
    killed.communicate()
    assert used.is_dir() and (left / "copy").is_file()
    with scratch_folder("embrace-tried") as own:
        assert not left.exists() and (used / "copy").is_file()
    living.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["embrace-tried-other"] and not own.exists()


def test_one_that_is_new_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may be about to take the lock."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "embrace-tried-new").mkdir()
    (tmp_path / "embrace-tried-new" / "lock").touch()
    with scratch_folder("embrace-tried"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["embrace-tried-new"]
