"""Traffic: cases computed by hand, and the megabytes that papers published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.errors import InputError
from federation.traffic import (
    Link,
    Traffic,
    communication_cost,
    relative_cost,
    round_seconds,
    total_of,
    traffic_of,
)

MODEL = {"stem": 100, "middle": 50, "classifier": 10}


def test_a_strong_and_a_weak_device():
    """Both receive everything; the weak one sends its last layer only."""
    strong, weak = traffic_of(MODEL, MODEL), traffic_of({"classifier": 10}, MODEL)
    assert (strong.bytes_up, strong.bytes_down, strong.messages) == (640, 640, 2)
    assert (weak.bytes_up, weak.bytes_down, weak.total) == (40, 640, 680)
    both = strong + weak
    assert both.up == {"stem": 400, "middle": 200, "classifier": 80}
    assert both.down == {"stem": 800, "middle": 400, "classifier": 80}
    assert both.messages == 4


def test_nothing_is_no_message():
    assert traffic_of({}, MODEL).messages == 1
    assert traffic_of({"stem": 0}, {}).messages == 0
    assert total_of([]) == Traffic() and total_of([]).total == 0


# Yang, Fang and Liu (ICLR 2021), table 2, IID, n = 10: three rounds, megabytes (of 2^20 bytes) of one worker.
PUBLISHED = [("LR", 7_850, 0.18, 0.36), ("2NN", 199_210, 4.56, 9.12), ("CNN", 582_026, 13.32, 26.64)]


@pytest.mark.parametrize(("parameters", "fedavg", "scaffold"), [row[1:] for row in PUBLISHED], ids=["LR", "2NN", "CNN"])
def test_the_published_megabytes(parameters: int, fedavg: float, scaffold: float):
    model = {"all": parameters}
    for tracks, published in ((1, fedavg), (2, scaffold)):
        three_rounds = total_of([traffic_of(model, model, tracks=tracks)] * 3)
        assert three_rounds.total / 2**20 == pytest.approx(published, abs=0.006)


def test_fedlamas_cost_by_hand():
    """τ' = 10, φ = 2 for 40 steps: the stem twice, the others four times; FedAvg(10) everything four times."""
    counts = {"stem": 2, "middle": 4, "classifier": 4}
    assert communication_cost(MODEL, counts) == 200 + 200 + 40
    assert relative_cost(MODEL, counts, full=4) == 440 / 640
    assert relative_cost(MODEL, dict.fromkeys(MODEL, 4), full=4) == 1.0
    assert relative_cost(MODEL, dict.fromkeys(MODEL, 1), full=4) == 0.25
    assert communication_cost(MODEL, {}) == 0


def test_the_cost_is_the_bytes_that_one_device_sends():
    counts = {"stem": 2, "middle": 4, "classifier": 4}
    rounds = [{"middle": 50, "classifier": 10}, MODEL] * 2
    assert total_of(traffic_of(sent, {}) for sent in rounds).bytes_up == 4 * communication_cost(MODEL, counts)


def test_seconds_on_a_link():
    link = Link(up=1e6, down=8e6, round_trip=0.05)
    traffic = traffic_of({"all": 250_000}, {"all": 500_000})  # 8 Mbit up, 16 Mbit down
    assert link.seconds(traffic) == pytest.approx(8 + 2 + 2 * 0.05)
    assert Link(1e6, 1e6, 0.05).seconds(Traffic(messages=100)) == pytest.approx(5)


def test_partial_averaging_moves_the_same_bytes_in_more_messages():
    """τ = 4: a quarter after every step, instead of everything after four."""
    link = Link(1e6, 1e6, 0.1)
    periodic = traffic_of({"all": 4_000}, {"all": 4_000})
    partial = total_of([traffic_of({"all": 1_000}, {"all": 1_000})] * 4)
    assert partial.total == periodic.total and partial.messages == 4 * periodic.messages
    assert link.seconds(partial) - link.seconds(periodic) == pytest.approx(6 * 0.1)


def test_a_round_is_as_long_as_its_slowest_device_or_the_servers_link():
    one = traffic_of({"all": 125_000}, {})  # 4 Mbit, one message
    fast, slow = Link(4e6, 1e6, 0.5), Link(1e6, 1e6)
    assert round_seconds([(one, fast), (one, slow)]) == pytest.approx(4.0)
    assert round_seconds([(one, fast)] * 10) == pytest.approx(1.5)
    assert round_seconds([(one, fast)] * 10, Link(10e6, 10e6)) == pytest.approx(4.0)  # 40 Mbit through 10 Mbit/s
    assert round_seconds([(one, fast)] * 10, Link(1e9, 1e9, 9.0)) == pytest.approx(1.5)
    assert round_seconds([]) == round_seconds([], fast) == 0.0


layers = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000))
some = st.builds(Traffic, layers, layers, st.integers(0, 10))


@given(some, some, some)
def test_traffic_adds_up_in_any_order(a: Traffic, b: Traffic, c: Traffic):
    assert (a + b) + c == a + (b + c) and a + b == b + a and a + Traffic() == a
    assert (a + b).total == a.total + b.total
    link = Link(3.0, 5.0, 0.5)
    assert link.seconds(a + b) == pytest.approx(link.seconds(a) + link.seconds(b))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traffic_of({"stem": -1}, {}), "expected 0 or more elements of 'stem', got -1"),
        (lambda: traffic_of({}, {}, tracks=0), "at least 1 track"),
        (lambda: communication_cost(MODEL, {"head": 1}), "expected layers of the model, got head"),
        (lambda: communication_cost(MODEL, {"stem": -1}), "counts of 0 or more"),
        (lambda: relative_cost(MODEL, {}, 0), "at least 1 full synchronisation, got 0"),
        (lambda: Link(0, 1), "bits per second above 0"),
        (lambda: Link(1, 1, -1), "round trip of 0 or more seconds"),
        (lambda: Link(float("nan"), 1), "bits per second above 0"),
    ],
)
def test_what_makes_no_sense(call, message: str):
    with pytest.raises(InputError, match=message):
        call()
