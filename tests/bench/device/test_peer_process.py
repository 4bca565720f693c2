"""A peer that dies or hangs costs its own figures only. The peers here are real processes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embrace as public
from bench.device import step as bench
from bench.device.peers import process
from edge_runtime.bundle_files import read_manifest
from federation.errors import EmbraceError

X, LABELS = np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64)
ANSWER = json.dumps({"cpu": 2.0, "wall": 3.0})
HEAD = "import os, signal, sys, time\nprint('{\"loss\": 1.0}', flush=True)\n"
STEPS = (
    f"for number, _ in enumerate(sys.stdin):\n    if number == 2:\n        BREAK\n    print('{ANSWER}', flush=True)\n"
)
KILL = "os.kill(os.getpid(), signal.SIGKILL)"

# Name of a way to fail in the third step, what it does there, and what is said of it.
BREAKS = {
    "killed": (KILL, "its process was ended by signal 9"),
    "exits": ("sys.exit('first line\\nno memory left')", "no memory left"),
    "exits silently": ("sys.exit(0)", "its process ended without a message"),
    "raises": ("raise ValueError('a shape')", "ValueError: a shape"),
    "half an answer": (f"print('{ANSWER[:5]}', end='', flush=True); {KILL}", "its process was ended by signal 9"),
    "hangs": ("time.sleep(600)", "its process gave no answer within 1 seconds"),
    "closes its output": ("os.close(1); time.sleep(600)", "its process gave no answer within 1 seconds"),
    "prints for ever": ("\n        while True: print('noise')", "its process gave no answer within 1 seconds"),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return public.export("digits", tmp_path_factory.mktemp("bundle") / "digits").path


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test writes the script of a peer."""
    monkeypatch.setattr(process, "environment", lambda name: Path(sys.executable))
    monkeypatch.setattr(process, "SCRIPTS", tmp_path)
    return tmp_path


@pytest.fixture
def peer(bundle: Path, scripts: Path) -> Iterator[process.PeerStep]:
    manifest = read_manifest(bundle)
    peer = process.PeerStep("jax", bundle, manifest, manifest.boundaries[0], 1)
    yield peer
    peer.close()


def write(scripts: Path, name: str, broken: str) -> None:
    (scripts / f"{name}_step.py").write_text(HEAD + STEPS.replace("BREAK", broken))


@pytest.mark.parametrize("way", BREAKS)
def test_it_says_how_it_ended(peer: process.PeerStep, scripts: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    broken, said = BREAKS[way]
    write(scripts, "jax", broken)
    assert peer.start(X, LABELS) == 1.0
    assert [peer(), peer()] == [2.0, 2.0]
    monkeypatch.setattr(process, "SECONDS", 1 if "1 seconds" in said else 60)
    with pytest.raises(EmbraceError) as caught:
        peer()
    assert str(caught.value) == said


def test_one_that_has_ended_before_a_step_says_so(peer: process.PeerStep, scripts: Path) -> None:
    (scripts / "jax_step.py").write_text(HEAD + "print('not enough', file=sys.stderr)")
    peer.start(X, LABELS)
    assert peer._process is not None
    peer._process.wait()
    for _ in range(2):
        with pytest.raises(EmbraceError, match="not enough"):
            peer()


def test_a_great_deal_on_stderr_does_not_block_it(peer: process.PeerStep, scripts: Path) -> None:
    write(scripts, "jax", "sys.stderr.write('x' * 1_000_000 + '\\n'); sys.stderr.flush()")
    peer.start(X, LABELS)
    assert [peer() for _ in range(4)] == [2.0] * 4


def test_one_that_cannot_be_started_says_so(bundle: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "environment", lambda name: scripts / "gone" / "python")
    manifest = read_manifest(bundle)
    peer = process.PeerStep("jax", bundle, manifest, manifest.boundaries[0], 1)
    with pytest.raises(EmbraceError, match="cannot be started"):
        peer.start(X, LABELS)
    peer.close()


def test_the_others_are_timed_on(bundle: Path, scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed in its third step, one has ended before the first; all others keep every round."""
    monkeypatch.setattr(bench, "TOLERANCE", math.inf)  # the losses of these peers are made up
    write(scripts, "jax", KILL)
    (scripts / "mnn_step.py").write_text(HEAD)
    report = bench.bench_step(str(bundle), batch=2, boundaries="conv1,dense", rounds=4, peers=["jax", "mnn"])
    assert [timing.boundary for timing in report.timings] == ["conv1", "dense"]
    for timing in report.timings:
        assert "portable" in timing.rounds and not {"jax", "mnn"} & timing.rounds.keys()
        assert {len(rounds) for rounds in timing.rounds.values()} == {4}
        place = f"so it is not timed at {timing.boundary} of digits, batch 2"
        assert f"jax: its process was ended by signal 9; {place}" in report.notes
        assert f"mnn: its process ended without a message; {place}" in report.notes


def test_a_mistake_of_our_own_is_not_kept_quiet(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise EmbraceError("ours")

    monkeypatch.setattr(bench, "_timed", fails)
    with pytest.raises(EmbraceError, match="ours"):
        bench.bench_step(str(bundle), batch=2, boundaries="dense", rounds=1, peers=[])
