"""Tests say which operators they differentiate (`pytest.mark.operator`); here it is checked that they did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.autodiff import harness


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "operator(*names): the test differentiates these operators")


@pytest.fixture(autouse=True)
def declared_operators_are_differentiated(request: pytest.FixtureRequest) -> Iterator[None]:
    harness.differentiated.clear()
    yield
    declared = {name for mark in request.node.iter_markers("operator") for name in mark.args}
    missing = declared - harness.differentiated
    assert not missing, f"the test says it differentiates {sorted(missing)} but did not"
