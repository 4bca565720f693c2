"""Composite PyTorch operators written out as simple ones.

Attention and stacked recurrent layers hide dropout inside one operator: the exporter cannot translate it in training
mode, and a reference run cannot be given the masks of a seed. The capture and the oracle both run the model like this,
so that they see the same sequence of simple operators. The functions are replaced where modules look them up: a
TorchFunctionMode does not see what composite functions call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Inside, attention is matrix products and a softmax, and layers of a recurrent network run one by one."""
    with (
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(torch._VF, "lstm", _one_by_one(torch._VF.lstm)),
        mock.patch.object(torch._VF, "gru", _one_by_one(torch._VF.gru)),
        mock.patch.object(torch._VF, "rnn_tanh", _one_by_one(torch._VF.rnn_tanh)),
        mock.patch.object(torch._VF, "rnn_relu", _one_by_one(torch._VF.rnn_relu)),
    ):
        yield


def is_padded(args: tuple[Any, ...]) -> bool:
    """Whether a call of a recurrent operator is the one for ordinary tensors, not the one for packed sequences."""
    return len(args) == 9 and isinstance(args[3], bool)


def _one_by_one(func: Function) -> Function:
    def run(*args: Any) -> Any:
        return stacked(func, *args) if is_padded(args) and args[4] > 1 else func(*args)

    return run


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Softmax(query key^T / sqrt(width)) value, the definition."""
    if enable_gqa:
        repeats = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (query * (scale or 1.0 / math.sqrt(query.size(-1)))) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def stacked(
    func: Function,
    x: Tensor,
    states: Any,
    weights: list[Tensor],
    bias: bool,
    layers: int,
    rate: float,
    training: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A recurrent network of several layers, with dropout between them."""
    several = isinstance(states, (tuple, list))
    directions, per_layer = 2 if both else 1, len(weights) // layers
    finals = []
    for layer in range(layers):
        here = slice(layer * directions, (layer + 1) * directions)
        start = tuple(state[here] for state in states) if several else states[here]
        mine = weights[layer * per_layer : (layer + 1) * per_layer]
        x, *final = func(x, start, mine, bias, 1, 0.0, training, both, batch_first)
        finals.append(final)
        if layer + 1 < layers:
            x = F.dropout(x, rate, training) if rate else x
    return (x, *(torch.cat(parts) for parts in zip(*finals, strict=True)))
