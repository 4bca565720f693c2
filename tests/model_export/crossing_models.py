"""Small models in which several tensors cross every cut, or weights are used in several places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _double(inner: int, outer: int) -> nn.Sequential:
    first, second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())


class UNet(nn.Module):
    """Two levels: the first skip connection lives through nearly all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _double(1, 2), _double(2, 3), _double(3, 4)
        self.up2, self.up1 = nn.ConvTranspose2d(4, 3, 2, 2), nn.ConvTranspose2d(3, 2, 2, 2)
        self.left2, self.left1, self.out = _double(6, 3), _double(4, 2), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        second = self.left2(torch.cat([self.up2(bottom), second], 1))
        result: Tensor = self.out(self.left1(torch.cat([self.up1(second), first], 1)))
        return result


class Denoiser(nn.Module):
    """DnCNN: the input itself is carried to the end."""

    def __init__(self) -> None:
        super().__init__()
        inner = [part for _ in range(4) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())]
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *inner, nn.Conv2d(3, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x - self.body(x)
        return result


class _Block(nn.Module):
    """Attention that leaves out padding, and two dense layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)).masked_fill(~keep, -1e9)
        x = x + self.out(torch.softmax(scores, -1) @ value)
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class TiedLanguageModel(nn.Module):
    """The embedding, with a padding row, is the output layer again; a mask made from the tokens goes along."""

    def __init__(self, vocabulary: int = 11, length: int = 5, width: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.places(places)
        keep = (tokens != 0)[:, None, :] & (places[None, :] <= places[:, None])
        for block in self.blocks:
            x = block(x, keep)
        result: Tensor = self.head(x).transpose(1, 2)
        return result


class SharedBlocks(nn.Module):
    """ALBERT's way: one block, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = x + torch.tanh(self.block(x))
        result: Tensor = self.leave(x)
        return result


class Cell(nn.Module):
    """A loop over the time: two states and the rest of the sequence cross, and every step has the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.leave = nn.LSTMCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(x.shape[0], 4)
        for time in range(4):
            hidden, state = self.cell(x[:, time], (hidden, state))
        result: Tensor = self.leave(hidden)
        return result


class TimeFirst(nn.Module):
    """Tensors of [time, batch, features], as PyTorch's recurrent and attention layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.leave = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.mean(0, keepdim=True)
        result: Tensor = self.leave(x.mean(0))
        return result


class Roads(nn.Module):
    """Three layers in parallel: what goes in is needed by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.join = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.join(self.left(x) * self.middle(x) + torch.tanh(self.right(x)))
        return result
