"""Labels and losses from the export to a trained bundle, as a user of the package meets them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embrace
from federation.errors import DataError

TOKENS, LENGTH = 7, 6


class LanguageModel(nn.Module):
    """Outputs [N, positions, tokens], as transformers gives them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(TOKENS, 12)
        self.reader = nn.GRU(12, 16, batch_first=True)
        self.out = nn.Linear(16, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        told: Tensor = self.out(self.reader(self.words(x))[0])
        return told


def counting(count: int) -> np.ndarray:
    """Sentences that count upwards from anywhere, 1 behind the last token; some end early, in padding."""
    starts = np.arange(count) % (TOKENS - 1)
    sentences = (starts[:, None] + np.arange(LENGTH)) % (TOKENS - 1) + 1
    sentences[::3, LENGTH - 2 :] = 0
    return sentences


def test_a_language_model_learns_from_its_own_tokens() -> None:
    tokens, model = counting(64), LanguageModel()
    bundle = embrace.export(
        model,
        sample=tokens,
        vocabulary=TOKENS,
        loss="cross_entropy",
        classes_last=True,
        next_token=True,
        ignore_index=0,
        engines=("portable",),
    )
    bundle.verify()
    done = embrace.train(
        bundle, (tokens, tokens), test=(tokens, tokens), boundary="strong", rounds=3, rate=0.5, batch=8
    )
    assert done.before is not None and done.after is not None
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens))[:, :-1]
    wanted = torch.from_numpy(tokens)[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0)
    assert done.before.mean_loss == pytest.approx(expected.item(), rel=1e-4)
    assert done.before.counted == int((tokens[:, 1:] != 0).sum())
    assert (done.after.accuracy or 0) > 0.95 > (done.before.accuracy or 0)


def test_numbers_that_are_masked() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((48, 4)).astype(np.float32)
    y = (x @ rng.standard_normal((4, 3))).astype(np.float32)
    y[rng.random(y.shape) < 0.3] = -100
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    bundle = embrace.export(net, sample=x, loss="huber", delta=0.5, ignore_index=-100)
    bundle.verify()
    done = embrace.train(bundle, (x, y), test=(x, y), boundary="strong", rounds=3, batch=8)
    assert done.before is not None and done.after is not None
    with torch.no_grad():
        each = F.huber_loss(net(torch.from_numpy(x)), torch.from_numpy(y), reduction="none", delta=0.5)
    assert done.before.mean_loss == pytest.approx(each[torch.from_numpy(y != -100)].mean().item(), rel=1e-4)
    assert done.after.mean_loss < 0.8 * done.before.mean_loss


def test_labels_that_no_position_can_have() -> None:
    tokens = counting(8)
    bundle = embrace.export(LanguageModel(), sample=tokens, vocabulary=TOKENS, loss="focal", classes_last=True)
    with pytest.raises(DataError, match="has classes 0 to 6"):
        embrace.train(bundle, (tokens, tokens + 1), rounds=1)
