"""What the guides show works as it stands there."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embrace
from embrace.cli.main import app
from federation.job import parse_plan
from simulation.datasets.digits import read_digits
from tests.live_server import live_server
from tests.stock_python import ROOT

GUIDES = ROOT / "docs" / "guides"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (GUIDES / page).read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the examples."""
    folder = tmp_path_factory.mktemp("bundles") / "digits"
    embrace.export("digits", folder)
    return folder


@pytest.fixture
def workplace(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the bundle in it, to work in."""
    (tmp_path / "bundles").mkdir()
    for name in ("digits", "bundles/digits"):
        (tmp_path / name).symlink_to(digits, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path


def test_exporting_a_module(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (GUIDES / "export.md").read_text("utf-8")
    shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert shown
    exec(shown[1], {})
    assert capsys.readouterr().out == shown[2]


def test_simulating_in_python(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    first, loop, own, tracker = (
        block.replace("num_rounds=20", "num_rounds=2") for block in blocks("simulate.md", "python")
    )
    loop = loop.replace('("fedavg", "scaffold", "domo")', '("scaffold",)')  # one says as much as three
    exec(first, names)
    assert len(names["run"].rounds) == 2 and Path("accuracy.png").is_file()
    exec(loop, names)
    assert {path.name for path in Path("runs").iterdir()} == {"embracing", "scaffold"}
    pictures = pytest.importorskip("PIL.Image")
    data = read_digits()
    for number, (image, label) in enumerate(zip(data.x_train[:200, 0], data.y_train)):
        Path(f"flowers/{label}").mkdir(parents=True, exist_ok=True)
        pictures.fromarray((image * 255).astype(np.uint8)).save(f"flowers/{label}/{number}.png")
    np.savez("test.npz", x=data.x_test, y=data.y_test)
    exec(own, names := {**names, "x": data.x_train, "y": data.y_train})
    assert names["run"].rounds[-1]["samples"] == len(data.y_train)
    capsys.readouterr()
    exec(tracker, names)
    told = capsys.readouterr().out.splitlines()
    assert (told[0], told[-1], len(told)) == ("begin 2 rounds", "end", 6)


def test_job_files_can_be_read() -> None:
    files = [*blocks("fleet.md", "toml"), *blocks("simulate.md", "toml")]
    assert [parse_plan(text).bundle for text in files] == ["digits", "digits", "flowers-cnn"]


def test_an_algorithm_of_the_users_own(workplace: Path) -> None:
    """FedAMS in Python and in a job file: the same weights."""
    rule, program = blocks("adding-an-algorithm.md", "python")
    (job,) = blocks("adding-an-algorithm.md", "toml")
    Path("mine.py").write_text(rule)
    Path("job.toml").write_text(job)
    names: dict[str, Any] = {}
    exec(program, names)
    app(["simulate", "job.toml", "--out", "run"], standalone_mode=False)
    weights, other = names["run"].weights, embrace.load("digits").state_dict()
    assert weights.keys() == other.keys()
    from safetensors.numpy import load_file

    told = load_file("run/weights.safetensors")
    assert all(np.array_equal(weights[name], told[name]) for name in weights)
    assert any(not np.array_equal(weights[name], other[name]) for name in weights)
    assert names["run"].accuracy > 0.5


def test_a_fleet_in_python(workplace: Path, tmp_path: Path) -> None:
    """The agent and the client of the guide, with a coordinator."""
    agent, client = blocks("fleet.md", "python")
    data = read_digits()
    with live_server(tmp_path / "server") as server:
        shared = {
            "x": data.x_train[:200],
            "y": data.y_train[:200],
            "enrolment": server.enrolment,
            "token": server.admin,
        }
        agent = agent.replace("http://127.0.0.1:8470", server.url).replace("run()", "run(most_tasks=2)")
        agent = agent.replace('memory="128MB"', 'tier="strong", work="device"')
        client = client.replace("http://127.0.0.1:8470", server.url)
        client = client.replace("num_rounds=10", "num_rounds=2").replace('"min_available": 3', '"min_available": 1')
        device = threading.Thread(target=exec, args=(agent, dict(shared)))
        device.start()
        try:
            exec(client, names := dict(shared))
        finally:
            device.join(60)
    assert not device.is_alive()
    assert names["trained"].name == "digits"
