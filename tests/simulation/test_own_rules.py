"""A rule of the user's own runs in a simulation: made in Python, or from a file that the job names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from edge_runtime.user_module import load_class
from federation.axes.serve import Average
from federation.errors import InputError
from federation.job import parse_plan, plan_from
from simulation.fleet import read_job
from simulation.own_rules import can_travel
from simulation.pool import InlinePool, LocalPool
from simulation.simulate import simulate
from tests.edge_runtime.conftest import Bundle
from tests.simulation.test_simulate import arrays, fleet_of, plan_of, result

SIGNS = """
from dataclasses import dataclass
import numpy as np
from federation.axes.local import LocalRule, Plain
from federation.axes.serve import Average
from federation.axes.sync import WholeModel


@dataclass(frozen=True)
class Signs(LocalRule):
    scale: float = 1.0

    def begin(self, start):
        return Running(self.scale)


class Running(Plain):
    def __init__(self, scale):
        self.scale = scale

    def direct(self, at, g, x, scratch):
        g *= self.scale


@dataclass(frozen=True)
class Half(Average):
    def step(self, move, state, facts):
        return move / 2


@dataclass(frozen=True)
class Everything(WholeModel):
    pass
"""
OURS = {"local": {"rules": [], "rate": "0.025"}, "serve": {"rate": 0.5}, "num_rounds": 2}
THEIRS = {
    "local": {"rules": [{"rule": "mine.py:Signs", "scale": 0.5}], "rate": "0.05"},
    "serve": {"rule": "mine.py:Half"},
    "sync": {"rule": "mine.py:Everything"},
    "num_rounds": 2,
}


@dataclass(frozen=True)
class HalfTheWay(Average):
    """A server of one's own, at the top level of a module that worker processes import."""

    def step(self, move: Any, state: Any, facts: Any) -> Any:
        return move / 2


def from_file(bundle: Bundle, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(SIGNS)
    return fleet_of(bundle, THEIRS, partial(load_class, folder=folder))


@pytest.mark.parametrize(("pool", "workers"), [(InlinePool, 1), (LocalPool, 2)])
def test_rules_from_a_file_do_what_they_say(bundle_of, tmp_path, pool, workers):
    """Half the gradients and half the way are half the rates, and powers of two change no other bit."""
    bundle = bundle_of("digits")
    expected = result(fleet_of(bundle, OURS), tmp_path / "ours", InlinePool, 1)
    assert result(from_file(bundle, tmp_path / "job"), tmp_path / "theirs", pool, workers) == expected


@pytest.mark.parametrize(("pool", "workers"), [(InlinePool, 1), (LocalPool, 2)])
def test_a_rule_made_in_python_does_what_it_says(bundle_of, tmp_path, pool, workers):
    bundle = bundle_of("digits")
    expected = result(fleet_of(bundle, OURS), tmp_path / "ours", InlinePool, 1)
    theirs = fleet_of(bundle, {**OURS, "serve": HalfTheWay()})
    assert theirs.plan.serve.rule == HalfTheWay()
    assert result(theirs, tmp_path / "theirs", pool, workers) == expected


def test_a_job_file_names_a_file_beside_it(bundle_of, tmp_path):
    text = (
        f"bundle = '{bundle_of('digits').directory}'\n[serve]\nrule = 'mine.py:Half'\n[simulate]\ndataset = 'digits'\n"
    )
    (tmp_path / "job.toml").write_text(text)
    (tmp_path / "mine.py").write_text(SIGNS)
    plan, bundle = read_job(tmp_path / "job.toml")
    assert type(plan.serve.rule).__name__ == "Half" and can_travel(plan)
    run = simulate(replace(plan, num_rounds=1), bundle, arrays(bundle_of("digits")), devices=4, workers=2)
    assert run.about["job"]["serve"]["rule"] == "mine.py:Half"
    with pytest.raises(InputError, match=r"line 3: serve\.rule: .* a coordinator and its devices run no code of a job"):
        parse_plan(text)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("other.py:Half", r"serve\.rule: no such file: .*other\.py"),
        ("mine.py:Other", r"serve\.rule: mine\.py:Other: there is no class 'Other' in the file"),
        ("mine.py:np", r"serve\.rule: mine\.py:np: there is no class 'np'"),
        ("mine.py:Running", r"serve\.rule: expected a frozen dataclass, and Running is none"),
        ("mine.py:Signs", r"serve\.rule: expected a class derived from ServeRule, and Signs is none"),
        ("broken.py:Half", r"serve\.rule: .*broken\.py cannot be imported: ZeroDivisionError"),
        ("no.such.module:Half", r"serve\.rule: no\.such\.module:Half: expected file\.py:Name"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path, reference, message):
    (tmp_path / "mine.py").write_text(SIGNS)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match=message):
        plan_from({"bundle": "b", "serve": {"rule": reference}}, partial(load_class, folder=tmp_path))


def test_a_rule_that_workers_cannot_import_stays_in_this_process(bundle_of, monkeypatch):
    """As with a rule whose class is defined in a notebook."""

    @dataclass(frozen=True)
    class Local(HalfTheWay):
        pass

    bundle = bundle_of("digits")
    expected = simulate(plan_of(serve={"rate": 0.5}), bundle.directory, arrays(bundle), devices=4, pool=InlinePool)
    assert can_travel(plan_of()) and can_travel(plan_of(serve=HalfTheWay())) and not can_travel(plan_of(serve=Local()))
    with pytest.warns(UserWarning, match="runs in this process alone"):
        run = simulate(plan_of(serve=Local()), bundle.directory, arrays(bundle), devices=4, workers=2)
    assert all(np.array_equal(run.weights[name], value) for name, value in expected.weights.items())
    monkeypatch.setattr(HalfTheWay, "__module__", "__main__")
    assert not can_travel(plan_of(serve=HalfTheWay()))
