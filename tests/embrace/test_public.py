"""The public package: at most a dozen names, each with an example that works, none of them heavy until used."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embrace
from simulation.datasets.digits import read_digits
from tests.live_server import live_server
from tests.stock_python import ROOT

NAMES = [name for name in embrace.__all__ if name != "__version__"]
HEAVY = ("fastapi", "httpx", "matplotlib", "onnx", "onnxruntime", "pydantic", "sqlalchemy", "torch")


def test_names_are_few_sorted_and_there() -> None:
    assert len(NAMES) <= 12
    assert embrace.__all__ == sorted(embrace.__all__)
    assert dir(embrace) == embrace.__all__
    assert all(getattr(embrace, name) is getattr(embrace, name) for name in embrace.__all__)


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Simulate'; it has Agent, Bundle"):
        _ = embrace.Simulate


def test_importing_it_loads_nothing_heavy() -> None:
    program = f"import sys, embrace; print(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split() == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples take for granted: a model, arrays, a bundle, a coordinator, a folder."""
    folder = tmp_path_factory.mktemp("public")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    data = read_digits()
    x, y = data.x_train[:400], data.y_train[:400]
    bundle = embrace.export(model, folder / "given", sample=x, tiers={"weak": 0.5})
    with live_server(folder / "coordinator") as live:
        yield {
            "embrace": embrace,
            "model": model,
            "x": x,
            "y": y,
            "bundle": bundle,
            "folder": folder,
            "server": live.url,
            "token": live.admin,
            "enrolment": live.enrolment,
        }


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_every_name_works(name: str, world: dict[str, Any]) -> None:
    thing = getattr(embrace, name)
    assert inspect.getdoc(thing)
    finder = doctest.DocTestFinder(exclude_empty=True)
    own = vars(thing) if inspect.ismodule(thing) else {}
    found = finder.find(thing, name, globs={**own, **world})
    assert any(test.examples for test in found), f"embrace.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)


def test_a_module_in_memory_keeps_its_weights_and_verifies(world: dict[str, Any]) -> None:
    bundle = embrace.export(world["model"], sample=world["x"])
    kept = bundle.state_dict()
    for name, value in world["model"].state_dict().items():
        np.testing.assert_array_equal(kept[name], value.numpy())
    assert max(result.largest() for result in bundle.verify()) < 1e-4


def test_a_bundle_without_a_place_goes_with_its_object(world: dict[str, Any]) -> None:
    bundle = embrace.export(world["model"], sample=world["x"])
    path = bundle.path
    assert path.is_dir()
    del bundle
    assert not path.exists()


def test_a_notebook_shows_the_boundaries(world: dict[str, Any]) -> None:
    shown = world["bundle"]._repr_html_()
    assert shown.count("<tr>") == 1 + len(world["bundle"].boundaries)
    assert "<td>weak</td>" in shown


def test_what_is_no_model_is_refused_in_one_line(world: dict[str, Any]) -> None:
    with pytest.raises(embrace.errors.InputError, match=r"expected a torch\.nn\.Module"):
        embrace.export(3, sample=world["x"])  # type: ignore[arg-type]
    with pytest.raises(embrace.errors.InputError, match="say what the model takes"):
        embrace.export(world["model"])


def test_training_equals_the_command(world: dict[str, Any], tmp_path: Path) -> None:
    """The same data, seed and options: the function and the command line give the same weights."""
    from embrace.cli.main import main

    np.savez(tmp_path / "data.npz", x=world["x"], y=world["y"])
    python = embrace.train(world["bundle"], (world["x"], world["y"]), rounds=2, boundary="weak", out=tmp_path / "a")
    options = ["--rounds", "2", "--boundary", "weak", "--out", str(tmp_path / "b"), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["train", str(world["bundle"].path), "--data", str(tmp_path / "data.npz"), *options])
    assert ended.value.code == 0
    other = embrace.load(tmp_path / "b").state_dict()
    for name, value in python.bundle.state_dict().items():
        np.testing.assert_array_equal(value, other[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: embrace.simulate(w["job"], "digits", test_data=(w["x"], w["y"])), "test_data: belongs to own data"),
        (lambda w: embrace.simulate(w["job"], (w["x"], w["y"]), tiers=["weak"]), "tiers: expected a number of devices"),
        (lambda w: embrace.simulate(w["job"], (w["x"], w["y"]), workers=0), "workers: expected at least 1"),
        (lambda w: embrace.simulate(w["job"], (w["x"], w["y"]), folder=w["file"]), "cannot write to"),
        (
            lambda w: embrace.simulate(w["job"], (w["x"], w["y"]), evaluate_every=-1),
            "evaluate_every: expected a number",
        ),
        (lambda w: embrace.export(w["model"], sample=w["x"], dtype="words"), "input dtype 'words' is no type"),
        (lambda w: embrace.export(w["model"], sample=w["x"], tiers=["weak"]), "tiers: expected a capacity for each"),
        (lambda w: embrace.export(w["model"], sample=w["x"], tiers={"weak": "x"}), "a capacity lies between 0 and 1"),
        (lambda w: embrace.train(w["bundle"], (w["x"], w["y"]), batch=0), "batch: expected at least 1"),
        (lambda w: embrace.train(w["bundle"], (w["x"], w["y"]), rounds=0), "rounds: expected at least 1"),
        (lambda w: embrace.Client(w["server"], w["token"], certificate=w["folder"] / "no.pem"), "cannot use the cert"),
        (lambda w: embrace.Job(w["bundle"], algorithm="fedmagic"), "algorithm: expected one of"),
        (lambda w: embrace.Job(w["bundle"], serve={"trim": 0.7}), "serve.trim: expected a share"),
    ],
)
def test_a_mistake_is_answered_in_one_line(call: Any, message: str, world: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = embrace.Job(world["bundle"], num_rounds=1, local={"steps": 1, "rate": 0.1})
    with pytest.raises(embrace.errors.InputError, match=re.escape(message)) as refused:
        call({**world, "job": job, "file": tmp_path / "file"})
    assert "\n" not in str(refused.value)
