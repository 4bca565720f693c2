"""`embrace job watch`: what it says, how much room it takes, and how it ends."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from embrace.cli.watch import Watched, note_of, rounds_table
from tests.embrace.cli.conftest import Embrace
from tests.live_server import live_server, next_task, zero_update
from tests.stock_python import ROOT
from tests.waiting import PATIENCE, wait_until

SEAT = {"number": 0, "member": {"device": "d0", "boundary": "conv1", "trains": 5}, "state": "leased", "holders": ["d0"]}


def event(kind: str, **body: Any) -> dict[str, Any]:
    return {"kind": kind, "body": body}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (event("WarnLayerUncovered", round=3, layers=["conv1", "conv2"]), "round 3: no device trains conv1, conv2"),
        (
            event("TaskFailed", task="1f2e-4-0-1", device="d0", reason="out_of_memory", message="12 MB are not enough"),
            "round 4: kitchen-pi gave up, out_of_memory: 12 MB are not enough",
        ),
        (event("TaskFailed", task="1f2e-4-0-1", device="d9", reason="full", message=""), "round 4: d9 gave up, full"),
        (
            event("RejectUpdate", round=1, device="d0", reason="late"),
            "round 1: an update of kitchen-pi does not count, late",
        ),
        (event("DeviceUnfit", round=1, device="d0", message="full"), "round 1: kitchen-pi cannot take part: full"),
        (
            event("DeviceBenched", round=1, device="d0", reason="data", seconds=5.0, message="benched for 5 s: data"),
            "round 1: kitchen-pi is benched for 5 s: data",
        ),
        (
            event("CloseFailed", round=2, tries=1, message="ValueError: x"),
            "round 2: it could not be closed (try 1), ValueError: x",
        ),
        (event("WaitForDevices", round=0, count=1), "round 0: waiting for 1 more device"),
        (event("WaitForUpdates", round=2, count=3), "round 2: the deadline is over; waiting for 3 more updates"),
        (event("RoundAbandoned", round=2, reason="no quorum"), "round 2: given up: no quorum"),
        (event("Evaluated", version=5, error="no such file"), "round 4: version 5 could not be scored, no such file"),
    ],
)
def test_events_in_words(told: dict[str, Any], words: str) -> None:
    note = note_of(told, {"d0": "kitchen-pi"})
    assert note is not None and note.text == words


@pytest.mark.parametrize("kind", ["GrantLease", "AcceptUpdate", "CloseRound", "RoundCommitted", "JobState"])
def test_what_the_tables_show_is_no_note(kind: str) -> None:
    assert note_of(event(kind, round=0), {}) is None
    assert note_of(event("Evaluated", version=5, accuracy=0.5), {}) is None


def watched(seats: int, rounds: int) -> Watched:
    """A job in the middle of a round; nobody is asked."""
    found = Watched(None, "1f2e3d4c5b6a7988")  # type: ignore[arg-type]
    member = SEAT["member"]
    slots = [{**SEAT, "number": n, "member": {**member, "device": f"d{n}"}} for n in range(seats)]  # type: ignore[dict-item]
    found.rounds = [
        {
            "number": n,
            "state": "committed",
            "opened_at": 0.0,
            "closed_at": 2.5,
            "summary": {"updates": 4, "samples": 99, "loss": 0.25, "bytes_up": 92_000},
        }
        for n in range(rounds)
    ]
    found.job = {
        "id": "1f2e3d4c5b6a7988",
        "name": "digits",
        "state": "running",
        "version": rounds,
        "message": "",
        "created_at": time.time() - 61,
        "plan": {"num_rounds": 1000},
        "round": {"number": rounds, "body": {"slots": slots}},
        "unfit": {f"d{n}": "no room " * 30 for n in range(9)},
    }
    found.names = {f"d{n}": f"device-with-a-long-name-{n}" for n in range(max(seats, 6))}
    found.scores = {n + 1: {"mean_loss": 0.5, "accuracy": 0.875} for n in range(rounds)}
    found.timings = {"d0": {"wall": 3.0, "download": 0.5, "forward": 0.25, "training": 2.0}}
    for number in range(6):
        found.hear(event("TaskFailed", task=f"j-{rounds - 1}-0-1", device=f"d{number}", reason="failed", message="x"))
    return found


def drawn(found: Watched, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False, highlight=False)
    with console.capture() as screen:
        console.print(found.view(height))
    return screen.get().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (120, 40)])
@pytest.mark.parametrize(("seats", "rounds"), [(0, 1), (4, 3), (4, 500), (512, 3), (512, 500)])
def test_it_fits_on_the_screen(seats: int, rounds: int, width: int, height: int) -> None:
    lines = drawn(watched(seats, rounds), width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert lines[0].startswith("digits 1f2e3d4c5b6a7988: running, ")


def test_the_best_version_and_the_scores_of_devices_are_shown() -> None:
    found = watched(2, 3)
    found.job["best"] = {"version": 2, "metric": "device_accuracy", "value": 0.8125}
    spread = {"min": 0.5, "lower": 0.6, "median": 0.75, "upper": 0.9, "max": 1.0}
    own = {"devices": 4, "counted": 9, "accuracy": 0.75, "mean_loss": 0.5, "spread": {"accuracy": spread}}
    evaluation = {"version": 2, **own, "tiers": {"weak": own, "a\x1b]52;x": own}}
    found.rounds[-1] = {**found.rounds[-1], "summary": {**found.rounds[-1]["summary"], "evaluation": evaluation}}
    for height in (24, 40):
        lines = drawn(found, 160, height)
        assert len(lines) <= height and "best: version 2, device accuracy 81.2%" in lines
        (line,) = [line for line in lines if line.startswith("version 2 on 4 devices")]
        assert "accuracy 75.0% (50.0% to 100.0%, median 75.0%), weak 75.0%, a" in line and "\x1b" not in line


def test_what_is_in_it() -> None:
    text = "\n".join(drawn(watched(2, 3), 120, 40))
    assert "running, 3 of 1000 rounds in 00:01:01" in text
    assert re.search(r"│ 2 +│ committed +│ +4 │ +0.2500 │ +87.5% │ 92.00 kB │ +2.5 │", text)
    assert re.search(r"│ device-with-a-long-… │ conv1 │ leased │ +0.50 │ +0.25 │ +2.00 │ +0.25 │", text)
    assert re.search(r"│ device-with-a-long-… │ conv1 │ leased │ +– │", text)
    assert "not shown" not in text and "not shown: 49" in "\n".join(drawn(watched(512, 3), 120, 40))


def test_a_device_that_cannot_take_part_is_on_the_screen_for_as_long_as_that_is_so() -> None:
    found = watched(2, 3)
    found.job["unfit"] = {"d5": "no tier named 'giant'"}
    found.hear(event("DeviceUnfit", round=0, device="d4", message="which was mended since"))
    text = "\n".join(drawn(found, 120, 40))
    assert "device-with-a-long-name-5 cannot take part: no tier named 'giant'" in text and "mended" not in text


def test_a_failure_says_why() -> None:
    found = watched(1, 1)
    found.job |= {"state": "failed", "message": "round 1 had no quorum"}
    assert drawn(found, 80, 24)[1] == "round 1 had no quorum"


def test_without_scores_there_is_no_column_for_them() -> None:
    console = Console(width=160)
    with console.capture() as screen:
        console.print(rounds_table(watched(1, 1).rounds, {}, samples=True))
    assert "accuracy" not in screen.get() and "samples" in screen.get()


def work(device: httpx.Client, rounds: int, layer: int = 0) -> None:
    for _ in range(rounds):
        task = next_task(device, 20)["id"]
        told = {"Embrace-Report": '{"samples": 10, "loss": 1.5}'}
        assert device.put(f"/v1/tasks/{task}/update", content=zero_update(layer), headers=told).status_code == 201


def test_lines_for_a_pipe(embrace: Embrace, tmp_path: Path) -> None:
    with live_server(tmp_path / "server") as server:
        job = server.create_job(tmp_path / "bundle", num_rounds=2)
        work(server.enrol("weakling", tier="weak"), 2, layer=1)
        answer = embrace("job", "watch", job, "--server", server.url, "--token", server.admin)
    lines = answer.out.splitlines()
    assert answer.code == 0 and "round 0: no device trains first" in lines and lines[-1] == "done, version 2"
    assert "round 1: 1 updates, training loss 1.5000, 236 B received" in lines


def test_a_score_that_cannot_be_had_is_told_until_the_end(embrace: Embrace, tmp_path: Path) -> None:
    """Scoring takes longer than the job."""
    (tmp_path / "noise.npz").write_bytes(b"noise")
    with live_server(tmp_path / "server", "--evaluation-data", str(tmp_path)) as server:
        job = server.create_job(tmp_path / "bundle", num_rounds=2, evaluate={"data": "coordinator:noise.npz"})
        work(server.enrol("quick"), 2)
        lines = embrace("job", "watch", job, "--server", server.url, "--token", server.admin).out.splitlines()
    for number in range(2):
        why = f"version {number + 1} could not be scored, {tmp_path / 'noise.npz'} is no .npz file that can be read"
        assert any(line.startswith(f"round {number}: {why}") for line in lines), lines
    assert lines[-1] == "done, version 2" and not any(line.startswith("version ") for line in lines)


def test_a_job_that_fails(embrace: Embrace, tmp_path: Path) -> None:
    with live_server(tmp_path / "server") as server:
        rule = {"deadline": 0.5, "on_missing_quorum": "fail"}
        job = server.create_job(tmp_path / "bundle", num_rounds=2, participate=rule)
        next_task(server.enrol("sleeper"))
        answer = embrace("job", "watch", job, "--server", server.url, "--token", server.admin)
    assert answer.code == 1 and answer.out.splitlines()[-1].startswith("failed, version 0: ")


def test_the_live_view_outlives_the_coordinator(tmp_path: Path) -> None:
    """On a terminal of its own: the coordinator is killed and started again, the job goes on, the view ends with it."""
    with live_server(tmp_path / "server", "--port", "0") as server:
        job = server.create_job(tmp_path / "bundle", num_rounds=2)
        device = server.enrol("patient")
        port = str(server.address[1])
        screen = Screen("job", "watch", job, "--server", server.url, "--token", server.admin)
        work(device, 1)
        screen.wait_for("1 of 2 rounds")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        screen.wait_for("cannot be reached")
        again = subprocess.Popen(
            [sys.executable, "-m", "embrace", "serve", "--data", str(tmp_path / "server" / "data"), "--port", port],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: _is_ready(server.url))
            work(device, 1)
            assert screen.end() == 0 and "2 of 2 rounds" in screen.text
        finally:
            screen.process.kill()
            again.terminate()
            again.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


class Screen:
    """The command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._mine, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "embrace", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)  # it does not outlive a test that fails
        self._reader.start()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._mine], [], [], 0.2)
            try:
                self.text += os.read(self._mine, 65536).decode(errors="replace") if ready else ""
            except OSError:  # the other end is closed
                return
            if self.process.poll() is not None and not ready:
                return

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text or self.process.poll() is not None, lambda: self.text[-3000:])
        assert text in self.text, self.text[-3000:]

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        os.close(self._mine)
        return code
