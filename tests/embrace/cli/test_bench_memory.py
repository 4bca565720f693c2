"""`embrace bench memory`: what is measured and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from bench.device.memory import MemoryReport, MemoryRow, bench_memory
from edge_runtime.bundle_files import read_manifest
from edge_runtime.measure import Measurement
from embrace.cli.bench.report import megabytes
from federation.capacity import predicted_memory

WEAK = ("--boundaries", "weak", "--engine", "portable", "--repeats", 1)


@pytest.fixture(scope="module")
def measured(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One real run of everything, report and picture included."""
    from tests.embrace.cli.conftest import run

    folder = tmp_path_factory.mktemp("memory")
    options = ("--boundaries", "strong,weak", "--batch", 256, "--engine", "portable", "--repeats", 1, "--json")
    answer = run("bench", "memory", digits, *options, "--plot", folder / "a.png", "--out", folder / "a.md")
    assert (answer.code, answer.err) == (0, "")
    return {"facts": answer.json, "folder": folder}


def test_engine_and_pytorch_at_both_boundaries(measured: dict[str, Any]) -> None:
    facts = measured["facts"]
    assert (facts["model"], facts["batch"], facts["threads"], facts["notes"]) == ("digits", 256, 1, [])
    assert [(case["boundary"], case["tiers"], case["runner"]) for case in facts["cases"]] == [
        ("conv1", ["strong"], "portable"),
        ("conv1", ["strong"], "torch"),
        ("dense", ["weak"], "portable"),
        ("dense", ["weak"], "torch"),
    ]
    for case in facts["cases"]:
        peak, idle = case["training"], case["idle"]
        assert 0 < peak["anonymous"] <= peak["total"] + 4096 * 64
        assert idle["resident"] == idle["anonymous"] + idle["file_backed"]
        assert (case["whole_round"] is not None) == (case["runner"] == "portable" and case["boundary"] != "conv1")


def test_agents_train_for_a_coordinator_and_take_more_than_a_step(measured: dict[str, Any]) -> None:
    strong, torch, weak, _ = measured["facts"]["cases"]
    assert torch["agent"] is None
    for case in (strong, weak):
        assert 0.8 * case["training"]["anonymous"] < case["agent"]["anonymous"] < case["agent"]["process"]
    assert weak["agent"]["anonymous"] < strong["agent"]["anonymous"]
    assert weak["relative"]["agent"] == weak["agent"]["anonymous"] / strong["agent"]["anonymous"]


def test_an_agent_that_fails_is_a_note(embrace: Any, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from federation.errors import EmbraceError

    def fails(*_: object) -> dict[str, int]:
        raise EmbraceError("agent-1 ended with exit code 1: no such thing")

    monkeypatch.setattr("bench.device.memory._has_torch", lambda: False)
    monkeypatch.setattr("bench.device.agents.Agents.peak", fails)
    answer = embrace(
        "bench", "memory", digits, "--boundaries", "weak", "--engine", "portable", "--repeats", 1, "--json"
    )
    assert answer.json["cases"][0]["agent"] is None
    why = "an agent from dense, portable: not measured, agent-1 ended with exit code 1: no such thing"
    assert why in answer.json["notes"]


def test_a_step_needs_what_the_formula_says_and_not_many_times_more(measured: dict[str, Any], digits: Path) -> None:
    manifest = read_manifest(digits)
    for case in measured["facts"]["cases"]:
        assert case["predicted"] == predicted_memory(manifest, manifest.boundary(case["boundary"]), 256).total
        if case["boundary"] == "conv1":
            assert 0.8 * case["predicted"] < case["training"]["anonymous"] < 6 * case["predicted"]


def test_ratios_follow_from_the_bytes(measured: dict[str, Any]) -> None:
    cases = {(case["boundary"], case["runner"]): case for case in measured["facts"]["cases"]}
    strong, torch, weak = cases["conv1", "portable"], cases["dense", "torch"], cases["dense", "portable"]
    found = weak["relative"]
    assert found["training"] == weak["training"]["anonymous"] / strong["training"]["anonymous"] < 0.5
    assert found["whole_round"] == weak["whole_round"]["anonymous"] / strong["training"]["anonymous"]
    assert found["predicted"] == weak["predicted"] / strong["predicted"]
    assert found["to_torch"] == weak["training"]["anonymous"] / torch["training"]["anonymous"]
    assert torch["relative"]["to_torch"] is None


def test_report_and_picture(measured: dict[str, Any]) -> None:
    text = (measured["folder"] / "a.md").read_text()
    assert text.startswith("# digits: memory of training at batch 256, 1 thread\n")
    assert "| conv1 (strong) | portable |" in text and "| dense (weak) | PyTorch |" in text
    assert "](a.png)" in text
    cases = {(case["boundary"], case["runner"]): case["training"]["anonymous"] for case in measured["facts"]["cases"]}
    for boundary in ("conv1", "dense"):
        ours, theirs = cases[boundary, "portable"], cases[boundary, "torch"]
        told = f"portable: {boundary}, peak of training {megabytes(ours)} MB, at most PyTorch's {megabytes(theirs)}: "
        assert told + ("met" if ours <= theirs else "missed") in text
    height, width, _ = imread(measured["folder"] / "a.png").shape
    assert width > 800 and height > 200


def test_the_batch_is_the_bundles_unless_said(embrace: Any, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.device.memory._has_torch", lambda: False)
    answer = embrace(
        "bench", "memory", digits, "--boundaries", "weak", "--engine", "portable", "--repeats", 1, "--no-agents"
    )
    assert answer.code == 0
    assert "batch 32" in answer.out and "PyTorch is not installed" in answer.out


def test_a_part_that_pytorch_cannot_train_is_said(embrace: Any, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from federation.errors import EmbraceError

    def fails(*_: object) -> dict[str, Any]:
        raise EmbraceError("no part of the module starts there")

    monkeypatch.setattr("bench.device.memory._torch", fails)
    answer = embrace(
        "bench",
        "memory",
        digits,
        "--boundaries",
        "weak",
        "--engine",
        "portable",
        "--json",
        "--repeats",
        1,
        "--no-agents",
    )
    assert answer.json["notes"] == ["PyTorch at dense: no part of the module starts there"]
    assert [case["runner"] for case in answer.json["cases"]] == ["portable"]


def test_the_process_in_the_middle_counts(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([9, 3, 5])  # of training everything; there are no frozen layers
    monkeypatch.setattr("bench.device.memory._has_torch", lambda: False)
    monkeypatch.setattr("bench.device.memory.measure", lambda case: Measurement({}, {"anonymous": next(peaks)}, 0.0))
    (row,) = bench_memory(str(digits), boundaries="strong", engine="portable", agents=False).rows
    assert (row.anonymous, row.anonymous_of_all) == (5, [3, 5, 9])


def test_without_the_strong_row_there_is_nothing_to_compare_with() -> None:
    row = MemoryRow("dense", ["weak"], "portable", 10, 0.1, {}, {"anonymous": 20}, {"anonymous": 30}, [20])
    found = MemoryReport("digits", 32, 1, {}, [row], [])
    assert (found.training_ratio(row), found.round_ratio(row), found.predicted_ratio(row)) == (None, None, None)
    assert found.to_torch(row) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--boundaries", "conv9"), "no boundary or tier named 'conv9'"),
        (("--boundaries", ","), "expected names separated by commas"),
        (("--engine", "ort-training"), "has no graph for the engine 'ort-training'"),
        (("--batch", "0"), None),
    ],
)
def test_wrong_requests(embrace: Any, digits: Path, arguments: tuple[str, ...], message: str | None) -> None:
    answer = embrace("bench", "memory", digits, *arguments)
    assert answer.code == 2
    assert message is None or message in answer.error
