"""Constants that switch a rule off give FedAvg, bit for bit.

FedAdagrad has no such constants: its v grows with every update.
"""

from __future__ import annotations

import numpy as np
import pytest

from federation.algorithms import PUBLISHED
from federation.layout import MODEL
from tests.laws.world import TIERS, Fleet

ROUNDS = 4
MIXED = {1: "moderate", 2: "weak", 3: "weak"}
ADAM = {"beta1": 0.0, "beta2": 1.0, "tau": 1.0, "initial": 0.0, "rate": 1.0}
NO_MOMENTUM = {"rule": "momentum", "factor": 0.0}
AVERAGED = {**NO_MOMENTUM, "between": "average"}
WITHOUT = {
    "fedavg_sm": {"serve": {"factor": 0.0}},
    "fedavg_lm": {"local": {"rules": [AVERAGED]}},
    "fedavg_lm_z": {"local": {"rules": [NO_MOMENTUM]}},
    "fedavg_slm": {"local": {"rules": [AVERAGED]}, "serve": {"factor": 0.0}},
    "fedavg_slm_z": {"local": {"rules": [NO_MOMENTUM]}, "serve": {"factor": 0.0}},
    "domo": {
        "local": {"rules": [NO_MOMENTUM, {"rule": "server_momentum", "beta": 0.0, "when": "before"}]},
        "serve": {"factor": 0.0},
    },
    "domo_s": {
        "local": {"rules": [NO_MOMENTUM, {"rule": "server_momentum", "beta": 0.0, "when": "every_step"}]},
        "serve": {"factor": 0.0},
    },
    "fedprox": {"local": {"rules": [{"rule": "proximal", "mu": 0.0}]}},
    "fednova": {"weigh": {"by": "uniform"}},  # all devices make as many steps
    "fedlama": {"sync": {"factor": 1}},
    "partial_averaging": {"sync": {"parts": 1}, "local": {"rules": []}},
    "fedadam": {"serve": ADAM},
    "fedyogi": {"serve": ADAM},
}
STRONG = ("embracing", "heterofl", "fjord", "inclusivefl")  # equal FedAvg if all devices train everything
FIRST_ROUND = ("scaffold", "vrl_sgd")  # as long as control variates are zero


def history(tmp_path, name: str, job: dict, participate: dict, steps: int, **fleet) -> list[np.ndarray]:
    local = {"steps": steps, "rate": "0.2/2@2", **job.get("local", {})}
    told = {"num_rounds": ROUNDS, "participate": participate, **job, "algorithm": name, "local": local}
    rounds = Fleet(told, tmp_path / name, statistics=True, **fleet).rounds()
    return [each.vectors[MODEL] for each in rounds]


def assert_same_bits(mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(mine) == len(theirs) > 0
    for number, (one, other) in enumerate(zip(mine, theirs)):
        assert one.tobytes() == other.tobytes(), f"round {number}"


@pytest.mark.parametrize("participate", [{}, {"count": 3, "window": 10}, {"count": 4, "replacement": True}], ids=str)
@pytest.mark.parametrize("name", WITHOUT)
def test_constants_that_switch_a_rule_off_give_fedavg(tmp_path, name, participate):
    if name == "partial_averaging" and "replacement" in participate:
        participate = {**participate, "window": 10}  # rounds for which it keeps a cohort anyway
    for tiers in ({}, MIXED):
        for steps in (3, 4):
            plain = history(tmp_path, "fedavg", {}, participate, steps, tiers=tiers)
            mine = history(tmp_path, name, WITHOUT[name], participate, steps, tiers=tiers)
            assert_same_bits(mine, plain)


@pytest.mark.parametrize("participate", [{}, {"count": 2}], ids=str)
@pytest.mark.parametrize("name", STRONG)
def test_with_strong_devices_only_every_cover_is_fedavgs(tmp_path, name, participate):
    widths = () if name == "fjord" else (0.5, 0.25)  # FjORD draws among all widths that there are
    job = {"local": {"rules": []}, "cover": {"tiers": TIERS}}
    plain = history(tmp_path, "fedavg", {}, participate, 3, widths=widths)
    assert_same_bits(history(tmp_path, name, job, participate, 3, widths=widths), plain)


@pytest.mark.parametrize("name", FIRST_ROUND)
def test_without_control_variates_the_first_round_is_fedavgs(tmp_path, name):
    plain, mine = (history(tmp_path, each, {}, {}, 3, tiers=MIXED) for each in ("fedavg", name))
    assert_same_bits(mine[:1], plain[:1])
    assert mine[1].tobytes() != plain[1].tobytes()


def test_every_published_algorithm_is_looked_at():
    assert {*WITHOUT, *STRONG, *FIRST_ROUND, "fedavg", "fedadagrad"} == set(PUBLISHED)
