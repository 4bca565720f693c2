"""What is replaced, what is kept, what is sent: the agreement of a task, and the regions of a coverage."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.axes.sync import Rotating
from federation.coverage import coverage
from federation.errors import InputError
from federation.exchange import Exchange, Inherit, graph_region, trained_region
from federation.messages import Task, decode_task, encode_task
from tests.federation.narrow_model import MODEL
from tests.federation.regions import vector_of

ROTATING = Rotating(3)


def test_the_default_is_fedavg() -> None:
    exchange = Exchange()
    assert (exchange.sent, exchange.replaced, exchange.tracks, exchange.keeps_model) == ((0,), (0,), (), False)


@given(
    changed=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    last=st.none() | st.integers(0, 30),
    window=st.integers(0, 30),
)
def test_replaced_is_what_the_device_has_not_seen(changed: list[int], last: int | None, window: int) -> None:
    """Version n + 1 is what round n made; a device of round n began with version n and may have sent to n + 1."""
    exchange = Exchange(ROTATING, (0,), tuple(changed), window, last, None if last is None else "task")
    seen = last if last is not None and last >= window else -1
    assert exchange.replaced == tuple(unit for unit in range(3) if seen < 0 or changed[unit] > seen)


def test_a_device_that_was_away_replaces_everything_that_changed_meanwhile() -> None:
    exchange = Exchange(ROTATING, (0,), (9, 7, 8), 0, 7, "task")
    assert exchange.replaced == (0, 2)
    assert Exchange(ROTATING, (0,), (9, 7, 8), 8, 7, "task").replaced == (0, 1, 2)  # of an earlier window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sent": (3,)}, "^sent: expected units among 3, each once"),
        ({"sent": (-1,)}, "^sent: expected units among 3, each once"),
        ({"sent": (1, 1)}, "^sent: expected units among 3, each once"),
        ({"changed": ()}, "^sent: expected units among 0"),
        ({"tracks": ("control", "control")}, "^tracks: expected plain names beside the model, each once"),
        ({"tracks": ("control", "model")}, "^tracks: expected plain names beside the model, each once"),
        ({"tracks": ("a/b",)}, "^tracks: expected plain names beside the model, each once"),
    ],
)
def test_an_exchange_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Exchange(**{"sync": ROTATING, "sent": (0,), "changed": (0, 0, 0), **change})


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({"rule": "magic"}, r"^task\.exchange\.sync\.rule: expected all, rotating"),
        ({"rule": "rotating", "parts": 0}, r"^task\.exchange\.sync\.parts: expected a number"),
        ({"rule": "mine.py:Mine"}, r"^task\.exchange\.sync\.rule: .* a coordinator and its devices run no code"),
    ],
)
def test_an_exchange_that_comes_with_another_rule_is_refused(sync: dict[str, Any], message: str) -> None:
    told = encode_task(Task("stem", 1, 8, 0.1))
    with pytest.raises(InputError, match=message):
        decode_task({**told, "exchange": {**told["exchange"], "sync": sync}})


def test_an_exchange_survives_the_way_to_the_device_and_an_old_task_has_the_default() -> None:
    exchange = Exchange(ROTATING, (2, 0), (3, 1, 2), 0, 2, "job-2-0-1", Inherit("job-1-0-1", "stem"), ("control",), 0.5)
    task = Task("stem", 1, 8, 0.1, exchange=exchange)
    text = json.loads(json.dumps(encode_task(task)))
    assert decode_task(text) == task
    del text["exchange"], text["epochs"]
    assert decode_task(text).exchange == Exchange()


# --- regions of a coverage -------------------------------------------------------------------------

LAYERS = {"stem": range(4), "middle": range(2, 4), "head": range(3, 4), "weak": range(3, 4)}


@pytest.mark.parametrize("boundary", LAYERS)
def test_the_output_side_is_a_suffix(boundary: str) -> None:
    space, covered = MODEL.space, coverage(MODEL, boundary)
    expected = vector_of(space)[space.suffix(LAYERS[boundary].start)]
    for region in (graph_region(MODEL, covered), trained_region(MODEL, covered)):
        np.testing.assert_array_equal(region.gather(vector_of(space)), expected)


def test_the_input_side_is_trained_with_the_graph_of_everything() -> None:
    space, covered = MODEL.space, coverage(MODEL, "..middle")
    assert graph_region(MODEL, covered).size == space.size
    np.testing.assert_array_equal(trained_region(MODEL, covered).gather(vector_of(space)), vector_of(space)[:1000])


def test_a_narrow_boundary_is_a_box() -> None:
    space, covered = MODEL.space, coverage(MODEL, "stem@0.5")
    views = space.views(vector_of(space))
    expected = [views["stem.0"][:20], views["middle.0"][:6, :20], views["middle.1"][:10], views["head.0"][:, :6]]
    found = trained_region(MODEL, covered).gather(vector_of(space))
    np.testing.assert_array_equal(found, np.concatenate([part.ravel() for part in expected]))
