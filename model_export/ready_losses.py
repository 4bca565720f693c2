"""Losses that are written in PyTorch and traced like a user's own: CTC, cosine embedding, contrastive.

Each has two versions: one of plain operations on whole tensors, which becomes a graph, and PyTorch's own, by which
`embrace verify` judges the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from federation.errors import InputError
from federation.inputs import NamedInput
from federation.manifest import OwnLoss
from model_export.own_loss import UNNAMED, LossFunction, OwnFunction, Values, is_in_memory, load_function

BLANK = 0  # the class that stands for no label, and the padding of short targets
LOWEST = -1e30  # the logarithm of what cannot be: finite, so that its gradient is 0 and not undefined
IMPOSSIBLE = 1e20  # a loss above it belongs to targets that do not fit into the positions
TEMPERATURE = 0.5
TARGETS, LENGTHS = "targets", "input_lengths"  # names of the labels of ctc, where samples differ in length


def ctc(outputs: Tensor, labels: Values) -> Tensor:
    """Sum over all alignments (Graves 2006) in logarithms, position after position; by the lengths of the targets."""
    targets, lengths = _targets(labels)
    log_probability = torch.log_softmax(outputs, 2)
    positions, width = outputs.shape[1], targets.shape[1]
    blanks = torch.zeros_like(targets)
    states = torch.cat([torch.stack([blanks, targets], 2).flatten(1), blanks[:, :1]], 1)  # blank, label, blank, …
    seen = log_probability.gather(2, states[:, None, :].expand(-1, positions, -1))
    # A label may follow the one before it without a blank between, if the two differ.
    differs = (targets[:, 1:] != targets[:, :-1]).to(outputs.dtype)
    never = torch.zeros_like(seen[:, 0, :2])
    odd = torch.stack([differs, torch.zeros_like(differs)], 2).flatten(1)  # of the states from the second label on
    skips = (1.0 - torch.cat([never, never[:, :1], odd], 1)[:, : 2 * width + 1]) * LOWEST
    low = never + LOWEST
    reached = torch.cat([seen[:, 0, :2], low[:, :1].expand(-1, 2 * width - 1)], 1)
    for position in range(1, positions):
        one = torch.cat([low[:, :1], reached[:, :-1]], 1)
        two = torch.cat([low, reached[:, :-2]], 1) + skips
        further = torch.logsumexp(torch.stack([reached, one, two], 2), 2) + seen[:, position]
        reached = further if lengths is None else torch.where(position < lengths[:, None], further, reached)
    count = (targets != BLANK).sum(1)
    ends = torch.stack([2 * count, (2 * count - 1).clamp(min=0)], 1)
    last = reached.gather(1, ends)
    only = torch.where(count[:, None] > 0, last, torch.stack([last[:, 0], last[:, 0] * 0 + LOWEST], 1))
    loss = -torch.logsumexp(only, 1)
    possible = torch.where(loss < IMPOSSIBLE, loss, torch.zeros_like(loss))
    return possible / count.clamp(min=1).to(outputs.dtype)


def _targets(labels: Values) -> tuple[Tensor, Tensor | None]:
    return (labels[TARGETS], labels[LENGTHS].reshape(-1)) if isinstance(labels, dict) else (labels, None)


def ctc_of_torch(outputs: Tensor, labels: Values) -> Tensor:
    """What `torch.nn.functional.ctc_loss` makes of the same."""
    targets, lengths = _targets(labels)
    if lengths is None:
        lengths = torch.full((len(outputs),), outputs.shape[1])
    count = (targets != BLANK).sum(1)
    log_probability = torch.log_softmax(outputs, 2).transpose(0, 1)
    return F.ctc_loss(log_probability, targets, lengths, count, blank=BLANK, zero_infinity=True)


def cosine_embedding(outputs: Values, labels: Tensor) -> Tensor:
    """One less the cosine of pairs that belong together (label 1), the cosine above 0 of others (0 or -1)."""
    one, other = _pair(outputs)
    product, lengths = (one * other).sum(1), (one.square().sum(1) + 1e-12) * (other.square().sum(1) + 1e-12)
    cosine = product / lengths.sqrt()
    return torch.where(labels.reshape(-1) > 0, 1 - cosine, torch.relu(cosine))


def cosine_embedding_of_torch(outputs: Values, labels: Tensor) -> Tensor:
    one, other = _pair(outputs)
    return F.cosine_embedding_loss(one, other, torch.where(labels.reshape(-1) > 0, 1, -1))


def contrastive(outputs: Values, labels: Tensor) -> Tensor:
    """NT-Xent (SimCLR): the two views of a sample against all others of the batch; a sample counts by its label."""
    both = torch.cat([view / (view.square().sum(1, keepdim=True) + 1e-12).sqrt() for view in _pair(outputs)])
    count = both.shape[0] // 2
    alike = both @ both.transpose(0, 1) / TEMPERATURE
    rows = torch.arange(both.shape[0])
    own = (rows[:, None] == rows[None, :]).to(both.dtype)
    partner = (rows[:, None] == (rows[None, :] + count) % (2 * count)).to(both.dtype)
    log_probability = alike - torch.logsumexp(alike - own * 1e9, 1, keepdim=True)
    each = -(log_probability * partner).sum(1)
    weights = torch.cat([labels.reshape(-1), labels.reshape(-1)]).to(both.dtype)
    return (each * weights).sum() / weights.sum().clamp(min=1e-12)


def contrastive_of_torch(outputs: Values, labels: Tensor) -> Tensor:
    both = F.normalize(torch.cat(_pair(outputs)), dim=1, eps=1e-12)
    count = len(both) // 2
    alike = (both @ both.T / TEMPERATURE).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    partner = torch.arange(len(both)).roll(count)
    each = F.cross_entropy(alike, partner, reduction="none")
    weights = labels.reshape(-1).to(both.dtype).repeat(2)
    return (each * weights).sum() / weights.sum().clamp(min=1e-12)


def _pair(outputs: Values) -> list[Tensor]:
    if not isinstance(outputs, Mapping) or len(outputs) != 2:
        raise InputError("expected two outputs of a pair, as in --output first,second or --output 0,1")
    return [value.flatten(1) for value in outputs.values()]


@dataclass(frozen=True)
class _Ready:
    traced: LossFunction
    check: LossFunction
    labels: Callable[[Sequence[NamedInput] | None], tuple[NamedInput, ...]]


def _ctc_labels(given: Sequence[NamedInput] | None) -> tuple[NamedInput, ...]:
    names = [item.name for item in given or ()]
    if names not in ([UNNAMED], [TARGETS, LENGTHS]) or any(item.dtype != "int64" for item in given or ()):
        raise InputError(
            f"ctc: say how many labels a sample has at most, --labels 20:int64; or --labels {TARGETS}=20:int64 "
            f"--labels {LENGTHS}=:int64 where samples have fewer positions than outputs"
        )
    return tuple(given or ())


def _one_label(dtype: str) -> Callable[[Sequence[NamedInput] | None], tuple[NamedInput, ...]]:
    def find(given: Sequence[NamedInput] | None) -> tuple[NamedInput, ...]:
        if given is not None:
            raise InputError("--labels: this loss takes one number for each sample, leave it out")
        return (NamedInput(UNNAMED, dtype, ()),)

    return find


READY: dict[str, _Ready] = {
    "ctc": _Ready(ctc, ctc_of_torch, _ctc_labels),
    "cosine_embedding": _Ready(cosine_embedding, cosine_embedding_of_torch, _one_label("int64")),
    "contrastive": _Ready(contrastive, contrastive_of_torch, _one_label("int64")),
}


def find_loss(reference: str, labels: Sequence[NamedInput] | None) -> OwnFunction:
    """Take a loss by name, or a function of FILE.py:function."""
    if reference in READY:
        return ready_loss(reference, labels)
    return OwnFunction(reference, load_function(reference), None if labels is None else tuple(labels))


def check_of(own: OwnLoss) -> LossFunction:
    """Find what PyTorch computes for the loss of a bundle."""
    if is_in_memory(own):
        raise InputError(f"the loss {own.function} was given in Python: only the process that exported it can check it")
    found = find_loss(own.function, own.labels if own.function == "ctc" else None)
    return found.check or found.function


def ready_loss(name: str, labels: Sequence[NamedInput] | None) -> OwnFunction:
    """Take one of these losses by name, with the labels that it has."""
    ready = READY[name]
    return OwnFunction(name, ready.traced, ready.labels(labels), ready.check)
