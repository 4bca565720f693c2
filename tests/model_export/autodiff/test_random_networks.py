"""Networks that nobody thought of, against autograd."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.model_export.autodiff.drawing import examples
from tests.model_export.autodiff.module_harness import check_module
from tests.model_export.autodiff.random_networks import networks


@given(drawn=networks(), batch=st.sampled_from([1, 4]))
@examples(12)
def test_a_random_network_agrees_with_autograd(drawn: tuple[nn.Module, Tensor], batch: int) -> None:
    check_module(*drawn, batch=batch)


@pytest.mark.slow
@given(drawn=networks(14), batch=st.sampled_from([1, 4]))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_random_networks_agree_with_autograd(drawn: tuple[nn.Module, Tensor], batch: int) -> None:
    check_module(*drawn, batch=batch)
