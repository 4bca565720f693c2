"""The arithmetic of `bench latency`, with measurements that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.device import latency
from bench.device.latency import LatencyReport, LatencyRow, compare_with_phone
from bench.device.subject import is_bundle
from edge_runtime.measure import Case, Measurement
from federation.errors import OutOfMemory


def measured(scale: float = 1.0, frozen: bool = False, **changes: object) -> Measurement:
    """Three iterations of 10, 20 and 60 seconds, a tenth of that for the optimiser."""
    steps = [10.0 * scale, 20.0 * scale, 60.0 * scale]
    run = Measurement(
        idle={},
        memory={"anonymous": int(1000 * scale), "file_backed": 5, "total": 7},
        load=0.5,
        forward_compute=[4.0, 5.0, 6.0] if frozen else [],
        activation_io=[1.0, 2.0, 3.0] if frozen else [],
        training=steps,
        optimiser=[step / 10 for step in steps],
        forward_share=0.25,
    )
    return replace(run, **changes)


def report(*rows: LatencyRow, model: str = "resnet20") -> LatencyReport:
    return LatencyReport(model, 32, 1, 3, "float32", {}, list(rows), [])


STRONG = LatencyRow("whole model", "strong", "resnet20", "stem", "portable", [measured()])
WEAK = LatencyRow("EmbracingFL", "weak", "resnet20", "layer3.0", "portable", [measured(0.1, frozen=True)])
NARROW = LatencyRow("width reduction", "weak", "resnet20@0.2", "stem", "portable", [measured(0.5)])


def test_parts_add_up():
    for row in (STRONG, WEAK):
        parts = [row.series(part) for part in latency.PARTS]
        assert row.series("with_forward") == pytest.approx([sum(values) for values in zip(*parts)])
        assert row.series("iteration") == pytest.approx([sum(values[1:]) for values in zip(*parts)])
        assert row.series("step") == pytest.approx([sum(values[2:4]) for values in zip(*parts)])


def test_medians_quartiles_and_ratios():
    assert (STRONG.median("step"), STRONG.median("backward")) == (20e3, 15e3)
    assert STRONG.quartiles("step") == (15e3, 40e3)
    assert WEAK.median("iteration") == pytest.approx(4.2e3)  # 2 s of I/O, 2 of training, 0.2 of optimiser
    assert WEAK.median("with_forward") == pytest.approx(9.2e3)
    found = report(STRONG, WEAK)
    assert found.ratio(WEAK, "iteration") == pytest.approx(4.2 / 22)
    assert found.ratio(WEAK, "memory") == pytest.approx(0.1)


def test_iterations_of_all_processes_count():
    row = replace(STRONG, runs=[measured(), measured(10.0)])
    assert row.series("step") == [10e3, 20e3, 60e3, 100e3, 200e3, 600e3]
    assert row.median("step") == 80e3
    assert row.memory == 10_000
    shares = replace(STRONG, runs=[measured(forward_share=share) for share in (0.4, 0.1, 0.5)])
    assert shares.series("training_forward") == pytest.approx([4e3, 8e3, 24e3] * 3)  # the middle share, for all


def test_bars_are_those_of_the_frozen_layers_method():
    bars = {bar.what: bar for bar in report(STRONG, WEAK, NARROW).bars()}
    assert bars["weak step / strong step"].met and bars["weak step / strong step"].measured == pytest.approx(0.1)
    assert bars["weak iteration / strong iteration"].met
    assert bars["backward / training forward, worst tier"].measured == pytest.approx(3.0)
    missed = {bar.what: bar.met for bar in report(STRONG, replace(WEAK, runs=[measured(0.3, frozen=True)])).bars()}
    assert missed["weak step / strong step"] is False


def test_an_engine_that_cannot_serve_the_weak_tier_is_not_judged_by_another():
    strong, moderate = (replace(row, engine="ort-training") for row in (STRONG, replace(WEAK, tier="moderate")))
    bars = [bar for bar in report(STRONG, WEAK, strong, moderate).bars() if bar.engine == "ort-training"]
    assert [(bar.what.split()[0], bar.met) for bar in bars[:2]] == [("weak", None)] * 2


def test_without_a_strong_row_nothing_is_compared():
    bars = report(WEAK).bars()
    assert [bar.met for bar in bars[:2]] == [None, None]
    assert compare_with_phone(report(WEAK))[0].where == latency.PHONE


def test_the_phone_relative_to_itself():
    lines = {
        (line.method, line.tier): line for line in compare_with_phone(report(STRONG)) if line.where == latency.PHONE
    }
    weak = lines["EmbracingFL", "weak"]
    assert weak.total == pytest.approx(88_860.5 / 421_739.2)
    assert (round(weak.forward, 3), round(weak.io, 3), round(weak.backward, 3)) == (1.0, 0.628, 0.204)
    assert lines["width reduction", "weak"].total == pytest.approx(188_517.1 / 423_058.2)
    assert round(lines["width reduction", "moderate"].forward, 3) == 0.712


def test_this_device_beside_the_phone():
    here = [line for line in compare_with_phone(report(STRONG, WEAK)) if line.where == "here, portable"]
    assert [(line.method, line.tier) for line in here] == [("EmbracingFL", "weak")]
    assert here[0].forward == pytest.approx((5 + 0.5) / 5)  # frozen and trained layers, against the whole model
    assert here[0].total == pytest.approx(9.2 / 22)
    assert compare_with_phone(report(STRONG, model="digits")) == []


def test_cases_take_turns_and_share_the_iterations():
    rows = [replace(row, runs=[]) for row in (STRONG, WEAK)]
    asked: list[tuple[str, int]] = []

    def fake(case: Case) -> Measurement:
        asked.append((case.boundary, case.iterations))
        return measured()

    cases = [(row, Case("bundle", row.boundary)) for row in rows]
    latency._measure(cases, 10, [], lambda *_: None, fake)
    assert asked == [("stem", 4), ("layer3.0", 4), ("layer3.0", 3), ("stem", 3), ("stem", 3), ("layer3.0", 3)]
    asked.clear()
    latency._measure(cases, 2, [], lambda *_: None, fake)
    assert [count for _, count in asked] == [1, 1, 1, 1]


def test_a_case_that_does_not_fit_is_named_and_the_others_go_on():
    rows = [replace(row, runs=[]) for row in (STRONG, WEAK)]
    asked = []

    def fake(case: Case) -> Measurement:
        asked.append(case.boundary)
        if case.boundary == "stem":
            raise OutOfMemory("too large")
        return measured()

    notes: list[str] = []
    latency._measure([(row, Case("bundle", row.boundary)) for row in rows], 10, notes, lambda *_: None, fake)
    assert notes == ["resnet20 strong, portable: not measured, too large"]
    assert (rows[0].runs, len(rows[1].runs), asked.count("stem")) == ([], 3, 1)


def test_a_bundle_is_told_from_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet20").mkdir()
    assert not is_bundle("resnet20")  # a directory that happens to have a model's name
    assert is_bundle("./resnet20")  # but this is a path, and whatever is wrong with it will be said
    (tmp_path / "resnet20" / "manifest.json").write_text("{}")
    assert is_bundle("resnet20")
