"""What `embrace bench browser` reports; browser/tests/chromium runs it with a real Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.device import browser
from bench.device.browser import BrowserReport, FirstBatch, NoBrowser, Timing
from coordinator.api import pages
from embrace.cli.bench.browser import report_of
from tests.golden.rounds import DIGITS

Embrace = Callable[..., Any]
NATIVE, WASM = "native, 1 thread", "wasm, 1 thread"


def timing(**more: Any) -> Timing:
    steps, rules = {NATIVE: [10.0, 20.0], WASM: [33.0, 44.0]}, {NATIVE: [0.0, 2.0], WASM: [7.0, 0.0]}
    return Timing("digits", "dense", ["weak"], 8, 100, steps, rules, {NATIVE: 11.0, WASM: 40.0}, {WASM: 2_000_000})


def test_ratios_compare_each_round_with_itself() -> None:
    assert timing().whole(WASM) == [40.0, 44.0]
    assert timing().ratio(WASM, NATIVE) == (40 / 10 + 44 / 22) / 2
    assert timing().ratio("WebGPU", NATIVE) is None


def test_a_column_that_is_not_there_is_a_dash() -> None:
    first = [FirstBatch("digits", "dense", 1.5, 3_800_000, None)]
    found = BrowserReport(
        [NATIVE, WASM, "WebGPU"], {"browser": "Chromium 1"}, [timing()], first, ["no adapter"], [0, 1]
    )
    times, spent, heaps, opened = (table.rows[0] for table in report_of(found).tables)
    assert times == ("digits", "dense", "weak", "10.0 (0.00)", "40.0 (0.00)", "–", "3.00", "–")
    assert spent[3:] == ("11.0", "40.0", "–")
    assert heaps[3:] == ("2.0", "–")
    assert opened == ("digits", "dense", "1.5", "3.8", "–")


def test_no_browser_is_one_line(embrace: Embrace) -> None:
    answer = embrace("bench", "browser", DIGITS, "--chromium", "/nowhere/chromium")
    assert answer.code != 0
    assert "no Chromium found at /nowhere/chromium" in answer.err and "Traceback" not in answer.err


def test_pages_that_were_not_built_are_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    with pytest.raises(NoBrowser, match="make web"):
        browser.bench_browser([str(DIGITS)], boundaries="weak", chromium="/bin/sh")
