"""What stays in a process is bounded by its activations, and what is there makes no room for others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from simulation.kept_trainers import KeptTrainers


@dataclass(eq=False)
class Holder:
    """A trainer, as far as it is asked for here."""

    stored_bytes: int


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr("simulation.kept_trainers.MOST_BYTES", 100)
    return KeptTrainers()


def test_a_trainer_is_there_once(kept):
    trainer = Holder(60)
    kept.put("a", trainer)
    assert kept.take("b") is None
    assert kept.take("a") is trainer
    assert kept.take("a") is None


def test_what_is_there_stays_and_what_was_taken_out_makes_room(kept):
    kept.put("a", Holder(60))
    kept.put("b", Holder(41))
    assert kept.take("b") is None
    kept.put("c", Holder(40))
    assert kept.take("c") is not None
    assert kept.take("a") is not None
    kept.put("b", Holder(100))
    assert kept.take("b") is not None


def test_a_trainer_without_activations_is_not_kept(kept):
    kept.put("strong", Holder(0))
    assert kept.take("strong") is None
