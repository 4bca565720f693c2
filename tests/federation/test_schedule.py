"""Learning rates by round: the papers' numbers, PyTorch's schedulers, and messages for what cannot be read."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from federation.errors import InputError
from federation.schedule import Schedule, parse_schedule, two_sided_rates


def test_the_rates_of_the_papers_resnet() -> None:
    schedule = parse_schedule("0.4/10@800,900")
    assert [schedule.at(r) for r in (0, 799)] == [0.4, 0.4]
    assert [schedule.at(r) for r in (800, 899, 900, 999)] == pytest.approx([0.04, 0.04, 0.004, 0.004], rel=1e-12)


def test_warm_up_climbs_to_the_rate() -> None:
    assert [Schedule(0.1, warm_up=5).at(r) for r in range(7)] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1])
    assert Schedule(0.1, warm_up=1).at(0) == 0.1


def test_cosine_starts_at_the_rate_and_ends_at_zero() -> None:
    schedule = Schedule(0.1, cosine_rounds=50)
    assert (schedule.at(0), schedule.at(50), schedule.at(1000)) == (0.1, 0.0, 0.0)
    assert schedule.at(25) == pytest.approx(0.05)
    assert 0 < schedule.at(49) < 1e-3


def test_cosine_begins_behind_the_warm_up() -> None:
    schedule = Schedule(0.1, warm_up=10, cosine_rounds=50)
    assert schedule.at(9) == schedule.at(10) == 0.1
    assert schedule.at(30) == pytest.approx(0.05)
    assert schedule.at(50) == 0


@pytest.mark.parametrize(
    ("schedule", "name", "options"),
    [
        (Schedule(0.4, decay_rounds=(7, 12, 13)), "MultiStepLR", {"milestones": [7, 12, 13], "gamma": 0.1}),
        (Schedule(0.4, decay_rounds=(5,), decay_factor=0.5), "MultiStepLR", {"milestones": [5], "gamma": 0.5}),
        (Schedule(0.1, cosine_rounds=20), "CosineAnnealingLR", {"T_max": 20}),
        (Schedule(0.1, warm_up=8), "LinearLR", {"start_factor": 1 / 8, "total_iters": 7}),
    ],
)
def test_pytorch_schedules_the_same(schedule: Schedule, name: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=schedule.rate)
    theirs = getattr(torch.optim.lr_scheduler, name)(optimiser, **options)
    for number in range(20):
        assert schedule.at(number) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-15)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the optimiser's step, of which there is none here
            theirs.step()


@given(
    st.builds(
        Schedule,
        st.floats(1e-6, 10),
        warm_up=st.integers(0, 5),
        decay_rounds=st.sets(st.integers(1, 40)).map(sorted).map(tuple),
        decay_factor=st.floats(0.1, 1),
    ),
    st.integers(0, 60),
)
@example(Schedule(0.1, warm_up=3), 2)  # 0.1 * 3 / 3 is more than 0.1
def test_never_above_the_rate_nor_below_zero(schedule: Schedule, number: int) -> None:
    assert 0 < schedule.at(number) <= schedule.rate


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("0.1", Schedule(0.1)),
        ("1e-3", Schedule(0.001)),
        ("0.4/10@800,900", Schedule(0.4, decay_rounds=(800, 900), decay_factor=0.1)),
        ("0.1/2@200", Schedule(0.1, decay_rounds=(200,), decay_factor=0.5)),
        ("0.1 cosine 50", Schedule(0.1, cosine_rounds=50)),
        ("0.1 warmup 5", Schedule(0.1, warm_up=5)),
        (" 0.1  warmup 5 cosine 50 ", Schedule(0.1, warm_up=5, cosine_rounds=50)),
        ("0.1 cosine 50 warmup 5", Schedule(0.1, warm_up=5, cosine_rounds=50)),
        ("0.4/10@80,90 warmup 5", Schedule(0.4, warm_up=5, decay_rounds=(80, 90))),
    ],
)
def test_schedules_as_text(text: str, schedule: Schedule) -> None:
    assert parse_schedule(text) == schedule


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not RATE or"),
        ("fast", "'fast' is not a number"),
        ("0.1/10", "'0.1/10' is not RATE or"),
        ("0.1@5", "'0.1@5' is not RATE or"),
        ("0.1/10@", "'0.1/10@' is not RATE or"),
        ("0.1/x@5", "'x' is not a number"),
        ("0.1/0@5", "the divisor must be at least 1, not 0"),
        ("0.1/nan@5", "the divisor must be at least 1, not nan"),
        ("0.1/10@5,", "'' is not a number of rounds"),
        ("0.1/10@5,-6", "'-6' is not a number of rounds"),
        ("0.1 warmup", "'' is not a number of rounds"),
        ("0.1 warmup five", "'five' is not a number of rounds"),
        ("0.1 warmup 9999999999", "'9999999999' is not a number of rounds"),
        ("0.1 cosine 50 warmup", "'' is not a number of rounds"),
        ("0.1 linear 5", "'linear' is no option"),
        ("0.1 0.2", "'0.2' is no option"),
        ("0.1 warmup 5 warmup 6", "'warmup' appears twice"),
    ],
)
def test_text_that_is_no_schedule(text: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        parse_schedule(text)
    assert str(error.value).startswith(f"schedule {text!r}: {reason}")
    assert str(error.value).endswith("expected RATE[/DIVISOR@ROUND,ROUND,...] [warmup ROUNDS] [cosine ROUNDS]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "rate: expected a finite number above 0, got 0"),
        ("inf", "rate: expected a finite number above 0, got inf"),
        ("nan", "rate: expected a finite number above 0, got nan"),
        ("0.1/10@900,800", r"decay_rounds: expected ascending numbers above 0, got \(900, 800\)"),
        ("0.1/10@0", r"decay_rounds: expected ascending numbers above 0, got \(0,\)"),
        ("0.1 warmup 5 cosine 5", "cosine_rounds: expected more than the 5 rounds of warm-up, got 5"),
        ("0.1/10@5 cosine 50", "expected either decay_rounds or cosine_rounds, got both"),
    ],
)
def test_text_that_can_be_read_but_makes_no_sense(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warm_up": -1}, "warm_up: expected 0 or more rounds, got -1"),
        ({"decay_factor": 0.0}, "decay_factor: expected a number above 0 and at most 1, got 0.0"),
        ({"decay_factor": 2.0}, "decay_factor: expected a number above 0 and at most 1, got 2.0"),
        ({"cosine_rounds": 0}, "cosine_rounds: expected more than the 0 rounds of warm-up, got 0"),
    ],
)
def test_constants_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(0.1, **change)


def test_rounds_are_counted_from_zero() -> None:
    with pytest.raises(InputError, match="round_number: expected 0 or more, got -1"):
        Schedule(0.1).at(-1)


def test_two_sided_rates() -> None:
    local, server = two_sided_rates(rounds=100, steps=5, cohort=20, smoothness=2.0)
    assert (local, server) == pytest.approx((1 / (10 * 5 * 2), 10))
    assert local * server == pytest.approx(math.sqrt(20 / 5) / (10 * 2.0))


@pytest.mark.parametrize("bad", [(0, 1, 1, 1.0), (1, 0, 1, 1.0), (1, 1, 0, 1.0), (1, 1, 1, 0.0), (1, 1, 1, math.nan)])
def test_two_sided_rates_of_nothing(bad: tuple[int, int, int, float]) -> None:
    with pytest.raises(InputError, match="expected rounds, steps and cohort of at least 1 and a finite smoothness"):
        two_sided_rates(*bad)
