"""docs/results/latency.md and browser.md say what the stored results say."""

from __future__ import annotations

import pytest

from embrace.cli.bench.page import PAGES, RESULTS, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_stored_results(page):
    assert filled(page.read_text("utf-8")) == page.read_text("utf-8")


MINE = [file for file in sorted(RESULTS.glob("*.json")) if file.stem.startswith(("browser", "latency-", "memory-"))]


@pytest.mark.parametrize("file", MINE, ids=lambda file: file.stem)
def test_every_result_is_shown(file):
    assert any(f"<!-- results {file.stem} " in page.read_text("utf-8") for page in PAGES)
