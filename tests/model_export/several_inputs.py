"""Models that take several inputs, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    """Wide and deep: numbers, and the ids of a user and of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 4), nn.Embedding(30, 4)
        self.wide, self.deep = nn.Linear(3, 1), nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, user: Tensor, item: Tensor, numbers: Tensor) -> Tensor:
        both = torch.cat([self.users(user), self.items(item), numbers], 1)
        result: Tensor = self.wide(numbers) + self.deep(both)
        return result


class MaskedTagger(nn.Module):
    """A model of transformers in small: called by keyword, returns a dictionary, weights tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Any]:
        assert attention_mask is not None
        hidden = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(hidden).transpose(1, 2), "hidden": hidden}


class EncoderDecoder(nn.Module):
    """Two sequences; what the encoder made is needed in every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.body = nn.Transformer(6, 2, 1, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        hidden = self.body(self.words(input_ids), self.words(decoder_input_ids))
        result: Tensor = self.head(hidden).transpose(1, 2)
        return result


class Twins(nn.Module):
    """Two images through one network."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
        self.compare = nn.Linear(4 * 4 * 4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = self.compare((self.eye(left) - self.eye(right)).abs())
        return result
