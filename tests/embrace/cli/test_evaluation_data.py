"""`embrace job create` reads evaluation data on the user's machine and sends numbers: no path, no code."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import numpy as np

from embrace.client import Client
from embrace.jobs import Job
from tests.embrace.cli.conftest import Embrace
from tests.live_server import live_server, make_bundle

X = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
Y = np.array([0, 1, 2, 0, 1])


def test_data_of_any_form_travels_once(embrace: Embrace, tmp_path: Path) -> None:
    make_bundle(tmp_path / "small")
    np.savez(tmp_path / "test.npz", x=X, y=Y)
    rows = ["a,b,c,d,label", *(",".join(map(repr, map(float, row))) + f",{label}" for row, label in zip(X, Y))]
    (tmp_path / "test.csv").write_text("\n".join(rows) + "\n")
    code = """
        import os
        from pathlib import Path

        import numpy as np


        def load():
            here = Path(__file__).parent
            (here / "ran").write_text(str(os.getpid()))
            found = np.load(here / "test.npz")
            return found["x"], found["y"]
        """
    (tmp_path / "mine.py").write_text(dedent(code))
    with live_server(tmp_path / "server") as server:
        options = ("--server", server.url, "--token", server.admin)
        for data in ("test.npz", "test.csv", "mine.py:load"):
            (tmp_path / "job.toml").write_text(f"bundle = 'small'\n[evaluate]\ndata = '{data}'\n")
            answer = embrace("job", "create", tmp_path / "job.toml", *options)
            assert answer.code == 0, answer.error
        with Client(server.url, server.admin) as client:
            client.create(Job(tmp_path / "small"), evaluation_data=(X, Y))
            references = {job["plan"]["evaluate"]["data"] for job in client.jobs()}
            (known,) = client.call("GET", "/evaluation-data")
        sent = [line for line in server.lines if "PUT" in str(line) and "evaluation-data" in str(line)]
        puts = [line for line in server.lines if "/files/manifest.json" in str(line)]
    assert references == {f"sha256:{known['sha256']}"}, "the same numbers are the same data"
    assert len(sent) == 1 and len(puts) == 1, "what is there is not sent again"
    assert (tmp_path / "ran").exists() and int((tmp_path / "ran").read_text()) != server.process.pid


def test_data_that_does_not_fit_is_found_before_anything_is_sent(embrace: Embrace, tmp_path: Path) -> None:
    make_bundle(tmp_path / "small")
    np.savez(tmp_path / "test.npz", x=X, y=Y + 2)
    (tmp_path / "job.toml").write_text("bundle = 'small'\n[evaluate]\ndata = 'test.npz'\n")
    answer = embrace("job", "create", tmp_path / "job.toml", "--server", "http://127.0.0.1:1", "--token", "x" * 20)
    assert answer.code == 2 and answer.error.startswith("evaluate.data: ") and "label 3" in answer.error


def test_data_that_is_too_large_is_refused_in_one_line(embrace: Embrace, tmp_path: Path) -> None:
    make_bundle(tmp_path / "small")
    np.savez(tmp_path / "test.npz", x=np.zeros((1 << 20, 4), np.float32), y=np.zeros(1 << 20, np.int64))  # 24 MiB
    (tmp_path / "job.toml").write_text("bundle = 'small'\n[evaluate]\ndata = 'test.npz'\n")
    with live_server(tmp_path / "server", evaluation_bytes=1 << 20) as server:
        answer = embrace("job", "create", tmp_path / "job.toml", "--server", server.url, "--token", server.admin)
    assert answer.code == 2 and answer.error.startswith("evaluate.data: the body is announced with"), answer.error
    assert answer.error.endswith("expected at most 1048576")
