"""Composite operators written out give what PyTorch's own give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from model_export.plain_operators import attention, difference, move_axes
from tests.model_export.autodiff.drawing import examples


@given(data=st.data())
@examples(40)
def test_moved_axes(data):
    rank = data.draw(st.integers(1, 4))
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)[(0,) * (4 - rank)]
    axes = st.lists(st.integers(0, rank - 1), unique=True, min_size=1)
    source = data.draw(axes)
    target = data.draw(st.permutations(range(rank)))[: len(source)]
    source = [axis - rank if data.draw(st.booleans()) else axis for axis in source]
    assert torch.equal(move_axes(x, source, target), torch.movedim(x, source, target))
    assert torch.equal(move_axes(x, source[0], -1), torch.movedim(x, source[0], -1))


def test_differences():
    x = torch.randn(3, 6)
    assert torch.equal(difference(x), torch.diff(x))
    assert torch.equal(difference(x, 2, 0), torch.diff(x, n=2, dim=0))
    assert torch.equal(difference(x, prepend=x[:, :1] - 1), torch.diff(x, prepend=x[:, :1] - 1))


def test_attention():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, is_causal=True), expected)
