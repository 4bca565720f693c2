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
    check_from_both_ends(*drawn, batch)


def check_from_both_ends(module: nn.Module, sample: Tensor, batch: int) -> None:
    """Trained whole, and from a layer in the middle, which several tensors may enter.

    Where a frozen layer uses a trained weight, PyTorch's gradient has a part that ours rightly has not.
    """
    layers = check_module(module, sample, batch=batch).layers
    boundary = len(layers) // 2
    if boundary and not any(layer.borrowed for layer in layers[:boundary]):
        check_module(module, sample, batch=batch, boundary=boundary)


@pytest.mark.slow
@given(drawn=networks(14), batch=st.sampled_from([1, 4]))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_random_networks_agree_with_autograd(drawn: tuple[nn.Module, Tensor], batch: int) -> None:
    check_from_both_ends(*drawn, batch)
