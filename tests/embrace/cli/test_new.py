"""`embrace new`: what it writes works as it stands; the README's own commands are run, from an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from embrace.cli.new import FILES
from federation.job import parse_plan
from simulation.runs import read_run
from tests.live_server import live_server
from tests.stock_python import ROOT
from tests.waiting import PATIENCE

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `embrace` is this clone's."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "embrace"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m embrace "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def shell(text: str, folder: Path, environment: dict[str, str]) -> str:
    command = ["sh", "-e", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE * 4)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks(project: Path) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, commands: dict[str, str]) -> Path:
    """A new project in which the first block of the README was run."""
    folder = tmp_path_factory.mktemp("empty")
    told = shell("embrace new shapes", folder, commands)
    made = folder / "shapes"
    assert sorted(path.name for path in made.iterdir()) == sorted(FILES)
    first = blocks(made)[0]
    assert all(line in told for line in first.splitlines()), "the next steps are those of the README"
    shell(first, made, commands)
    return made


def test_the_commands_of_the_readme_train_the_model(project: Path, commands: dict[str, str]):
    run = read_run(project / "runs" / "shapes")
    assert run.accuracy is not None and run.accuracy > 0.8, "far above a third, which is chance"
    assert run.rounds[-1]["devices"] == 8 and run.about["job"]["simulate"]["tiers"] == {"strong": 2, "weak": 6}
    told = shell(
        "embrace train bundle --data data.py:train --test data.py:test --rounds 1 --out again", project, commands
    )
    assert "600 samples, 150 held out" in told
    assert (project / "bundle-trained" / "manifest.json").is_file()


def test_the_fleet_of_the_readme_trains_the_model(project: Path, commands: dict[str, str], tmp_path: Path):
    serve, agents, job = blocks(project)[1:]
    assert serve == "embrace serve --data coordinator\n"
    with live_server(tmp_path / "server") as server:
        environment = {**commands, "EMBRACE_SERVER": server.url}
        running = []
        try:
            for line in agents.splitlines():
                line = line.replace("http://127.0.0.1:8470", server.url).replace("TOKEN", server.enrolment)
                running.append(subprocess.Popen(shlex.split(line), cwd=project, env=environment))
            create, watch, export = (
                line.replace("@coordinator/admin.token", server.admin) for line in job.splitlines()
            )
            created = re.search(r"job (\w+):", shell(create, project, environment))
            assert created
            told = shell(watch.replace("JOB", created[1]), project, environment)
            assert "done, version 10" in told
            shell(export.replace("JOB", created[1]), project, environment)
        finally:
            for process in running:
                process.terminate()
                process.wait(PATIENCE)
    assert (project / "trained" / "model.onnx").is_file()


def test_what_is_written_is_in_order(project: Path):
    """Formatted and free of what a linter finds, and the job file has no unknown keys."""
    plan = parse_plan((project / "job.toml").read_text())
    assert plan.name == "shapes" and plan.simulate["data"] == "data.py:train"
    for arguments in (["check"], ["format", "--check"]):
        options = ["--config", str(ROOT / "pyproject.toml"), "model.py", "data.py"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, *options], cwd=project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_it_needs_a_folder_of_its_own(embrace, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    answer = embrace("new", tmp_path / "full")
    assert answer.code == 2 and "is not empty; choose another folder" in answer.error
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert "choose another folder" in embrace("new", tmp_path / "full" / "notes.txt").error
    answer = embrace("new", tmp_path / "deep" / "down", "--json")
    assert answer.json["files"] == list(FILES) and (tmp_path / "deep" / "down" / "job.toml").is_file()
    assert "Example: embrace new shapes" in embrace("new", "--help").out
