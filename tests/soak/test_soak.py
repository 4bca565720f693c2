"""The soak, for half a minute: what it checks at its end is the test."""

from __future__ import annotations

import pytest

from tests.soak.soak import COHORT, soak


@pytest.mark.slow
def test_every_committed_round_adds_up() -> None:
    found = soak(20, COHORT + 4, rounds=3)
    assert found["adds_up"] and found["rounds"] >= 3 and found["slots"]["arrived"] >= COHORT // 2
    assert not found.get("failed")
