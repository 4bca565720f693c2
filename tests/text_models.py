"""Small models of texts: one that names a class, one that predicts the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.tiny_tokenizer import VOCABULARY

WIDTH = 6


class Classifier(nn.Module):
    """The mean of the words that the mask keeps, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.unsqueeze(-1).to(torch.float32)
        mean = (self.words(input_ids) * kept).sum(1) / kept.sum(1)
        return self.classifier(torch.tanh(self.hidden(mean)))


class Language(nn.Module):
    """Each word by the word before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.words(tokens))
