"""`embrace bench latency`: what is measured and reported; never how long it took."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.embrace.cli.conftest import heed_interruptions
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[3]
SUMS = {"iteration": ("activation_io", "step", "optimiser"), "with_forward": ("frozen_forward", "iteration")}

# Found by every Python that starts with its folder in PYTHONPATH: what a device does not have cannot be imported.
DEVICE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "matplotlib", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def device(tmp_path: Path) -> dict[str, str]:
    """The environment of a process on a device, its temporary files in a folder of the test."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(DEVICE)
    (tmp_path / "temporary").mkdir()
    path = os.pathsep.join([str(tmp_path / "python"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "temporary")}


def on_device(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "embrace", "bench", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One real run of everything, report and picture included."""
    from tests.embrace.cli.conftest import run

    folder = tmp_path_factory.mktemp("latency")
    options = (
        "--iterations",
        2,
        "--batch",
        4,
        "--engine",
        "portable",
        "--stored-as",
        "float16",
        "--no-agents",
        "--json",
    )
    answer = run("bench", "latency", "digits", *options, "--plot", folder / "a.png", "--out", folder / "a.md")
    assert (answer.code, answer.err) == (0, "")
    return {"facts": answer.json, "folder": folder}


def test_every_tier_by_both_methods(measured: dict[str, Any]) -> None:
    facts = measured["facts"]
    assert (facts["model"], facts["batch"], facts["threads"], facts["iterations"]) == ("digits", 4, 1, 2)
    assert (facts["stored_as"], facts["published"], facts["notes"]) == ("float16", [], [])
    assert [(case["tier"], case["method"], case["model"], case["boundary"]) for case in facts["cases"]] == [
        ("strong", "whole model", "digits", "conv1"),
        ("moderate", "EmbracingFL", "digits", "conv3"),
        ("moderate", "width reduction", "digits@0.45", "conv1"),
        ("weak", "EmbracingFL", "digits", "dense"),
        ("weak", "width reduction", "digits@0.2", "conv1"),
    ]
    for case in facts["cases"]:
        assert len(case["processes"]) == 2 and case["memory"] > 0 and case["load"] > 0
        assert 0 < case["forward_share"] < 1
        times = case["milliseconds"]
        frozen = case["method"] == "EmbracingFL"
        for part in ("frozen_forward", "activation_io"):
            assert all((value > 0) == frozen for value in times[part]["all"])
        for part in ("training_forward", "backward", "optimiser"):
            assert all(value > 0 for value in times[part]["all"])


def test_figures_follow_from_the_iterations(measured: dict[str, Any]) -> None:
    cases = measured["facts"]["cases"]
    for case in cases:
        times = case["milliseconds"]
        raw = [1e3 * value for process in case["processes"] for value in process["training"]]
        assert times["step"]["all"] == pytest.approx(raw) and len(raw) == 2
        for part, found in times.items():
            assert found["median"] == pytest.approx(statistics.median(found["all"])), part
            assert found["quartiles"][0] <= found["median"] <= found["quartiles"][1]
        for total, parts in SUMS.items():
            sums = [sum(values) for values in zip(*(times[part]["all"] for part in parts))]
            assert times[total]["all"] == pytest.approx(sums)
        for part in ("step", "iteration", "with_forward"):
            strong = cases[0]["milliseconds"][part]["median"]
            assert case["relative"][part] == pytest.approx(times[part]["median"] / strong)
        assert case["relative"]["memory"] == pytest.approx(case["memory"] / cases[0]["memory"])


def test_promises_are_compared_with_what_was_measured(measured: dict[str, Any]) -> None:
    bars = {bar["what"]: bar for bar in measured["facts"]["bars"]}
    weak = measured["facts"]["cases"][3]["relative"]
    assert bars["weak step / strong step"]["measured"] == weak["step"]
    assert bars["weak iteration / strong iteration"]["measured"] == weak["iteration"]
    assert all(bar["met"] == (bar["measured"] <= bar["limit"]) for bar in bars.values())
    text = (measured["folder"] / "a.md").read_text()
    assert text.count(": met\n") + text.count(": missed\n") == len(bars) == 3


def test_report_and_picture(measured: dict[str, Any]) -> None:
    text = (measured["folder"] / "a.md").read_text()
    assert text.startswith("# digits: one training iteration, batch 4, 1 thread, activations stored as float16\n")
    assert "![milliseconds of one iteration, part by part](a.png)" in text
    assert "- processor: " in text and os.uname().nodename not in text
    for case in measured["facts"]["cases"]:
        assert f"| {case['tier']} | {case['method']} |" in text
    height, width, _ = imread(measured["folder"] / "a.png").shape
    assert width > 800 and height > 300


def test_what_agents_took_has_a_column(measured: dict[str, Any]) -> None:
    from bench.device.latency import LatencyReport
    from embrace.cli.bench.latency import report_of

    facts = measured["facts"]
    told = [{**case, "agent": 10**7 * (number + 1)} for number, case in enumerate(facts["cases"])]
    shares = report_of(LatencyReport.from_json({**facts, "cases": told})).tables[1]
    place = shares.columns.index("agent MB")
    assert [row[place] for row in shares.rows][:2] == ["10.0", "20.0"]
    older = [{key: value for key, value in case.items() if key != "agent"} for case in facts["cases"]]
    shares = report_of(LatencyReport.from_json({**facts, "cases": older})).tables[1]
    assert {row[place] for row in shares.rows} == {"–"}


def test_frozen_layers_in_8_bits_are_said_to_be(embrace: Any, digits: Path) -> None:
    options = ("--iterations", 1, "--batch", 8, "--engine", "portable", "--no-agents", "--frozen", "int8")
    answer = embrace("bench", "latency", digits, *options, "--json")
    assert (answer.code, answer.json["frozen"]) == (0, "int8")
    weak = next(case for case in answer.json["cases"] if case["tier"] == "weak")
    assert weak["milliseconds"]["frozen_forward"]["median"] > 0
    refused = embrace("bench", "latency", digits, "--frozen", "int4")
    assert refused.code == 2 and "frozen: expected float32 or int8, got 'int4'" in refused.error


def test_a_device_measures_a_bundle_without_pytorch(digits: Path, device: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    options = ("--iterations", 1, "--batch", 2, "--engine", "portable", "--narrow", f"weak={digits}", "--no-agents")
    answer = on_device(device, "latency", digits, *options, "--out", out)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "width reduction" in answer.stdout and "weak step / strong step" in answer.stdout
    assert "| strong | whole model |" in out.read_text()
    assert list((tmp_path / "temporary").iterdir()) == []
    refused = on_device(device, "latency", digits, *options, "--plot", tmp_path / "a.png")
    assert refused.returncode == 3 and "pip install 'embrace-fl[bench]'" in refused.stderr
    assert on_device(device, "latency", "digits").returncode == 3  # exporting needs PyTorch


def measures(pid: int) -> bool:
    """Whether a child of a process has loaded the runtime."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any("onnxruntime" in Path(f"/proc/{child}/maps").read_text() for child in children)


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks for processes in /proc")
def test_an_interruption_leaves_nothing(digits: Path, device: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embrace", "bench", "latency", digits, "--iterations", "100000"]
    process = subprocess.Popen(
        command,
        env=device,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interruptions,
    )
    temporary = tmp_path / "temporary"
    wait_until(lambda: measures(process.pid))
    assert len(list(temporary.iterdir())) >= 2  # ours, and that of the measuring process
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, "", "")
    assert list(temporary.iterdir()) == []
    wait_until(lambda: is_gone(process.pid))  # the measuring process was killed, and ends after its parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet21",), "no zoo model is called 'resnet21'"),
        (("digits", "--engine", "fast"), "no engine is called 'fast': expected portable, ort-training or all"),
        (("digits", "--stored-as", "int8"), "--stored-as int8: expected float32 or float16"),
        (("digits", "--narrow", "weak"), "--narrow weak: expected TIER=DIRECTORY"),
        (("digits", "--narrow", "weak=nowhere"), "--narrow weak=nowhere: not a bundle"),
        (("digits", "--plot", "no/such/folder/a.png"), "expected a file in a directory that exists"),
        (("digits", "--out", "."), "expected a file in a directory that exists"),
        (("./tests",), "is not a bundle"),
    ],
)
def test_wrong_requests(embrace: Any, arguments: tuple[str, ...], message: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    answer = embrace("bench", "latency", *arguments)
    assert answer.code == 2
    assert message in answer.error


def test_help_has_an_example(embrace: Any) -> None:
    for command in ("latency", "memory"):
        assert f"embrace bench {command} resnet20" in " ".join(embrace("bench", command, "--help").out.split())


def test_memory_too_needs_no_pytorch(digits: Path, device: dict[str, str]) -> None:
    """There is nothing to compare with then, which is said."""
    answer = on_device(
        device, "memory", digits, "--boundaries", "weak", "--batch", 2, "--repeats", 1, "--no-agents", "--json"
    )
    assert answer.returncode == 0, answer.stderr
    facts = json.loads(answer.stdout)
    assert {case["runner"] for case in facts["cases"]} == {"portable"}
    assert facts["notes"] == ["PyTorch is not installed here, so it is not compared with"]
