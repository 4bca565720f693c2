"""Composite PyTorch operators written out as simple ones.

Attention and stacked recurrent layers hide dropout inside one operator: the exporter cannot translate it in training
mode, and a reference run cannot be given the masks of a seed. The capture and the oracle both run the model like this,
so that they see the same sequence of simple operators. The functions are replaced where modules look them up: a
TorchFunctionMode does not see what composite functions call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from model_export.packed_sequences import padded_sequences

Function = Callable[..., Any]
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Inside, attention is matrix products and a softmax, and layers of a recurrent network run one by one."""
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(padded_sequences())
        for owner in (torch, Tensor):
            for name in ("movedim", "moveaxis"):
                replaced.enter_context(mock.patch.object(owner, name, move_axes))
        functions: list[tuple[Any, str, Function]] = [
            (F, "scaled_dot_product_attention", attention),
            (F, "cross_entropy", cross_entropy),
            (torch, "diff", difference),
            (torch, "normal", normal),
            *((Tensor, f"{name}_", _drawn_into(function)) for name, function in DRAWN.items()),
            *((F, f"dropout{axes}d", dropped_channels) for axes in (1, 2, 3)),
            *((torch._VF, name, _one_by_one(getattr(torch._VF, name))) for name in RECURRENT),
        ]
        for place, name, function in functions:
            replaced.enter_context(mock.patch.object(place, name, function))
        yield


_cross_entropy = F.cross_entropy


def cross_entropy(input: Tensor, target: Tensor, *args: Any, **more: Any) -> Tensor:
    """Label smoothing as a second loss, by all classes alike; PyTorch's exporters refuse it or forget it."""
    given = {name: value for name, value in more.items() if value is not None}
    share, ignored, reduction = (
        given.pop(name, usual)
        for name, usual in (("label_smoothing", 0.0), ("ignore_index", -100), ("reduction", "mean"))
    )
    if not share or args or given or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return _cross_entropy(input, target, *args, **more)
    own = _cross_entropy(input, target, ignore_index=ignored, reduction="none")
    counted = (target != ignored).to(input.dtype)
    each: Tensor = (1.0 - share) * own - share * torch.log_softmax(input, 1).mean(1) * counted
    if reduction == "none":
        return each
    return each.sum() / counted.sum() if reduction == "mean" else each.sum()


def normal(mean: Any, std: Any = 1.0, **_: Any) -> Tensor:
    """`torch.normal` of tensors as standard noise."""
    like = mean if isinstance(mean, Tensor) else std
    drawn: Tensor = mean + std * torch.randn_like(like)
    return drawn


def bernoulli(like: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    """Ones and zeros as a dropout of ones: where nothing is drawn they are their mean."""
    return F.dropout(torch.ones_like(like), 1.0 - p, True) * p


DRAWN: dict[str, Function] = {
    "bernoulli": bernoulli,
    "exponential": lambda like, lambd=1.0, **_: -torch.log(1.0 - torch.rand_like(like)) / lambd,
    "normal": lambda like, mean=0.0, std=1.0, **_: mean + std * torch.randn_like(like),
    "uniform": lambda like, low=0.0, high=1.0, **_: low + (high - low) * torch.rand_like(like),
}


def _drawn_into(draw: Function) -> Function:
    def fill(self: Tensor, *args: Any, **more: Any) -> Tensor:
        return self.copy_(draw(self, *args, **more))

    return fill


def dropped_channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout of whole channels as a dropout of ones, one for each channel."""
    if not training or not p:
        return input
    shape = (*input.shape[:2], *[1] * (input.ndim - 2))
    ones = torch.ones(shape, dtype=input.dtype)
    return input * F.dropout(ones, p, True)


def is_padded(args: tuple[Any, ...]) -> bool:
    """Whether a call of a recurrent operator is the one for ordinary tensors, not the one for packed sequences."""
    return len(args) == 9 and isinstance(args[3], bool)


def _one_by_one(func: Function) -> Function:
    def run(*args: Any) -> Any:
        return stacked(func, *args) if is_padded(args) and args[4] > 1 else func(*args)

    return run


def move_axes(input: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """`torch.movedim` as a permutation: PyTorch's exporter writes axes that are counted from the end as they are."""
    places = [([axes] if isinstance(axes, int) else list(axes)) for axes in (source, destination)]
    froms, tos = ([axis % input.ndim for axis in axes] for axes in places)
    order = [axis for axis in range(input.ndim) if axis not in froms]
    for to, axis in sorted(zip(tos, froms, strict=True)):
        order.insert(to, axis)
    return input.permute(order)


def difference(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Each element less the one before it, n times."""
    whole = torch.cat([part for part in (prepend, input, append) if part is not None], dim)
    for _ in range(n):
        whole = whole.narrow(dim, 1, whole.size(dim) - 1) - whole.narrow(dim, 0, whole.size(dim) - 1)
    return whole


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
