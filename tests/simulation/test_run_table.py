"""Tables of runs, by hand."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from simulation.run_table import markdown, summarise
from simulation.runs import group_runs, read_run
from tests.simulation.written_runs import three, write


def test_the_table_by_hand(tmp_path: Path):
    line = summarise(three(tmp_path), target=0.6)
    assert line.final.mean == pytest.approx((0.60 + 0.20 + 0.65) / 3)
    assert line.final.deviation == pytest.approx(statistics.stdev([0.60, 0.20, 0.65]))
    assert line.best.mean == pytest.approx((0.60 + 0.25 + 0.70) / 3)
    assert (line.runs, line.rounds, line.reached) == (3, 4, 2)
    assert (line.rounds_to_target.mean, line.bytes_to_target.mean) == (3.5, 10.5e6)  # 4 and 3 rounds
    assert markdown([line], 0.6).splitlines() == [
        "| run | seeds | rounds | final accuracy % | best % | MB | rounds to 60 % | MB to 60 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| m | 3 | 4 | 48.33 ± 24.66 | 51.67 ± 23.63 | 11.00 ± 1.73 | 3.5 ± 0.7 (2 of 3) | 10.50 ± 2.12 |",
    ]


def test_a_table_of_runs_that_say_little(tmp_path: Path):
    (group,) = group_runs([read_run(write(tmp_path, [{"round": 0, "loss": 1}], {"name": "a|b"}))])
    assert markdown([summarise(group)]).splitlines()[-1] == "| a\\|b | 1 | 1 | – | – | – |"
