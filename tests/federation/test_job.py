"""Job files: what is refused, and on which line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from federation.axes.cover import Everything, OutputSide
from federation.axes.serve import Average
from federation.errors import InputError
from federation.identity import task_seed
from federation.job import Plan, parse_plan, plan_from, plan_to
from federation.messages import decode_task, encode_task

WHOLE = """\
bundle = "bundles/digits"
name = "first"
num_rounds = 7

[participate]
count = 3
quorum = 2

[local]
steps = 20
rate = "0.1 warmup 2"
rules = [{ rule = "proximal", mu = 0.1 }]

[serve]
rate = 0.5
"""


def test_a_job_file_and_its_defaults() -> None:
    plan = parse_plan(WHOLE)
    assert (plan.num_rounds, plan.participate.count, plan.participate.quorum, plan.choices.serve) == (
        7,
        3,
        2,
        Average(0.5),
    )
    assert plan.local.task("strong", 0, 1).rate == 0.05 and plan.local.task("strong", 1, 1).rate == 0.1
    default = parse_plan('bundle = "b"')
    assert default == Plan("b") and default.participate.fraction_train == 1.0 and default.weigh.weight(9) == 1.0
    assert isinstance(default.cover.build(8), OutputSide)
    assert isinstance(plan_from({"bundle": "b", "cover": {"rule": "everything"}}).cover.build(8), Everything)


def test_a_plan_survives_json() -> None:
    plan = parse_plan(WHOLE)
    again = plan_from(json.loads(json.dumps(plan_to(plan))))
    assert again.local.task("weak", 3, 5) == plan.local.task("weak", 3, 5)
    assert plan_to(again) == plan_to(plan)


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ('bundle = "b"\nrounds = 3', 2, "rounds"),
        ('bundle = "b"\nnum_rounds = "many"', 2, "num_rounds"),
        ('bundle = "b"\n[serve]\ncombine = "krum"', 3, "krum"),
        ('bundle = "b"\n\n[local]\nsteps = 1.5', 4, "steps"),
        ('bundle = "b"\n[participate]\nfraction = 0.1', 3, "fraction"),
        ('bundle = "b"\nnum_rounds = 0', 2, "num_rounds"),
        ('bundle = "b"\n[local]\nrate = "0.1"\n[serve]\nrate = -1', 5, "rate"),
        ('bundle = "b"\n[local]\nrules = [{rule = "magic"}]', 3, "magic"),
        ('bundle = "b"\n[local]\nbatch = 4\nsteps = 0', 4, "steps"),
        ('bundle = "b"\n[participate]\nquorum = 0', 3, "quorum"),
        ('bundle = "b"\n[bounds]\nlease = 0', 3, "lease"),
    ],
)
def test_an_error_says_where(text: str, line: int, word: str) -> None:
    with pytest.raises(InputError, match=rf"line {line}: .*{word}"):
        parse_plan(text)


def test_no_toml_and_no_bundle() -> None:
    with pytest.raises(InputError, match=r"no TOML.*line 2"):
        parse_plan('bundle = "b"\nname = x')
    with pytest.raises(InputError, match="bundle"):
        parse_plan("")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_rounds": 0},
        {"seed": -1},
        {"seed": 2**32},
        {"name": "a\nb"},
        {"name": "x" * 201},
        {"serve": {"rate": 0}},
        {"serve": {"rate": float("nan")}},
        {"serve": {"trim": 0.5}},
        {"serve": {"clip_norm": 0}},
        {"serve": {"clip_norm": 1.0, "combine": "median"}},
        {"bounds": {"lease": 0}},
        {"bounds": {"offer": float("inf")}},
        {"bounds": {"max_value": 0}},
        {"bounds": {"max_value": 1e-30}},
        {"bounds": {"max_value": 1e9}},
        {"bounds": {"max_samples": 0}},
        {"bounds": {"max_norm": -1.0}},
        {"bounds": {"max_norm": float("nan")}},
        {"evaluate": {"every": 0}},
        {"local": {"steps": 0}},
        {"local": {"rate": "fast"}},
        {"local": {"rules": [{"rule": "magic"}]}},
        {"local": {"activations": "int8"}},
        {"participate": {"count": 2, "fraction_train": 0.5}},
        {"participate": {"on_missing_quorum": "fail"}},
        {"participate": {"replacement": True, "over_select": 0.5}},
        {"weigh": {"by": "loudness"}},
        {"cover": {"rule": "middle"}},
        {"cover": {"rule": "width", "tiers": {"weak": 1.5}}},
    ],
)
def test_impossible_plans_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        plan_from({"bundle": "b", **wrong})


def test_the_largest_seed_is_one_that_devices_take() -> None:
    plan = plan_from({"bundle": "b", "seed": 2**32 - 1})
    seed = task_seed(plan.seed, "d" * 12)
    assert decode_task(json.loads(json.dumps(encode_task(plan.local.task("strong", 0, seed))))).seed == seed
    assert seed < 2**53
