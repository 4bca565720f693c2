"""docs/results/latency.md says what the stored results say."""

from __future__ import annotations

import pytest

from embrace.cli.bench.page import PAGE, RESULTS, filled


def test_the_tables_are_those_of_the_stored_results():
    assert filled(PAGE.read_text("utf-8")) == PAGE.read_text("utf-8")


MINE = [file for file in sorted(RESULTS.glob("*.json")) if file.stem.startswith(("latency-", "memory-"))]


@pytest.mark.parametrize("file", MINE, ids=lambda file: file.stem)
def test_every_result_is_shown(file):
    assert f"<!-- results {file.stem} " in PAGE.read_text("utf-8")
