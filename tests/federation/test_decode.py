"""One decoder for everything: what is read, what is refused and where, and rules of the user's own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.axes.cover import COVER
from federation.axes.local import LOCAL, ControlVariate, LocalRule, Momentum, Proximal, ServerMomentum, WeightDecay
from federation.axes.local.rule import Plain, Running, Start
from federation.axes.serve import SERVE, Adam, Average, ServeRule
from federation.axes.sync import SYNC
from federation.decode import ABSENT, Axis, decode, encode
from federation.errors import FieldError, InputError
from federation.messages import Task, decode_task, encode_task


@dataclass(frozen=True)
class Inner:
    share: float = 0.5
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise FieldError("share", f"expected a share, got {self.share}")
        if "" in self.names:
            raise InputError("an empty name")


@dataclass(frozen=True)
class Outer:
    number: int
    word: Literal["a", "b"] = "a"
    inner: Inner = field(default_factory=Inner)
    items: tuple[Inner, ...] = ()
    table: dict[str, Inner] = field(default_factory=dict)
    quorum: float | int = 1.0
    maybe: int | None = None
    on: bool = False
    anything: Any = None
    later: int = field(default=7, metadata=ABSENT)


@dataclass(frozen=True)
class Shared:
    rule: Annotated[ServeRule, SERVE] = field(default_factory=Average)
    combine: str = "mean"


def refused(kind: Any, value: Any, where: str = "", **how: Any) -> FieldError:
    with pytest.raises(FieldError) as caught:
        decode(kind, value, where, **how)
    return caught.value


WHOLE = Outer(
    3, "b", Inner(0.25, ("x", "y")), (Inner(), Inner(1.0)), {"k": Inner(0.0)}, 2, None, True, {"a": [1, None]}, 9
)


def test_what_is_written_is_read() -> None:
    assert decode(Outer, json.loads(json.dumps(encode(WHOLE)))) == WHOLE
    assert decode(Outer, {"number": 1}, defaults=True) == Outer(1)


def test_without_defaults_every_field_must_be_given_but_those_that_came_later() -> None:
    written = encode(WHOLE)
    del written["later"]
    assert decode(Outer, written).later == 7
    del written["maybe"]
    error = refused(Outer, written)
    assert (error.path, error.message) == (("maybe",), "required, and not given")
    assert refused(Outer, {}, "job", defaults=True).path == ("job", "number")


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"number": 1.0}, ("number",), "expected int, got '1.0'"),
        ({"number": True}, ("number",), "expected int, got 'True'"),
        ({"number": 2**62}, ("number",), "expected an integer below 2^62, got '4611686018427387904'"),
        ({"number": -(2**62)}, ("number",), "expected an integer below 2^62, got '-4611686018427387904'"),
        ({"number": 16**9000}, ("number",), "expected an integer below 2^62, got an integer of very many digits"),
        ({"word": "c"}, ("word",), "expected 'a' or 'b', got 'c'"),
        ({"word": ["a"]}, ("word",), "expected 'a' or 'b', got \"['a']\""),
        ({"inner": 3}, ("inner",), "expected an object, got '3'"),
        ({"inner": {"share": "1"}}, ("inner", "share"), "expected a number, got '1'"),
        ({"inner": {"share": False}}, ("inner", "share"), "expected a number, got 'False'"),
        ({"inner": {"share": 10**400}}, ("inner", "share"), f"expected a finite number, got '1{'0' * 79}'"),
        ({"inner": {"share": 7}}, ("inner", "share"), "expected a share, got 7.0"),
        ({"inner": {"share": math.nan}}, ("inner", "share"), "expected a share, got nan"),
        ({"inner": {"names": "xy"}}, ("inner", "names"), "expected a list, got 'xy'"),
        ({"inner": {"names": ["x", 1]}}, ("inner", "names", 1), "expected str, got '1'"),
        ({"inner": {"names": [""]}}, ("inner",), "an empty name"),
        ({"items": [{}, {"share": 2}]}, ("items", 1, "share"), "expected a share, got 2.0"),
        ({"table": []}, ("table",), "expected an object, got '[]'"),
        (
            {"table": {"k": {"shares": 1}}},
            ("table", "k", "shares"),
            "no such key; expected names, share; did you mean 'share'?",
        ),
        ({"quorum": None}, ("quorum",), "expected a number, got 'None'"),
        ({"quorum": 2**70}, ("quorum",), "expected an integer below 2^62, got '1180591620717411303424'"),
        ({"maybe": "1"}, ("maybe",), "expected int, got '1'"),
        ({"on": 1}, ("on",), "expected true or false, got '1'"),
    ],
)
def test_an_error_leads_to_the_value(change: dict[str, Any], path: tuple[str | int, ...], message: str) -> None:
    error = refused(Outer, {"number": 1, **change}, defaults=True)
    assert (error.path, error.message) == (path, message)
    assert refused(Outer, {"number": 1, **change}, "job", defaults=True).path == ("job", *path)


def test_integers_and_shares_stay_apart() -> None:
    assert [type(decode(Outer, {"number": 1, "quorum": q}, defaults=True).quorum) for q in (1, 1.0)] == [int, float]


NAMES = st.sampled_from([*Outer.__annotations__, *Task.__annotations__, "rule", "share", ""])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
        max_leaves=20,
    )
)
def test_any_json_is_read_or_refused_with_a_path(value: Any) -> None:
    for kind in (Outer, Shared, Task):
        try:
            decode(kind, value, "x", defaults=True)
        except FieldError as error:
            assert error.path[0] == "x" and str(error).startswith("x")


# --- rules ---------------------------------------------------------------------------------------------------------

CONSTANT = st.floats(0, 1e30)
CHAINS = st.tuples(
    st.permutations(
        [
            st.builds(WeightDecay, CONSTANT),
            st.builds(Proximal, CONSTANT),
            st.builds(Momentum, st.floats(0, 1, exclude_max=True), st.booleans()),
            st.just(ControlVariate()),
        ]
    ),
    st.integers(0, 4),
    st.lists(st.builds(ServerMomentum, CONSTANT, st.sampled_from(["before", "every_step"])), max_size=1),
).flatmap(lambda drawn: st.tuples(*drawn[0][: drawn[1]], *map(st.just, drawn[2])))
TASK = Task("weak", 1, 1, 0.1)


def rules_of(data: Any) -> tuple[LocalRule, ...]:
    return decode_task({**encode_task(TASK), "rules": data}).rules


@given(CHAINS)
def test_rules_survive_the_way_through_json(rules: tuple[LocalRule, ...]) -> None:
    task = Task("weak", 1, 1, 0.1, rules)
    assert decode_task(json.loads(json.dumps(encode_task(task)))) == task


def test_golden_json() -> None:
    rules = (WeightDecay(0.0001), Momentum(0.9), ServerMomentum(0.9, "before"))
    golden = (
        '[{"rule": "weight_decay", "factor": 0.0001}, '
        '{"rule": "momentum", "factor": 0.9, "nesterov": false, "between": "reset"}, '
        '{"rule": "server_momentum", "beta": 0.9, "when": "before"}]'
    )
    assert json.dumps(encode_task(Task("weak", 1, 1, 0.1, rules))["rules"]) == golden
    assert rules_of(json.loads(golden.replace(', "between": "reset"', ""))) == rules  # as earlier programs wrote it


def test_what_has_a_default_may_be_left_out_and_integers_are_numbers() -> None:
    assert rules_of([{"rule": "momentum", "factor": 0}]) == (Momentum(0.0),)
    assert rules_of([]) == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "task.rules: expected a list, got '{}'"),
        (["momentum"], r"rules\[0\]: expected a table, got 'momentum'"),
        (
            [{}],
            r"rules\[0\].rule: expected adam, adamw, control_variate, momentum, .*, weight_decay, got",
        ),
        ([{"rule": ["momentum"]}], r"rules\[0\].rule: expected adam, .* got \"\['momentum'\]\""),
        ([{"rule": "lion"}], r"rules\[0\].rule: expected adam, .* got 'lion'$"),
        ([{"rule": "momentun"}], r"rules\[0\].rule: .* got 'momentun'; did you mean 'momentum'\?"),
        ([{"rule": "proximal", "nu": 1}], r"rules\[0\].nu: not a constant of the rule 'proximal', which has only mu"),
        ([{"rule": "control_variate", "c": 1}], r"rules\[0\].c: not a constant of the rule .* has only origin$"),
        (
            [{"rule": "control_variate", "origin": "mine"}],
            r"rules\[0\].origin: expected 'exchanged' or 'own', got 'mine'",
        ),
        (
            [{"rule": "momentum", "factor": 0.9, "between": "lose"}],
            r"rules\[0\].between: expected 'reset' or 'keep' or 'average', got 'lose'",
        ),
        ([{"rule": "proximal"}], r"rules\[0\].mu: required, and not given"),
        ([{"rule": "proximal", "mu": "1"}], r"rules\[0\].mu: expected a number, got '1'"),
        ([{"rule": "proximal", "mu": True}], r"rules\[0\].mu: expected a number, got 'True'"),
        ([{"rule": "proximal", "mu": None}], r"rules\[0\].mu: expected a number, got 'None'"),
        ([{"rule": "proximal", "mu": 10**400}], r"rules\[0\].mu: expected a finite number, got '1000"),
        ([{"rule": "proximal", "mu": float("nan")}], r"rules\[0\].mu: expected a number in .* got nan"),
        ([{"rule": "proximal", "mu": -1}], r"rules\[0\].mu: expected a number in .* got -1"),
        (
            [{"rule": "proximal", "mu": 1}, {"rule": "momentum", "factor": 0.9, "nesterov": 1}],
            r"rules\[1\].nesterov: expected true or false, got '1'",
        ),
        (
            [{"rule": "server_momentum", "beta": 1, "when": []}],
            r"rules\[0\].when: expected 'before' or 'every_step', got '\[\]'",
        ),
        ([{"rule": "proximal", "mu": 1}] * 2, "task.rules: expected every rule at most once, got Proximal 2 times"),
        (
            [{"rule": "mine.py:Mine"}],
            r"rules\[0\].rule: .*, got 'mine.py:Mine'; a coordinator and its devices run no code",
        ),
    ],
)
def test_json_that_is_no_rule(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rules_of(data)


def test_a_rule_shares_its_table_with_what_stands_beside_it() -> None:
    assert decode(Shared, {"rule": "adam", "combine": "median", "tau": 1}, defaults=True) == Shared(
        Adam(tau=1.0), "median"
    )
    assert decode(Shared, {"rate": 2}, defaults=True) == Shared(Average(2.0))
    assert encode(Shared(Average(2.0))) == {"rule": "average", "rate": 2.0, "combine": "mean"}
    assert str(refused(Shared, {"rate": -1}, "serve", defaults=True)).startswith("serve.rate: expected a number in")
    error = refused(Shared, {"combin": "median"}, "serve", defaults=True)
    assert str(error) == (
        "serve.combin: not a constant of the rule 'average', which has only rate; did you mean 'combine'?"
    )


@pytest.mark.parametrize("axis", [COVER, LOCAL, SERVE, SYNC])
def test_names_and_classes_of_an_axis_are_one_to_one(axis: Axis) -> None:
    assert len(set(axis.kinds.values())) == len(axis.kinds)
    assert axis.default is None or axis.default == next(iter(axis.kinds))


# --- rules of the user's own ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signs(LocalRule):
    """signSGD's direction, which is not among ours."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise FieldError("scale", f"expected a number above 0, got {self.scale}")

    def begin(self, start: Start) -> Running:
        return Plain()


class NoDataclass(LocalRule):
    def begin(self, start: Start) -> Running:
        return Plain()


@dataclass(frozen=True)
class Unfinished(LocalRule):
    """Says nothing about its steps."""


@dataclass
class Changing(NoDataclass):
    scale: float = 1.0


def found(reference: str) -> type[Any]:
    name = reference.removeprefix("mine.py:")
    if name not in ("Signs", "NoDataclass", "Inner", "Unfinished"):
        raise InputError(f"mine.py has no {name}")
    kind: type[Any] = globals()[name]
    return kind


def with_rules(*rules: Any, resolve: Any = found) -> Task:
    told = {**encode_task(TASK), "rules": list(rules)}
    return decode(Task, told, defaults=True, resolve=resolve)


def test_a_rule_made_in_python_is_a_choice_and_has_a_name_only_for_processes_that_can_import_it() -> None:
    task = with_rules(Signs(2.0), {"rule": "momentum", "factor": 0.9}, resolve=None)
    assert task.rules == (Signs(2.0), Momentum(0.9)) == Task("weak", 1, 1, 0.1, (Signs(2.0), Momentum(0.9))).rules
    with pytest.raises(InputError, match="Signs is a rule of your own: a coordinator's devices cannot run its code"):
        encode_task(task)
    assert encode(task, own_rules=True)["rules"][0] == {"rule": f"{__name__}:Signs", "scale": 2.0}


def test_a_rule_from_a_file_is_written_as_the_job_named_it() -> None:
    try:
        task = with_rules({"rule": "mine.py:Signs", "scale": 3})
        assert task.rules == (Signs(3.0),)
        written = encode_task(task)
        assert written["rules"] == [{"rule": "mine.py:Signs", "scale": 3.0}]
        assert decode(Task, written, defaults=True, resolve=found) == task
        with pytest.raises(InputError, match="run no code of a job, simulations do"):
            decode_task(written)
    finally:
        del Signs.__rule_reference__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rule": "mine.py:Other"}, r"^rules\[0\].rule: mine.py has no Other"),
        ({"rule": "mine.py:NoDataclass"}, r"^rules\[0\].rule: expected a frozen dataclass, and NoDataclass is none"),
        ({"rule": "mine.py:Inner"}, r"^rules\[0\].rule: expected a class derived from LocalRule, and Inner is none"),
        ({"rule": "mine.py:Unfinished"}, r"^rules\[0\].rule: Unfinished lacks begin"),
        (Changing(), r"^rules\[0\].rule: expected a frozen dataclass, and Changing is none"),
        (Inner(), r"^rules\[0\].rule: expected a class derived from LocalRule, and Inner is none"),
        ({"rule": Signs(), "scale": 2}, r"^rules\[0\].scale: not a constant of the rule 'Signs', which has none"),
    ],
)
def test_classes_that_are_no_rule(rule: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_rules(rule)
