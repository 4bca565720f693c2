"""The account of time, kept by a clock that the test moves; and that a real task is accounted for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.layers import BundleSource
from edge_runtime.timing import FORWARD, PARTS, Stopwatch, Timings
from edge_runtime.trainer import Received, Trainer
from federation.messages import Task


@dataclass
class Clock:
    """Time passes when the test says so."""

    time: float = 100.0
    looks: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        self.looks.append(self.time)
        return self.time


def parts_of(timings: Timings) -> float:
    """Everything that the documentation says is part of the sum."""
    values = asdict(timings)
    for name in ("wall", "hidden_download", "training_forward", "backward"):
        del values[name]
    return math.fsum([*values.pop("forward").values(), *values.values()])


def test_inner_parts_are_taken_off_outer_ones():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.time += 1  # other
    with watch.part("download"):
        clock.time += 2
        with watch.part("load"):
            clock.time += 4
            with watch.part(FORWARD + "conv"):
                clock.time += 8
            clock.time += 16
        clock.time += 32
    clock.time += 64  # other
    with watch.part("load"):
        clock.time += 128
    found = watch.timings()
    assert (found.download, found.load, found.forward) == (34, 4 + 16 + 128, {"conv": 8})
    assert (found.other, found.wall) == (65, 255)
    assert found.accounted == 1 - 65 / 255
    assert parts_of(found) == found.wall


def test_a_part_that_fails_is_still_charged():
    clock = Clock()
    watch = Stopwatch(clock)
    with pytest.raises(ZeroDivisionError), watch.part("training"), watch.part("optimiser"):
        clock.time += 3
        raise ZeroDivisionError
    clock.time += 4
    found = watch.timings()
    assert (found.optimiser, found.training, found.other, found.wall) == (3, 0, 4, 7)


NAMES = [FORWARD + "a" if name == FORWARD else name for name in PARTS]


@given(st.lists(st.tuples(st.sampled_from([*NAMES, "leave"]), st.integers(0, 1000)), max_size=40))
def test_parts_and_other_are_the_wall_clock(script):
    """Any nesting, any durations (in 1/8 seconds, which add up without rounding)."""
    clock = Clock()
    watch = Stopwatch(clock)
    entered = []
    for name, eighths in script:
        if name != "leave":
            part = watch.part(name)
            part.__enter__()
            entered.append(part)
        elif entered:
            entered.pop().__exit__(None, None, None)
        clock.time += eighths / 8
    while entered:
        entered.pop().__exit__(None, None, None)
    found = watch.timings()
    assert found.wall == sum(eighths for _, eighths in script) / 8
    assert parts_of(found) == found.wall


def test_hidden_downloads_and_the_division_of_training_are_not_added():
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.part("training"):
        clock.time += 8
    watch.hidden_download += 1000
    found = watch.timings(0.25)
    assert (found.training, found.training_forward, found.backward) == (8, 2, 6)
    assert found.hidden_download == 1000 and found.wall == 8 and parts_of(found) == 8
    undivided = watch.timings()
    assert undivided.training_forward is None and undivided.backward is None


def test_an_unknown_part_is_refused():
    with pytest.raises(KeyError, match="sleep"), Stopwatch(Clock()).part("sleep"):
        pass


def test_nothing_measured_is_all_accounted_for():
    assert Stopwatch(Clock()).timings().accounted == 1


def test_a_real_task_is_accounted_for_by_layer_and_part(digits, samples):
    trainer = Trainer(digits.directory, BundleSource(digits.directory, digits.manifest), samples, forward_share=0.4)
    outcome = trainer.run(Task("weak", steps=30, batch=32, rate=0.01), Received(digits.suffix("weak")))
    found = Timings(**outcome.report.seconds)
    assert list(found.forward) == ["conv1 to conv3"]  # one graph
    assert min(found.load, found.activation_io, found.training, found.optimiser, *found.forward.values()) > 0
    assert found.training_forward + found.backward == pytest.approx(found.training)
    assert parts_of(found) == pytest.approx(found.wall, rel=1e-9)
    assert found.accounted >= 0.95
    assert found.upload == found.evaluation == found.state == 0
