"""Figures that tables make of runs: distances of local models, bytes, a device's work and memory, similarities."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from bench.papers import TABLES
from bench.papers.combinations import ALL_STRONG, BUDGET, BYTES, MEMORY, SHARE, WORK
from bench.papers.embracing import CASES, EMBRACING, JOINED, WIDTH
from bench.papers.partial_averaging import distances, highest_distance
from bench.papers.report import means
from bench.papers.runner import Workplace, reproduce
from bench.papers.similarity import PLACES
from federation.job import plan_from
from simulation.runs import Run


@pytest.mark.parametrize(
    ("sync", "steps", "highest"),
    [
        ({"rule": "rotating", "parts": 2}, 1, 6.0),  # rows (1, 4), (2, 5), (7, 0): the second half has 5 and 7
        ({"rule": "all"}, 2, 6.0),
        ({"rule": "all"}, 1, 4.0),  # every step is a row: 5, 7 and 0
    ],
)
def test_the_distance_of_local_models_is_the_whole_models_after_every_step(tmp_path, sync, steps, highest):
    apart = [[1.0, 4.0], [2.0, 5.0], [7.0, 0.0]]
    rows = [{"round": number, "apart": values} for number, values in enumerate(apart)]
    run = Run("run", rows, {"job": {"sync": sync, "local": {"steps": steps}}}, tmp_path)
    at, found = distances(run)
    assert at.tolist() == [1, 2, 3, 4, 5, 6] and found.tolist() == [1, 4, 2, 5, 7, 0]
    assert highest_distance(run) == highest


def test_devices_that_have_not_joined_yet_have_their_data_and_never_take_part(tmp_path):
    found = reproduce(TABLES["embracing-scaling"], "smoke", 1, Workplace(tmp_path))
    devices = {result.row.label: {row["devices"] for row in result.runs[0].rounds} for result in found.rows}
    assert devices[f"{EMBRACING}, 2 strong + 0 weak"] == {2}
    assert devices[f"{EMBRACING}, 2 strong + 14 weak"] == devices[f"{WIDTH}, 2 strong + 14 weak"] == {16}
    assert {result.row.job["simulate"]["devices"] for result in found.rows} == {16}


def test_the_full_scale_has_every_published_mix():
    cases = TABLES["embracing-cases"].setting("full").rows
    fleets = [tuple(plan_from({**row.job, "bundle": row.model}).simulate["tiers"].items()) for row in cases]
    published = [row for row in cases if row.model in ("resnet20", "femnist_cnn")]
    assert len(published) == 3 * len(CASES) - 1  # width reduction is FedAvg where all are strong
    assert all(sum(count for _, count in fleet) == 128 for fleet in fleets)
    assert len(TABLES["embracing-scaling"].setting("full").rows) == 3 * len(JOINED) - 2
    assert all(row.widths == (0.45, 0.2) for row in cases if row.job["algorithm"] == "heterofl")


def test_combinations_are_cheaper_where_they_should_be(tmp_path):
    found = reproduce(TABLES["combinations"], "smoke", 1, Workplace(tmp_path))
    measured = means(found)
    plain, both, control = "EmbracingFL", "EmbracingFL × FedLAMA × DOMO", "EmbracingFL × SCAFFOLD"
    assert measured[plain][MEMORY] < measured["FedAvg"][MEMORY]  # weak devices take part, strong ones do not shrink
    assert measured[both][MEMORY] > measured[plain][MEMORY]  # the server's momentum is one vector more
    assert measured[control][MEMORY] > measured[both][MEMORY]  # control variates are two
    assert measured[plain][WORK] < measured["FedAvg"][WORK]
    assert measured[control][BYTES] > measured[plain][BYTES]
    assert 0 < SHARE < 1 and BUDGET in measured[plain]
    assert ALL_STRONG not in measured


def test_similarities_are_found_at_five_places_of_a_network(tmp_path):
    found = reproduce(TABLES["svcca"], "smoke", 1, Workplace(tmp_path))
    measured = means(found)
    values = np.array([[measured[label][f"SVCCA, {place}"] for place in PLACES] for label in measured])
    assert values.shape == (4, 5) and ((values >= 0) & (values <= 1 + 1e-9)).all()
    assert len(np.unique(values)) > 5
    first = f"SVCCA, {next(iter(PLACES))}"
    assert measured["first half"][first] == pytest.approx(1)  # one layer for all, measured after it was averaged
    assert measured["alone"][first] < 1 - 1e-6
