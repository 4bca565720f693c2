"""`embrace demo`: real processes that learn something together, end by themselves, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embrace.cli.conftest import heed_interruptions
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[3]
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")

# Loaded by every Python process of the demo: what it must not need is not there, and asking for it is written down.
BLOCKER = """
import sys

with open({file!r}, "a") as file:
    file.write("process\\n")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "sklearn", "matplotlib"):
            with open({file!r}, "a") as file:
                file.write(name + "\\n")
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


class Demo:
    """The command in a process of its own, with a directory for temporary files of its own."""

    def __init__(self, place: Path) -> None:
        self.temporary = place / "tmp"
        self.temporary.mkdir()
        self.wanted = place / "wanted.txt"
        (place / "path").mkdir()
        (place / "path" / "sitecustomize.py").write_text(BLOCKER.format(file=str(self.wanted)))
        path = os.pathsep.join((str(place / "path"), str(ROOT)))
        self._environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": path, "EMBRACE_PORT": "1"}
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "embrace", "demo", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._environment,
            start_new_session=True,
            preexec_fn=heed_interruptions,
        )
        return self.process

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    @property
    def directory(self) -> Path:
        return next(self.temporary.iterdir())

    def children(self) -> dict[int, str]:
        """Process ids of what the demo started, and their command lines."""
        assert self.process is not None
        numbers = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {int(n): Path(f"/proc/{n}/cmdline").read_text().replace("\0", " ") for n in numbers}

    def wait_for_a_report(self, name: str) -> None:
        wait_until(lambda: any(file.stat().st_size for file in self.temporary.glob(f"*/{name}.out")))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    made = Demo(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.terminate()  # it ends its children
        made.process.communicate(timeout=PATIENCE)


def test_a_fleet_learns_together_without_torch(demo: Demo) -> None:
    demo.start("--rounds", 6, "--json")
    code, out, err = demo.end()
    assert (code, err) == (0, "")
    assert list(demo.temporary.iterdir()) == []
    assert demo.wanted.read_text().split() == ["process"] * 6  # the demo, the coordinator, four agents; no import
    found = json.loads(out)
    assert [row["round"] for row in found["rounds"]] == [0, 1, 2, 3, 4, 5, 6]
    accuracy = [row["accuracy"] for row in found["rounds"]]
    assert accuracy[0] < 0.2 < 0.85 < accuracy[-1]
    devices = {row["name"]: row for row in found["devices"]}
    assert list(devices) == ["strong", "moderate", "weak-1", "weak-2"]
    assert [row["boundary"] for row in devices.values()] == ["conv1", "conv3", "dense", "dense"]
    assert devices["weak-1"]["layers"] == ["dense", "classifier"]
    for row in devices.values():
        assert row["rounds"] * 4 * row["trained"] <= row["sent"] <= row["received"]  # batch-norm statistics come on top
        assert row["process_peak"] is None or row["process_peak"] < row["budget"]
        assert row["seconds"]["training"] > 0 and row["seconds"]["wall"] < found["seconds"]
        assert sum(row["classes"]) == row["samples"]
    assert max(devices["weak-1"]["alone"], devices["weak-2"]["alone"]) < 0.7
    # One device is killed in the middle, and the rounds go on with the others.
    killed = devices.pop("weak-2")
    assert killed["ended"].startswith("killed in round ") and 2 <= killed["rounds"] < 6
    assert found["notes"][0] == f"weak-2 is {killed['ended'].replace('killed', 'killed (kill -9)')}"
    assert found["rounds"][-1]["updates"] <= 3 and [row["ended"] for row in devices.values()] == [""] * 3
    updates = sum(row["updates"] for row in found["rounds"]) - sum(row["rounds"] for row in devices.values())
    assert 0 <= updates - killed["rounds"] <= 1, "an update may have arrived that the device could not tell of any more"


def test_the_printed_demo_shows_rounds_and_tables(demo: Demo, tmp_path: Path) -> None:
    demo.start("--rounds", 2, "--keep", tmp_path / "kept")
    code, out, err = demo.end()
    assert (code, err) == (0, "")
    for text in ("untrained: accuracy", "round  2 of 2: accuracy", "who trained what", "2 of 5"):
        assert text in out
    for text in ("seconds of all rounds", "frozen layers", "held-out", "Together the devices reach", "Done in"):
        assert text in out
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {"job.toml", "coordinator.log", "weak-2.log", "strong.out", "version-2.safetensors"} <= kept
    demo.start("--keep", tmp_path / "kept")
    code, out, err = demo.end()
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


@needs_proc
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_process_and_no_file(demo: Demo, number: signal.Signals, expected: int) -> None:
    process = demo.start("--rounds", 1000)
    demo.wait_for_a_report("weak-2")
    children = demo.children()
    assert len(children) == 5
    process.send_signal(number)
    code, _, err = demo.end()
    assert code == expected and "Traceback" not in err
    assert [pid for pid in children if is_running(pid)] == []
    assert list(demo.temporary.iterdir()) == []


@needs_proc
@pytest.mark.slow  # it may wait until the round is late
def test_the_fleet_goes_on_without_an_agent_that_ends_by_itself(demo: Demo) -> None:
    demo.start("--rounds", 9, "--json")
    demo.wait_for_a_report("moderate")
    os.kill(next(pid for pid, line in demo.children().items() if "--name moderate" in line), signal.SIGKILL)
    code, out, err = demo.end()
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["rounds"][-1]["updates"] == 2 and found["rounds"][-1]["accuracy"] > 0.6
    assert "moderate was ended by SIGKILL; the others go on" in found["notes"]
    assert found["devices"][1]["ended"] == "moderate was ended by SIGKILL"
    assert list(demo.temporary.iterdir()) == []


@needs_proc
def test_the_end_of_the_coordinator_is_one_line_that_names_its_log(demo: Demo) -> None:
    demo.start("--rounds", 1000)
    demo.wait_for_a_report("strong")
    children = demo.children()
    os.kill(next(pid for pid, line in children.items() if " serve " in line), signal.SIGKILL)
    code, _, err = demo.end()
    assert code == 1 and err.startswith("error: coordinator was ended by SIGKILL") and err.count("\n") == 1
    assert Path(err.rpartition("its log is ")[2].strip()).is_file()
    assert [pid for pid in children if is_running(pid)] == []
