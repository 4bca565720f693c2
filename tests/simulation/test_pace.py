"""Simulated devices that are late: who counts is decided by the rules of a coordinator's round."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch")

from federation.axes.participate import Participation
from federation.cohort import Cohort, Member, Seat
from federation.errors import EmbraceError, FieldError
from federation.traffic import Traffic
from simulation.pace import Pace, play
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from tests.simulation.test_simulate import fleet_of


def cohort(count: int, wanted: int, rule: Participation) -> Cohort:
    seats = tuple(Seat(number, Member(f"device-{number}", "stem", 3)) for number in range(count))
    return Cohort(seats, wanted, rule.quorum_of(wanted))


def test_seconds_follow_from_arithmetic_link_and_tier():
    pace = Pace(gigamacs=2.0, tiers={"strong": 8.0}, up=4.0, down=8.0, spread=0.0)
    moved = Traffic({"a": 500_000}, {"a": 2_000_000}, 2)  # 1 s and 2 s
    assert pace.seconds(1, "device-a", "weak", 0, 6e9, moved) == pytest.approx(3 + 1 + 2)
    assert pace.seconds(1, "device-a", "strong", 0, 6e9, moved) == pytest.approx(0.75 + 1 + 2)


def test_luck_has_the_spread_that_is_asked_for_and_is_repeated():
    pace, nothing = Pace(spread=0.5), Traffic()
    drawn = np.log([[pace.seconds(3, f"device-{d}", None, n, 1e9, nothing) for n in range(20)] for d in range(200)])
    assert drawn.std() == pytest.approx(0.5, rel=0.1)
    assert drawn.mean(axis=1).std() == pytest.approx(0.5 / math.sqrt(2), rel=0.15), "a slow device is slow again"
    assert pace.seconds(3, "device-5", None, 7, 1e9, nothing) == pytest.approx(math.exp(drawn[5, 7]))


def test_over_selected_devices_that_come_last_do_not_count():
    rule = Participation(count=3, over_select=0.5, quorum=1.0)
    played = play(0, 1, rule, cohort(5, 3, rule), {0: 9.0, 1: 1.0, 2: 2.0, 3: 50.0, 4: 3.0})
    assert (played.counted, played.seconds) == ((1, 2, 4), 3.0)


def test_a_quorum_waits_until_the_rest_is_late():
    rule = Participation(count=4, quorum=0.5, lateness=2.0, grace=0.1)
    times = {0: 10.0, 1: 10.0, 2: 12.0, 3: 100.0}
    played = play(0, 1, rule, cohort(4, 4, rule), times)
    # The usual task of those that came took 10 s, so the last one is late after twice that.
    assert played.counted == (0, 1, 2)
    assert played.seconds == pytest.approx(20.0)
    patient = Participation(count=4, quorum=1.0)
    assert play(0, 1, patient, cohort(4, 4, patient), times).seconds == 100.0


def test_a_deadline_closes_a_round_that_has_its_quorum():
    rule = Participation(count=4, quorum=2, deadline=15.0)
    played = play(0, 1, rule, cohort(4, 4, rule), {0: 10.0, 1: 11.0, 2: 16.0, 3: 17.0})
    assert played.counted == (0, 1) and played.seconds == pytest.approx(15.0)
    strict = Participation(count=4, quorum=4, deadline=15.0, on_missing_quorum="fail")
    with pytest.raises(EmbraceError, match="round 1 was abandoned: 2 of 4 at the deadline"):
        play(0, 1, strict, cohort(4, 4, strict), {0: 10.0, 1: 11.0, 2: 16.0, 3: 17.0})


@pytest.mark.parametrize(
    "key, wrong", [("gigamacs", {"gigamacs": 0.0}), ("spread", {"spread": -1.0}), ("tiers", {"tiers": {"weak": 0.0}})]
)
def test_wrong_numbers_are_refused(key, wrong):
    with pytest.raises(FieldError, match=key):
        Pace(**wrong)


# --- in a simulation -------------------------------------------------------------------------------------------------

PACE = {"tiers": {"strong": 4.0}, "spread": 1.0}
TIERS = {"strong": 6, "moderate": 4, "weak": 10}


def simulation(bundle, folder, participate, pace=PACE, rounds=3):
    fleet = {"tiers": TIERS, **({"pace": pace} if pace else {})}
    job = {"num_rounds": rounds, "participate": participate, "simulate": fleet}
    return Simulation(fleet_of(bundle, job), folder, Options("torch", 1, InlinePool, evaluate_every=0))


def test_the_quickest_of_the_invited_are_trained(bundle_of, tmp_path):
    made = simulation(bundle_of("digits"), tmp_path, {"count": 8, "over_select": 0.5, "quorum": 1.0, "balance": False})
    invited = made.server.invite()
    took = {seat.device: made._seconds_of(seat, 0) for seat in invited.seats}
    assert len(took) == 12 and sorted(invited.took.values()) == sorted(took.values())[:8]
    assert invited.seconds == max(invited.took.values())
    rounds = made.run().rounds
    assert [(line["devices"], line["late"]) for line in rounds] == [(8, 4)] * 3
    assert rounds[0]["round_seconds"] == invited.seconds


def test_a_round_that_waits_for_every_device_is_one_without_a_pace(bundle_of, tmp_path):
    waits = {"count": 6, "quorum": 1.0}
    bundle = bundle_of("digits")
    for name, pace in (("paced", PACE), ("plain", None)):
        simulation(bundle, tmp_path / name, waits, pace).run()
    paced, plain = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("paced", "plain"))
    assert paced == plain


def test_a_run_that_is_late_goes_on_where_it_was(bundle_of, tmp_path, monkeypatch):
    monkeypatch.setattr("simulation.simulate.CHECKPOINT_SECONDS", -1.0)
    hurries = {"count": 8, "quorum": 0.25, "lateness": 1.0, "grace": 0.001}
    whole = simulation(bundle_of("digits"), tmp_path / "whole", hurries, rounds=4).run().rounds
    assert any(line["late"] for line in whole)

    def stop(record):
        if record["round"] == 1:
            raise InterruptedError

    broken = simulation(bundle_of("digits"), tmp_path / "broken", hurries, rounds=4)
    with pytest.raises(InterruptedError):
        broken.run(on_round=stop)
    again = simulation(bundle_of("digits"), tmp_path / "broken", hurries, rounds=4).run().rounds
    keys = ("late", "round_seconds", "loss", "devices")
    assert [[line[key] for key in keys] for line in again] == [[line[key] for key in keys] for line in whole]
