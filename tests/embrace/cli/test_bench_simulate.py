"""`embrace bench simulate`: a small case runs, contestants train the same, promises are checked."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from bench.processes import family, family_cpu, family_memory
from bench.simulation.meter import Meter
from bench.simulation.speed import SpeedReport, SpeedRow
from embrace.cli.bench import bench
from embrace.cli.bench.simulate import report_of, summary
from tests.waiting import wait_until

CASE = {"devices": 8, "cohort": 4, "steps": 2, "batch": 4, "workers": 2}


def row(contestant: str, seconds: float, memory: int = 100, model: str = "mnist_lr") -> SpeedRow:
    return SpeedRow(contestant, model, [seconds, seconds, 99.0], [seconds], memory, [2.3], 8)


def test_a_small_case_is_measured(tmp_path):
    arguments = [
        "simulate",
        "--models",
        "mnist_lr",
        "--devices",
        "8",
        "--cohort",
        "4",
        "--steps",
        "2",
        "--batch",
        "4",
        "--samples",
        "8",
        "--rounds",
        "2",
        "--json",
        "--plot",
        str(tmp_path / "p.png"),
        "--out",
        str(tmp_path / "r.md"),
    ]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["contestant"] for row in found["rows"]] == ["bare", "embrace"]
    bare, ours = found["rows"]
    assert len(ours["losses"]) == 3
    assert ours["losses"] == pytest.approx(bare["losses"], rel=1e-5), "they do not train the same"
    assert all(row["memory"] > 50_000_000 for row in found["rows"])
    assert all(len(row["seconds"]) == 2 and row["steps_per_second"] > 0 for row in found["rows"])
    assert any("Flower is not compared" in note for note in found["notes"])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "bare PyTorch loop" in (tmp_path / "r.md").read_text()


def test_promises_are_checked_in_their_direction():
    good = SpeedReport(CASE, {}, [row("bare", 1.0), row("embrace", 0.5, 40), row("flower", 2.0, 100)], [])
    assert [(bar.limit, bar.measured, bar.met) for bar in good.bars()] == [(1.9, 2.0, True), (0.5, 0.4, True)]
    bad = SpeedReport(CASE, {}, [row("bare", 1.0), row("embrace", 2.0, 60), row("flower", 2.0, 100)], [])
    assert [(bar.measured, bar.met) for bar in bad.bars()] == [(0.5, False), (0.6, False)]
    assert any("missed" in line for line in report_of(bad).bars)
    assert SpeedReport.from_json(json.loads(json.dumps(summary(bad)))) == bad


def test_devices_of_tiers_have_a_bar_of_their_own():
    mixed = {**CASE, "tiers": {"strong": 16, "weak": 112}}
    found = SpeedReport(mixed, {}, [row("bare", 1.0), row("embrace", 0.25)], [])
    assert [(bar.limit, bar.measured, bar.met) for bar in found.bars()] == [(3.0, 4.0, True)]


def test_tiers_are_run_and_checked():
    sizes = ["--devices", "4", "--cohort", "2", "--steps", "1", "--batch", "4", "--samples", "4", "--rounds", "1"]
    done = CliRunner().invoke(bench, ["simulate", "--models", "digits", *sizes, "--tiers", "strong=1,weak=3", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["case"]["tiers"] == {"strong": 1, "weak": 3}
    done = CliRunner().invoke(bench, ["simulate", *sizes, "--tiers", "strong=1"])
    assert "expected numbers that add up to 4 devices, got 1" in str(done.exception)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_family_has_what_its_members_have():
    own = os.getpid()
    assert own in family(own)
    assert (family_memory(own) or 0) > 1_000_000 and family_cpu(own) > 0


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_the_first_round_counts_for_memory_and_the_others_for_time():
    meter = Meter()
    meter.round()
    before = family_memory(os.getpid())
    large = np.ones(300_000_000, np.uint8)
    wait_until(lambda: meter._watch.most >= before + 200_000_000)
    del large
    for _ in range(2):
        meter.round()
        spent = time.process_time()
        while time.process_time() < spent + 0.05:
            pass
    meter.end()
    assert meter.memory > before + 200_000_000
    assert len(meter.seconds) == len(meter.cpu) == 2 and min(meter.cpu) >= 0.05
    assert sum(meter.cpu) < time.process_time()
