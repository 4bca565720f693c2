"""Tests say which operators they differentiate (`pytest.mark.operator`); here it is checked that they did."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.model_export.autodiff import harness


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Around each test: it fails if it passes without having called the rule of an operator it is marked with."""
    harness.differentiated.clear()
    result = yield
    declared = {name for mark in item.iter_markers("operator") for name in mark.args}
    missing = declared - harness.differentiated
    assert not missing, f"the test says it differentiates {sorted(missing)} but did not"
    return result
