"""The table of a round: every fact in every state, no way back; and rounds as JSON."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from federation.cohort import AcceptUpdate, GrantLease, OfferTask
from federation.errors import EmbraceError, InputError
from federation.rounds import (
    TRANSITIONS,
    Abandon,
    CloseFailed,
    CloseRequested,
    Committed,
    Event,
    Round,
    RoundError,
    State,
    advance,
    decode,
    encode_head,
)
from tests.federation.round_examples import EXAMPLES, FACTS, encoded

REFUSED = {
    ("selecting", CloseRequested),
    ("selecting", Committed),
    ("collecting", Committed),
    ("abandoned", Committed),
    ("committed", Abandon),
    *((state, CloseFailed) for state in get_args(State) if state != "closing"),
}


def test_the_examples_are_what_they_are_called_and_all_facts_are_there() -> None:
    assert {state: round.state for state, round in EXAMPLES.items()} == {state: state for state in get_args(State)}
    assert {type(fact) for fact in FACTS} == set(get_args(Event))


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_every_fact_in_every_state_is_in_the_table_or_refused(state: State, fact: Event) -> None:
    if (state, type(fact)) in REFUSED:
        assert (state, type(fact)) not in TRANSITIONS
        with pytest.raises(RoundError, match=f"round 3 is {state}: {type(fact).__name__} is not possible"):
            advance(EXAMPLES[state], fact, 3.0)
        return
    after, _ = advance(EXAMPLES[state], fact, 3.0)
    to = TRANSITIONS[state, type(fact)]
    follow = {TRANSITIONS[key] for key in TRANSITIONS if key[0] == to and isinstance(key[1], str)}
    assert after.state in {to} | follow


def test_the_table_has_no_way_back_and_its_ends_are_ends() -> None:
    order: tuple[State, ...] = get_args(State)
    assert all(order.index(to) >= order.index(state) for (state, _), to in TRANSITIONS.items())
    for end in ("committed", "abandoned"):
        assert {to for (state, _), to in TRANSITIONS.items() if state == end} == {end}


@pytest.mark.parametrize("state", ["closing", "committed", "abandoned"])
@pytest.mark.parametrize("fact", FACTS[:11], ids=lambda fact: type(fact).__name__)
def test_nothing_that_devices_do_changes_a_closed_round(state: State, fact: Event) -> None:
    after, effects = advance(EXAMPLES[state], fact, 1e6)
    assert after == EXAMPLES[state]
    assert not any(isinstance(effect, (AcceptUpdate, GrantLease, OfferTask)) for effect in effects)


def test_a_conflict_has_its_status() -> None:
    assert issubclass(RoundError, EmbraceError)
    assert RoundError.status == 409


@pytest.mark.parametrize("round", EXAMPLES.values(), ids=EXAMPLES)
def test_rounds_survive_json(round: Round) -> None:
    head, seats = encoded(round)
    assert decode(head, seats) == decode(*json.loads(json.dumps([head, seats]))) == round


@pytest.mark.parametrize(
    "change",
    [
        {"state": "asleep"},
        {"slots": []},
        {"colour": "red"},
        {"number": -1},
        {"number": "one"},
        {"lease": 0.0},
        {"wanted": 1},
        {"quorum": 4},
    ],
)
def test_what_is_no_round_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="round"):
        decode({**encode_head(EXAMPLES["closing"]), **change}, encoded(EXAMPLES["closing"])[1])


@pytest.mark.parametrize("seats", [[{}], [], "missing"])
def test_what_are_no_seats_is_refused(seats: Any) -> None:
    head, known = encoded(EXAMPLES["closing"])
    with pytest.raises(InputError, match="round"):
        decode(head, known[1:] if seats == "missing" else seats)
