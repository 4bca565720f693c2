"""What Windows and macOS do differently: their classes, with the calls of those systems answered by stand-ins."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_runtime import files, machine, memory
from edge_runtime.bundle_files import read_manifest
from edge_runtime.memory import PeakMeter, available_memory, current_memory
from edge_runtime.state_file import load_state, save_state
from edge_runtime.system import Linux, MacOS, Windows, this_system
from edge_runtime.trial import Conditions, attempt
from federation.errors import InputError
from federation.manifest import MANIFEST_NAME
from tests.stock_python import ROOT
from tests.two_devices import BUNDLE, EMBRACE, PATIENCE, train, write_data
from tests.without_posix import in_use, windows

MB = 1 << 20
WITHOUT_POSIX = (sys.executable, "-m", "tests.without_posix")
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               12345.
Pages active:                            345678.
Pages inactive:                          234567.
Pages speculative:                         1234.
Pages throttled:                              0.
"Translation faults":                 987654321.
"""


@pytest.fixture
def no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STATUS", "_STATM", "_CLEAR"):
        monkeypatch.setattr(memory, name, Path("no/proc/here"))


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch, no_proc: None) -> Windows:
    """Windows with 300 MB resident, 200 of them private, and room for 700 MB more."""
    here = windows(300 * MB, 400 * MB, 200 * MB, 700 * MB, 900 * MB)
    for module in (files, memory):
        monkeypatch.setattr(module, "HERE", here)
    return here


def test_a_job_on_a_system_without_posix_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Server and devices; SCAFFOLD, because its devices keep files that the next round replaces."""
    write_data(tmp_path)
    expected, _ = train(
        tmp_path / "posix", tmp_path, 3, dict.fromkeys(("desk", "board"), EMBRACE), algorithm="scaffold"
    )
    found, reports = train(
        tmp_path / "other",
        tmp_path,
        3,
        dict.fromkeys(("desk", "board"), WITHOUT_POSIX),
        WITHOUT_POSIX,
        algorithm="scaffold",
    )
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()
    assert all(report["lost_state"] is False for told in reports.values() for report in told)
    assert all(report["memory"]["anonymous"] == 0 for told in reports.values() for report in told), "counted by /proc"


@pytest.mark.slow
def test_the_demo_runs_on_a_system_without_posix() -> None:
    """Its coordinator and its agents, too; one of them is killed on the way."""
    command = [*WITHOUT_POSIX, "demo", "--rounds", "3", "--json"]
    found = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert [row["round"] for row in told["rounds"]] == [0, 1, 2, 3]
    assert told["rounds"][-1]["accuracy"] > told["rounds"][0]["accuracy"]


def test_a_lock_of_windows_keeps_other_processes_out(on_windows: Windows, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from edge_runtime import files
from federation.errors import InputError
from tests.without_posix import in_use, windows
files.HERE = windows(0, 0, 0, 0, 0)
try:
    with files.sole_user(Path(sys.argv[1]), "in use"):
        print("mine")
except InputError as error:
    print(error)
"""

    def other() -> str:
        command = [sys.executable, "-c", program, str(tmp_path / "lock")]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()

    with files.sole_user(tmp_path / "lock", "in use"):
        assert other() == f"in use, process {os.getpid()}"
    assert other() == "mine"


def test_kept_state_is_replaced_and_removed_on_windows(on_windows: Windows, tmp_path: Path) -> None:
    """A map would keep the file from being replaced; so nothing is mapped."""
    file, first = tmp_path / "state", np.arange(5, dtype=np.float32)
    save_state(file, {"a": first, "none": first[:0]}, {})
    vectors, _ = load_state(file)
    save_state(file, {"a": first + 1, "none": first[:0]}, {})
    assert not any(isinstance(vector, np.memmap) for vector in vectors.values())
    assert vectors["a"].tolist() == first.tolist()
    assert load_state(file)[0]["a"].tolist() == (first + 1).tolist()
    assert not in_use(file)


def test_what_is_in_use_stays_for_later_on_windows(on_windows: Windows, tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "in use")

    file = tmp_path / "3.safetensors"
    file.touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        files.remove(file)
        patch.setattr(files, "HERE", Linux())
        with pytest.raises(PermissionError):
            files.remove(file)
    files.remove(file)
    files.remove(file)
    assert not file.exists()


def test_memory_on_windows(on_windows: Windows) -> None:
    assert current_memory() == memory.Memory(300 * MB, 200 * MB, 100 * MB, 400 * MB)
    assert on_windows.free_memory() == (700 * MB, "free memory of the machine")
    with PeakMeter() as meter:
        on_windows.kernel32 = windows(340 * MB, 450 * MB, 220 * MB, 0, 0).kernel32
    assert meter.peak == memory.Peak(anonymous=20 * MB, file_backed=20 * MB, total=150 * MB)


class Mach:
    """task_info as <mach/task_info.h> lays its answer out, written down here once more."""

    def __init__(self, **sizes: int) -> None:
        names = ("resident", "resident_peak", "device", "device_peak", "internal", "internal_peak", "external")
        names += ("external_peak", *(f"other{number}" for number in range(5)), "compressed", *"ab", "footprint")
        self.answer = struct.pack("<Qii17Q", 1 << 40, 99, 16384, *(sizes.get(name, 0) for name in names))
        self.result = 0

    def mach_task_self(self) -> int:
        return 259

    def task_info(self, task: int, flavour: int, answer: Any, count: Any) -> int:
        assert (task, flavour) == (259, 22)
        assert ctypes.string_at(count, 4) == struct.pack("<I", len(self.answer) // 4)
        ctypes.memmove(answer, self.answer, len(self.answer))
        return self.result


def test_memory_on_macos(no_proc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mach = Mach(resident=300, resident_peak=500, internal=180, external=90, compressed=40)
    monkeypatch.setattr(memory, "HERE", MacOS(mach))
    assert current_memory() == memory.Memory(resident=300, anonymous=220, file_backed=90, peak=500)
    mach.result = 4
    assert current_memory() is None


def test_free_memory_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "vm_stat"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{VM_STAT}END\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert MacOS(Mach()).free_memory() == ((12345 + 234567 + 1234) * 16384, "free memory of the machine")
    script.write_text("#!/bin/sh\nexit 1\n")
    assert MacOS(Mach()).free_memory() is None


def test_free_memory_is_asked_of_the_system_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HERE", SimpleNamespace(free_memory=lambda: (5, "a test")))
    monkeypatch.setattr(memory, "Path", lambda name: Path("no/proc/here") / name.lstrip("/"))
    assert available_memory() == (5, "a test")


def test_holes_are_left_to_systems_that_have_them(tmp_path: Path) -> None:
    """The blocks stay; the numbers, too."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 64)
    with file.open("r+b") as opened:
        for here in (MacOS(Mach()), windows(0, 0, 0, 0, 0), Linux(SimpleNamespace())):
            here.punch_hole(opened.fileno(), 0, 4096)
    assert file.read_bytes() == bytes(range(256)) * 64


def test_each_platform_has_its_class() -> None:
    assert type(this_system("linux")) is type(this_system("android")) is Linux
    assert type(this_system("darwin")) is MacOS
    with pytest.raises((OSError, InputError, ModuleNotFoundError)):  # there is no kernel32 to load here
        this_system("win32")


def test_a_group_of_processes_ends_whole(tmp_path: Path) -> None:
    """A process in a group of its own, and one that it started: both are gone."""
    here = this_system()
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **here.own_group
    ) as process:
        assert os.getpgid(process.pid) != os.getpgid(0)
        here.end_group(process.pid)
        assert process.stdout is not None and process.stdout.read() == b""  # the end of it: no process has it any more
        here.end_group(process.pid)
    assert process.returncode == -9


def test_a_group_of_processes_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    script = tmp_path / "taskkill"
    script.write_text(f'#!/bin/sh\necho "$@" > {said}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Windows.own_group == {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
    windows(0, 0, 0, 0, 0).end_group(4711)
    assert said.read_text().split() == ["/F", "/T", "/PID", "4711"]


def test_the_processor_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "sysctl"
    script.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M2"\n')
    script.chmod(0o755)
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.describe_device()["processor"] == "Apple M2"
    script.unlink()
    assert machine.describe_device()["processor"]


def test_a_screen_that_lacks_letters_gets_others() -> None:
    """As a pipe on Windows, whose encoding has a few hundred letters."""
    command = [*EMBRACE, "inspect", str(ROOT / "embrace" / "demo" / "digits" / "model")]
    own = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run(command, env=own, capture_output=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    assert b"1?8?8" in found.stdout


def test_a_trial_in_a_fresh_process_needs_the_training_graph_alone(tmp_path: Path) -> None:
    """An agent without fork (and one that has trained before) tries a bundle whose layers and weights come later."""
    whole = read_manifest(BUNDLE)
    boundary = whole.boundary(whole.tiers["weak"])
    assert boundary.train is not None
    for name in (MANIFEST_NAME, boundary.train.name):
        shutil.copyfile(BUNDLE / name, tmp_path / name)
    found = attempt(Conditions(tmp_path, whole, batch=4), boundary, "portable")
    assert found.anonymous > 0 and found.step_seconds > 0
