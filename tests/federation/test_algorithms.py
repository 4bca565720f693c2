"""Published algorithms as tables of a job: every one is a plan, says where it is from, and gives way to the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from federation.algorithms import PUBLISHED, Published, published
from federation.axes.cover import InputSide, OrderedDropout, OutputSide, Width
from federation.axes.local import Momentum, Proximal
from federation.axes.serve import Adam, Average, ServerHeavyBall
from federation.axes.sync import FedLama, Rotating
from federation.decode import encode
from federation.errors import InputError
from federation.job import Plan, parse_plan, plan_from, plan_to


def plan_of(name: str, **job: Any) -> Plan:
    return plan_from({"bundle": "b", "algorithm": name, **job})


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_algorithm_is_a_plan_and_survives_json(name: str) -> None:
    plan = plan_of(name)
    assert plan.algorithm == name == PUBLISHED[name].name
    again = plan_from(json.loads(json.dumps(plan_to(plan))))
    assert plan_to(again) == plan_to(plan)
    assert again.choices == plan.choices and again == plan


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_stored_does_not_need_the_list_any_more(name: str) -> None:
    """A new version of an algorithm does not change a job that is under way."""
    stored = {**plan_to(plan_of(name)), "algorithm": ""}
    assert plan_from(stored).choices == plan_of(name).choices


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_algorithm_cites_its_paper_in_one_line(name: str) -> None:
    found = PUBLISHED[name]
    for text in (found.paper, found.note):
        assert text and "\n" not in text and len(text) < 130
    assert "," in found.paper and any(char.isupper() for char in found.paper)


def test_names_differ_and_another_is_refused_with_the_list() -> None:
    choices = [json.dumps({**encode(p), "name": "", "paper": "", "note": ""}) for p in PUBLISHED.values()]
    assert len(set(choices)) == len(PUBLISHED)
    with pytest.raises(InputError, match=r"algorithm: expected one of fedavg, .*, got 'magic'"):
        published("magic")
    with pytest.raises(InputError, match=r"line 2: algorithm: expected one of .*, got 'magic'"):
        parse_plan('bundle = "b"\nalgorithm = "magic"')
    with pytest.raises(InputError, match=r"^algorithm: expected one of .*, got '3'"):
        plan_from({"bundle": "b", "algorithm": 3})


def test_what_the_paper_of_each_family_says() -> None:
    assert plan_of("fedavg").choices.serve == Average(1.0) and plan_of("fedavg").choices.rules == ()
    assert plan_of("fedlama").choices.sync == FedLama(2)
    assert plan_of("partial_averaging").choices.sync == Rotating(4) and plan_of("partial_averaging").local.steps == 1
    assert plan_of("fednova").choices.weigh.normalise and plan_of("fednova").weigh.by == "samples"
    assert plan_of("scaffold").choices.tracks == ("control",) and plan_of("vrl_sgd").choices.tracks == ()
    assert plan_of("fedavg_lm").choices.tracks == ("momentum",) and plan_of("fedavg_lm_z").choices.tracks == ()
    assert plan_of("domo").choices.fuses and not plan_of("fedavg_slm").choices.fuses
    assert plan_of("heterofl").cover == Width() and plan_of("fjord").cover == OrderedDropout()
    assert plan_of("inclusivefl").cover == InputSide() and plan_of("embracing").cover == OutputSide()


# --- what a job says counts more -------------------------------------------------------------------


def test_single_constants_are_replaced_key_by_key() -> None:
    assert plan_of("fedavg_sm", serve={"factor": 0.5}).choices.serve == ServerHeavyBall(0.5, 1.0)
    assert plan_of("fedlama", sync={"factor": 6}).choices.sync == FedLama(6)
    assert plan_of("partial_averaging", local={"batch": 8}).local.steps == 1
    assert plan_of("partial_averaging", local={"steps": 3}).choices.rules == (Momentum(0.9, between="keep"),)
    assert plan_of("fednova", weigh={"by": "uniform"}).choices.weigh.normalise


def test_a_list_of_rules_is_replaced_as_a_whole() -> None:
    plan = plan_of("domo", local={"rules": [{"rule": "proximal", "mu": 0.1}]})
    assert plan.choices.rules == (Proximal(0.1),) and plan.choices.serve == ServerHeavyBall(0.9)


def test_constants_of_a_rule_that_the_job_replaces_are_dropped() -> None:
    assert plan_of("fedavg_sm", serve={"rule": "adam"}).choices.serve == Adam()
    assert plan_of("fedavg_sm", serve={"rule": "momentum"}).choices.serve == ServerHeavyBall(0.9)
    assert plan_of("fedlama", sync={"rule": "rotating", "parts": 2}).choices.sync == Rotating(2)


def test_tables_that_an_algorithm_does_not_fill_keep_the_jobs() -> None:
    plan = plan_of("fedprox", serve={"rate": 0.5, "clip_norm": 2.0}, participate={"count": 3}, num_rounds=4)
    assert (plan.choices.serve, plan.serve.clip_norm, plan.participate.count) == (Average(0.5), 2.0, 3)
    assert plan.num_rounds == 4 and plan.choices.rules == (Proximal(0.01),)


def test_filling_changes_neither_the_algorithm_nor_the_job() -> None:
    algorithm = Published("x", "Paper, 2020", "note", serve=ServerHeavyBall(0.5))
    job = {"bundle": "b", "serve": {"rate": 2.0}}
    serve = {"rule": "momentum", "factor": 0.5, "rate": 2.0}
    assert algorithm.fill(job) == {"bundle": "b", "serve": serve, "local": {"rules": []}}
    assert job == {"bundle": "b", "serve": {"rate": 2.0}}
    assert algorithm.serve == ServerHeavyBall(0.5)


@pytest.mark.parametrize("table", [3, "fast", ["rule"]])
def test_a_table_that_is_none_is_refused_by_its_name(table: Any) -> None:
    with pytest.raises(InputError, match="serve"):
        plan_of("fedavg_sm", serve=table)


# --- what cannot be combined -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ('bundle = "b"\nalgorithm = "scaffold"\n[serve]\ncombine = "median"', 4, "combine"),
        ('bundle = "b"\nalgorithm = "fedavg_lm"\n[serve]\ncombine = "trimmed_mean"', 4, "combine"),
        ('bundle = "b"\nalgorithm = "fednova"\n[serve]\ncombine = "median"', 4, "combine"),
        ('bundle = "b"\nalgorithm = "heterofl"\n[serve]\nrate = 1.0\ncombine = "median"', 5, "combine"),
        ('bundle = "b"\nalgorithm = "fedlama"\n[serve]\ncombine = "median"', 4, "FedLAMA"),
        ('bundle = "b"\nalgorithm = "domo"\n[local]\nepochs = 2', 4, "epochs"),
        ('bundle = "b"\nalgorithm = "fedlama"\n[participate]\ncount = 2\nwindow = 3', 5, "window"),
        ('bundle = "b"\nalgorithm = "partial_averaging"\n[participate]\ncount = 2\nwindow = 10', 5, "of the 40"),
        ('bundle = "b"\n[sync]\nrule = "rotating"\nparts = 0', 4, "parts"),
        ('bundle = "b"\n[sync]\nrule = "never"', 3, "never"),
        ('bundle = "b"\n[serve]\nrule = "momentum"\nfactor = 1.5', 4, "factor"),
        ('bundle = "b"\n[serve]\ndevices = 0', 3, "devices"),
        ('bundle = "b"\n[bounds]\nmax_other_value = 0', 3, "max_other_value"),
        ('bundle = "b"\n[cover]\nrule = "output"', 3, "output"),
    ],
)
def test_impossible_combinations_are_refused_with_the_line(text: str, line: int, word: str) -> None:
    with pytest.raises(InputError, match=rf"line {line}: .*{word}"):
        parse_plan(text)


def test_a_cohort_stays_for_as_long_as_the_synchronisation_needs() -> None:
    drawn = plan_of("partial_averaging", participate={"count": 2}, num_rounds=100)
    assert drawn.participation.window == 40 and drawn.draws_some
    assert [drawn.when(n).ends_window for n in (38, 39, 40, 79)] == [False, True, False, True]
    assert [drawn.window_from(n) for n in (0, 39, 40, 85)] == [0, 0, 40, 80]
    everybody = plan_of("partial_averaging")
    assert not everybody.draws_some and everybody.participation.window == 1
    assert not any(everybody.when(n).ends_window for n in range(9)) and everybody.window_from(9) == 0
    assert [plan_of("fedavg", num_rounds=3).when(n).is_last for n in range(3)] == [False, False, True]
