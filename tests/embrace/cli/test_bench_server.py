"""`embrace bench server`: real servers, a few small devices."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from matplotlib.image import imread

from bench.flower.server import Found
from bench.server.measure import bench_server
from bench.server.report import ServerReport, ServerRow
from embrace.cli.bench.server import report_of, summary


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One real run, report and picture included."""
    from tests.embrace.cli.conftest import run

    folder = tmp_path_factory.mktemp("server")
    (folder / "work").mkdir()
    options = ("--devices", 3, "--parameters", 1000, "--rounds", 2, "--folder", folder / "work", "--json")
    answer = run("bench", "server", *options, "--plot", folder / "a.png", "--out", folder / "a.md")
    assert (answer.code, answer.err) == (0, "")
    return {"facts": answer.json, "folder": folder}


def test_baseline_and_coordinator_under_the_same_load(measured: dict[str, Any]) -> None:
    facts = measured["facts"]
    assert [(case["server"], case["devices"], case["parameters"]) for case in facts["cases"]] == [
        ("baseline", 3, 1000),
        ("embrace", 3, 1000),
    ]
    for case in facts["cases"]:
        assert len(case["seconds"]) == len(case["cpu"]) == 2 and min(case["seconds"]) > 0
        assert 0 < case["idle"] <= case["peak"]
    assert facts["cases"][1]["relative"]["seconds_to_baseline"] > 0
    assert len(facts["notes"]) == 1 and facts["notes"][0].startswith("Flower is not compared with: ")


def test_nothing_is_left(measured: dict[str, Any]) -> None:
    assert list((measured["folder"] / "work").iterdir()) == []
    running = subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
    assert str(measured["folder"] / "work") not in running


def test_report_and_picture(measured: dict[str, Any]) -> None:
    text = (measured["folder"] / "a.md").read_text()
    assert text.startswith("# A round without training, 64 devices transferring at once\n")
    assert "| 1,000 | 3 | bare baseline |" in text and "3 devices, 1,000 parameters: round / baseline: " in text
    height, width, _ = imread(measured["folder"] / "a.png").shape
    assert width > 800 and height > 200


def test_bars_say_what_is_met() -> None:
    rows = [
        ServerRow("baseline", 8, 1000, [1.0, 2.0, 9.0], [0.5], 1000, 9000),
        ServerRow("embrace", 8, 1000, [5.0], [1.0], 1000, 21_000),
        ServerRow("flower", 8, 1000, [50.0], [20.0], None, None),
    ]
    found = ServerReport(64, {}, rows, [])
    assert [(bar.measured, bar.met) for bar in found.bars()] == [(2.5, True), (5.0, False), (0.05, True), (0.1, False)]
    assert "at most 4: missed" in report_of(found).bars[1]
    again = ServerReport.from_json(summary(found))
    assert again == found


class Space(NamedTuple):
    free: int


def test_a_disk_that_is_too_small_is_refused(embrace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.server.measure.shutil.disk_usage", lambda folder: Space(1 << 30))
    answer = embrace("bench", "server", "--devices", "4", "--parameters", "1000", "--folder", tmp_path)
    assert answer.code == 2 and "need 1.1 GB of disk" in answer.error
    assert list(tmp_path.iterdir()) == []


def test_flower_is_measured_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bench.server.measure", "bench.flower_python"):
        monkeypatch.setattr(f"{module}.flower_version", lambda python: "1.41")
    monkeypatch.setattr("bench.flower.server.run_flower", lambda *_: Found([9.0], [3.0], 10, 50))
    found = bench_server([1], [10], folder=tmp_path, flower_python=tmp_path)
    assert [row.server for row in found.rows] == ["baseline", "embrace", "flower"]
    assert found.device["flwr"] == "1.41" and found.notes == []
    assert found.rows[2] == ServerRow("flower", 1, 10, [9.0], [3.0], 10, 50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "8,x"), "--devices: expected numbers separated by commas, got '8,x'"),
        (("--devices", ","), "--devices: expected numbers separated by commas"),
        (("--devices", "0"), "devices: expected numbers from 1 to 10,000, got [0]"),
        (("--folder", "nowhere"), "expected a directory that exists"),
        (("--rounds", "0"), None),
    ],
)
def test_wrong_requests(embrace: Any, arguments: tuple[str, ...], message: str | None) -> None:
    answer = embrace("bench", "server", *arguments)
    assert answer.code == 2
    assert message is None or message in answer.error
