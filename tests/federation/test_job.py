"""Job files: what is refused, and on which line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from federation.axes.cover import Cover, Everything, OutputSide
from federation.axes.local import LocalRule
from federation.axes.local.rule import Plain, Running, Start
from federation.axes.serve import Average, Yogi
from federation.axes.sync import Rotating, WholeModel
from federation.errors import FieldError, InputError
from federation.identity import task_seed
from federation.job import LocalWork, Plan, Serve, parse_plan, plan_from, plan_to
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
    assert (default.cover, default.sync, default.serve) == (OutputSide(), WholeModel(), Serve(Average()))
    assert plan_from({"bundle": "b", "cover": {"rule": "everything"}}).cover == Everything()


def test_a_plan_survives_json() -> None:
    plan = parse_plan(WHOLE)
    again = plan_from(json.loads(json.dumps(plan_to(plan))))
    assert again.local.task("weak", 3, 5) == plan.local.task("weak", 3, 5)
    assert plan_to(again) == plan_to(plan) and again == plan


# As version 0.1 stored it and its REST API showed it; the order of the keys as well.
STORED = (
    '{"bundle": "b", "name": "", "algorithm": "", "num_rounds": 10, "seed": 0, "participate": {"fraction_train": 1.0, '
    '"count": null, "min_available": 1, "replacement": false, "window": 1, "over_select": 0.0, "quorum": 2, '
    '"deadline": null, "on_missing_quorum": "wait", "balance": true}, "cover": {"rule": "everything", "tiers": {"a": '
    '5.0}}, "sync": {"rule": "rotating", "parts": 2, "by": "layer", "redistribute": "local"}, "local": {"steps": 10, '
    '"epochs": null, "batch": 32, "rate": "0.05", "rules": [{"rule": "momentum", "factor": 0.9, "nesterov": false, '
    '"between": "reset"}], "refresh_every": 1, "activations": "float32", "crop": 0, "flip": false}, "weigh": {"by": '
    '"uniform", "normalise": false}, "serve": {"rule": "yogi", "rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": '
    '0.001, "initial": null, "combine": "mean", "trim": 0.1, "clip_norm": null, "devices": null}, "evaluate": {"data": '
    'null, "every": 1, "statistics": "global"}, "bounds": {"lease": 3600.0, "offer": 120.0, "max_value": 64.0, '
    '"max_other_value": 65536.0, "max_norm": null, "max_samples": 1048576}, "simulate": {"devices": 5}}'
)


def _known(written: Any, stored: Any) -> Any:
    """What is written, without the keys that the stored plan has not."""
    if not isinstance(written, dict):
        return written
    return {key: _known(value, stored[key]) for key, value in written.items() if key in stored}


def test_a_stored_plan_is_read_and_written_as_it_was() -> None:
    stored = json.loads(STORED)
    plan = plan_from(stored)
    assert json.dumps(_known(plan_to(plan), stored)) == STORED, "but for keys that came later"
    assert (plan.cover, plan.sync, plan.serve) == (Everything({"a": 5.0}), Rotating(2), Serve(Yogi()))


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
        (
            'bundle = "b"\n[participate]\ncount = 2\nover_select = -1.0',
            4,
            r"participate\.over_select: expected a share",
        ),
        ('bundle = "b"\n[cover]\nrule = "width"\ntiers = { weak = 2.0 }', 4, r"cover\.tiers\.weak: expected a share"),
        (
            'bundle = "b"\n[cover]\nrule = "width"\n[cover.tiers]\nweak = 2.0',
            5,
            r"cover\.tiers\.weak: expected a share",
        ),
        ('bundle = "b"\n[sync]\nrule = "fedlama"\nfactr = 2', 4, r"sync\.factr: .*; did you mean 'factor'\?"),
        ('bundle = "b"\nlocal.rate = "fast"', 2, r"local\.rate: schedule 'fast'"),
        ('bundle = "b"\n[[local.rules]]\nrule = "momentum"\nfactor = 2', 4, r"local\.rules\[0\]\.factor: expected"),
        (
            'bundle = "b"\n[local]\nrules = [\n{ rule = "weight_decay", factor = 0 },\n{ rule = "proximal", mu = -1 }]',
            5,
            r"local\.rules\[1\]\.mu: expected a number in",
        ),
        ('bundle = "b"\nlocal = { steps = 1, batch = 0 }', 2, r"local\.batch: expected a number from 1"),
        ('bundle = "b"\n[local]\nstep = 3', 3, r"local\.step: no such key; .*; did you mean 'steps'\?"),
        ('bundle = "b"\n[weigh]\nnormalise = 1', 3, r"weigh\.normalise: expected true or false"),
        ('bundle = "b"\n[serve]\nrate = 1.0\ntrim = 0.7', 4, r"serve\.trim: expected a share in \[0, 0.5\), got 0.7"),
        ('bundle = "b"\n[serve]\nrule = "adam"\nbeta1 = 1', 4, r"serve\.beta1: expected a number in"),
        ('bundle = "b"\n[evaluate]\nevery = 0', 3, r"evaluate\.every: expected at least 1, got 0"),
        ('bundle = "b"\n[bounds]\nlease = 1.0\nmax_norm = 0.0', 4, r"bounds\.max_norm: expected a number above 0"),
        ('bundle = "b"\nweigh = 3', 2, r"weigh: expected an object"),
        ('bundle = "b"\nsimulate = 3', 2, r"simulate: expected an object"),
        ("bundle = 7", 1, r"bundle: expected str"),
        ('bundle = "b"\nseed = -1', 2, r"seed: expected a number from 0"),
        ('name = "x"\nbundle = "b"\n[serve]\nrule = "mine.py:Mine"', 4, r"serve\.rule: .* run no code of a job"),
    ],
)
def test_an_error_says_where(text: str, line: int, word: str) -> None:
    with pytest.raises(InputError, match=rf"line {line}: .*{word}"):
        parse_plan(text)


def test_no_toml_and_no_bundle() -> None:
    with pytest.raises(InputError, match=r"no TOML.*line 2"):
        parse_plan('bundle = "b"\nname = x')
    with pytest.raises(InputError, match=r"^bundle: required, and not given$"):
        parse_plan("")
    for text in (f"seed = {'9' * 5000}", f"name = {'[' * 100_000}"):
        with pytest.raises(InputError, match="the job file is no TOML"):
            parse_plan(text)
    with pytest.raises(InputError, match=r"line 1: seed: expected an integer below 2\^62, got an integer of very many"):
        parse_plan(f"seed = 0x{'f' * 5000}\nbundle = 'b'")


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


def test_an_error_keeps_its_path() -> None:
    with pytest.raises(FieldError) as caught:
        parse_plan('bundle = "b"\n[[local.rules]]\nrule = "proximal"\nmu = "x"')
    assert (caught.value.path, caught.value.line) == (("local", "rules", 0, "mu"), 4)


# --- rules of the user's own -----------------------------------------------------------------------


@dataclass(frozen=True)
class Third(Cover):
    """Every third device, and everything: not among ours."""

    parts: int = 3

    def cover(self, manifest: Any, profile: Any, batch: int | None = None, buffers: int = 1) -> str:
        return "strong"


@dataclass(frozen=True)
class Half(Average):
    """A server that goes half the way."""

    share: float = 0.5


@dataclass(frozen=True)
class Slow(WholeModel):
    """A synchronisation of its own."""

    every: int = 2


@dataclass(frozen=True)
class Nothing(LocalRule):
    """A local rule that changes nothing."""

    def begin(self, start: Start) -> Running:
        return Plain()


def test_a_rule_made_in_python_is_a_choice_on_any_axis() -> None:
    made = Plan("b", cover=Third(), sync=Slow(), local=LocalWork(rules=(Nothing(),)), serve=Serve(Half(), trim=0.2))
    tables = {"cover": Third(), "sync": Slow(), "local": {"rules": [Nothing()]}, "serve": {"rule": Half(), "trim": 0.2}}
    assert plan_from({"bundle": "b", **tables}) == made
    assert plan_from({"bundle": "b", "algorithm": "fedavg_sm", "serve": Half()}).serve == Serve(Half())
    for rule in ({"cover": Third()}, {"sync": Slow()}, {"local": {"rules": [Nothing()]}}, {"serve": Half()}):
        with pytest.raises(
            InputError, match="is a rule of your own: a coordinator's devices cannot run its code, simu"
        ):
            plan_to(plan_from({"bundle": "b", **rule}))
    named = plan_to(made, own_rules=True)
    assert named["cover"] == {"rule": f"{__name__}:Third", "parts": 3}
    assert plan_from(json.loads(json.dumps(named)), lambda name: globals()[name.partition(":")[2]]) == made


def test_a_job_file_may_name_a_file_where_it_is_resolved() -> None:
    text = 'bundle = "b"\nalgorithm = "domo"\n[serve]\nrule = "mine.py:Half"\nshare = 0.25\n'
    try:
        plan = parse_plan(text, {"mine.py:Half": Half}.__getitem__)
        assert plan.serve == Serve(Half(share=0.25))
        assert plan_to(plan)["serve"]["rule"] == "mine.py:Half"
    finally:
        del Half.__rule_reference__  # type: ignore[attr-defined]
    with pytest.raises(
        InputError, match=r"line 4: serve\.rule: expected average, .*, got 'mine.py:Half'; a coordinator"
    ):
        parse_plan(text)


def test_the_largest_seed_is_one_that_devices_take() -> None:
    plan = plan_from({"bundle": "b", "seed": 2**32 - 1})
    seed = task_seed(plan.seed, "d" * 12)
    assert decode_task(json.loads(json.dumps(encode_task(plan.local.task("strong", 0, seed))))).seed == seed
    assert seed < 2**53
