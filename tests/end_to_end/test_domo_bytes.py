"""DOMO looks at two versions of the model. A device that took part in the round before has the older one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_runtime.device_state import KeptFiles
from federation.axes.local.server_momentum import RECEIVED
from federation.device_task import Kept
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import job_text, simulate

SOME = "[participate]\nquorum = 1.0\nmin_available = 5\ncount = 3\n"
FEDLAMA = "[sync]\nrule = 'fedlama'\nfactor = 3\n"


@pytest.mark.parametrize("more", ["", FEDLAMA], ids=["everything synchronised", "FedLAMA"])
def test_the_version_before_is_fetched_by_nobody_who_has_it(write_job: WriteJob, tmp_path: Path, more: str) -> None:
    """As many bytes down as server and local momentum without the fusion."""
    fused = simulate(write_job(job_text("domo", 6, more, steps=2)), tmp_path / "fused")
    plain = simulate(write_job(job_text("fedavg_slm_z", 6, more, steps=2)), tmp_path / "plain")
    assert (fused.weights != plain.weights).any()
    if not more:  # with FedLAMA the intervals of the two differ
        assert [line["bytes_down"] for line in fused.lines] == [line["bytes_down"] for line in plain.lines]
    assert max(line["bytes_down"] for line in fused.lines) == fused.lines[0]["bytes_down"]


@pytest.mark.parametrize("more", ["", FEDLAMA, SOME, FEDLAMA + SOME], ids=["all", "FedLAMA", "some", "both"])
def test_kept_or_fetched_makes_no_difference(
    write_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    file = write_job(job_text("domo", 7, more, steps=2))
    expected = simulate(file, tmp_path / "kept")
    load = KeptFiles.load
    monkeypatch.setattr(KeptFiles, "load", lambda self, task: _without(load(self, task)))
    fetched = simulate(file, tmp_path / "fetched")
    assert (fetched.weights == expected.weights).all()
    assert sum(line["bytes_down"] for line in fetched.lines) > sum(line["bytes_down"] for line in expected.lines)


def _without(kept: Kept | None) -> Kept | None:
    """Everything but the server's values: the version before has to be fetched."""
    if kept is None:
        return None
    return replace(kept, vectors={name: vector for name, vector in kept.vectors.items() if name != RECEIVED})
