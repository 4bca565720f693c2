"""Networks of textbooks and papers, small and written plainly, that bench/models.py tries to make bundles of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation.manifest import Loss

TOKENS, LENGTH = 24, 8
TEXT: dict[str, Any] = {"input_shape": (LENGTH,), "input_dtype": "int64", "vocabulary": TOKENS}
IMAGE: dict[str, Any] = {"input_shape": (3, 32, 32)}
REAL = Loss("mse")


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.inner(x)
        return added


class Transposed(nn.Module):
    """Swap two axes."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.axes = (first, second)

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.axes)


def generator() -> nn.Module:
    """DCGAN's generator."""
    parts: list[nn.Module] = [nn.Unflatten(1, (16, 1, 1)), nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False)]
    for width, out in ((32, 16), (16, 8)):
        parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, out, 4, 2, 1, bias=False)]
    return nn.Sequential(*parts, nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())


class VariationalAutoencoder(nn.Module):
    """Draws its code by the reparametrisation trick."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12))
        self.decoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        decoded: Tensor = self.decoder(code)
        return decoded


class Siamese(nn.Module):
    """Two halves of the input through one network, compared."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.tower(x[:, 0]), self.tower(x[:, 1])
        compared: Tensor = self.head((left - right).abs())
        return compared


class SpeechNet(nn.Module):
    """Convolutions over time and a bidirectional GRU; log-probabilities per frame, as CTC takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(8, 16, 3, 2, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 3, 1, 1))
        self.reader = nn.GRU(16, 12, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        frames = F.relu(self.front(x)).transpose(1, 2)
        return F.log_softmax(self.head(self.reader(frames)[0]), -1)


class AttentionTranslator(nn.Module):
    """An encoder, and a decoder that looks back at it while it reads the same sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRUCell(32, 16)
        self.score = nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(32, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.words(x)
        memory, last = self.encoder(embedded)
        state, outputs = last[0], []
        for step in range(LENGTH):
            weights = torch.softmax((self.score(memory) @ state.unsqueeze(-1)).squeeze(-1), -1)
            context = (weights.unsqueeze(1) @ memory).squeeze(1)
            state = self.decoder(torch.cat([embedded[:, step], context], 1), state)
            outputs.append(self.out(torch.cat([state, context], 1)))
        return torch.stack(outputs, 1)


class HighwayLayer(nn.Module):
    """A gate decides between a transformation and the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        open_ = torch.sigmoid(self.gate(x))
        return open_ * F.relu(self.change(x)) + (1 - open_) * x


class Capsules(nn.Module):
    """Primary capsules and one layer of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2))
        self.weight = nn.Parameter(torch.randn(1, 36, 5, 6, 4) * 0.1)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = (x * x).sum(-1, keepdim=True)
        squashed: Tensor = square / (1 + square) * x / torch.sqrt(square + 1e-8)
        return squashed

    def forward(self, x: Tensor) -> Tensor:
        primary = self.squash(self.front(x).reshape(x.shape[0], -1, 4))
        votes = (self.weight @ primary[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            share = torch.softmax(logits, 2).unsqueeze(-1)
            out = self.squash((share * votes).sum(1))
            logits = logits + (votes * out.unsqueeze(1)).sum(-1)
        lengths: Tensor = torch.linalg.vector_norm(out, dim=-1)
        return lengths


class NeuralOde(nn.Module):
    """Runge-Kutta steps of one learnt field."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 12), nn.Linear(12, 3)
        self.field = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.lift(x), 0.25
        for _ in range(4):
            a = self.field(y)
            b = self.field(y + h / 2 * a)
            c = self.field(y + h / 2 * b)
            d = self.field(y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
        ended: Tensor = self.head(y)
        return ended


def mixer() -> nn.Module:
    """MLP-Mixer."""
    width, patches = 16, 16
    parts: list[nn.Module] = [nn.Conv2d(3, width, 8, 8), nn.Flatten(2), Transposed(1, 2)]
    for _ in range(2):
        tokens = nn.Sequential(nn.Linear(patches, 24), nn.GELU(), nn.Linear(24, patches))
        channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        parts += [Residual(nn.LayerNorm(width), Transposed(1, 2), tokens, Transposed(1, 2))]
        parts += [Residual(nn.LayerNorm(width), channels)]
    return nn.Sequential(*parts, Transposed(1, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 5))


class SqueezeExcite(nn.Module):
    """Channels weighted by what all pixels say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1), nn.Hardsigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        weighed: Tensor = x * self.weigh(x)
        return weighed


def squeeze_excite() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU()]
    for _ in range(3):
        parts += [nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), SqueezeExcite(8)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(4, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**k) for k in range(4))
        self.back = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.skip = nn.ModuleList(nn.Conv1d(8, 12, 1) for _ in range(4))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(12, 12, 1), nn.ReLU(), nn.Conv1d(12, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.start(x), torch.zeros(())
        for k, (dilated, back, skip) in enumerate(zip(self.dilated, self.back, self.skip, strict=True)):
            filtered, gate = dilated(F.pad(x, (2**k, 0))).chunk(2, 1)
            gated = torch.tanh(filtered) * torch.sigmoid(gate)
            total, x = total + skip(gated), x + back(gated)
        ended: Tensor = self.end(total)
        return ended


class TemporalBlock(nn.Module):
    """A block of a TCN: weight norm, causal dilation, dropout, residual."""

    def __init__(self, inside: int, out: int, dilation: int) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.reach = 2 * dilation
        self.first = norm(nn.Conv1d(inside, out, 3, dilation=dilation))
        self.second = norm(nn.Conv1d(out, out, 3, dilation=dilation))
        self.match = nn.Conv1d(inside, out, 1) if inside != out else nn.Identity()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.first(F.pad(x, (self.reach, 0)))))
        y = self.drop(F.relu(self.second(F.pad(y, (self.reach, 0)))))
        return F.relu(y + self.match(x))


class ConvLstm(nn.Module):
    """An LSTM whose products are convolutions, over a short film."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(3 + 6, 24, 3, padding=1)
        self.head = nn.Sequential(nn.Conv2d(6, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))

    def forward(self, film: Tensor) -> Tensor:
        h = c = torch.zeros_like(film[:, 0, :1]).expand(-1, 6, -1, -1)
        for t in range(film.shape[1]):
            i, f, o, g = self.gates(torch.cat([film[:, t], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        told: Tensor = self.head(h)
        return told


class GruLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 12)
        self.reader = nn.GRU(12, 16, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(16, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.reader(self.words(x))[0])
        return logits.transpose(1, 2)


class DeepSets(nn.Module):
    """A sum over the elements of a set between two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU())
        self.all = nn.Sequential(nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        told: Tensor = self.all(self.each(x).sum(1))
        return told


class GraphConvolution(nn.Module):
    """Two graph convolutions; the input has features and, behind them, the adjacency of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        features, adjacency = x[..., :5], (x[..., 5:] > 0).float() + torch.eye(6)
        degree = adjacency.sum(-1).clamp(min=1).rsqrt()
        adjacency = adjacency * degree.unsqueeze(-1) * degree.unsqueeze(-2)
        hidden = F.relu(adjacency @ self.first(features))
        hidden = F.relu(adjacency @ self.second(hidden))
        told: Tensor = self.head(hidden.mean(1))
        return told


class RadianceField(nn.Module):
    """NeRF: positional encoding, a skip connection, density and colour."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 ** torch.arange(4))
        self.first = nn.Sequential(nn.Linear(27, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(32 + 27, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        angles = (x.unsqueeze(-1) * self.get_buffer("waves")).flatten(1)
        encoded = torch.cat([x, angles.sin(), angles.cos()], 1)
        out = self.second(torch.cat([self.first(encoded), encoded], 1))
        return torch.cat([torch.sigmoid(out[:, :3]), F.softplus(out[:, 3:])], 1)


class MaskedConvolution(nn.Conv2d):
    """A convolution of PixelCNN: pixels before this one only."""

    def __init__(self, kind: str, inside: int, out: int, size: int) -> None:
        super().__init__(inside, out, size, padding=size // 2)
        mask = torch.ones_like(self.weight)
        mask[:, :, size // 2, size // 2 + (kind == "B") :] = 0
        mask[:, :, size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.get_buffer("mask"), self.bias, padding=self.padding)


def pixel_cnn() -> nn.Module:
    parts: list[nn.Module] = [MaskedConvolution("A", 1, 8, 7), nn.ReLU()]
    for _ in range(2):
        parts += [MaskedConvolution("B", 8, 8, 3), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv2d(8, 4, 1))


class HyperNetwork(nn.Module):
    """A network whose second half gets its weights from its first."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8 * 5 + 5))
        self.features, self.head = nn.Linear(10, 8), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.condition(x[:, :6])
        weight, bias = made[:, :40].reshape(-1, 5, 8), made[:, 40:]
        hidden = (weight @ F.relu(self.features(x[:, 6:])).unsqueeze(-1)).squeeze(-1) + bias
        told: Tensor = self.head(F.relu(hidden))
        return told


class MemoryNetwork(nn.Module):
    """Attention over sentences, several hops; the last sentence is the question."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.keys, self.values = (nn.Embedding(TOKENS, 12, padding_idx=0) for _ in range(3))
        self.hop, self.out = nn.Linear(12, 12), nn.Linear(12, 6)

    def forward(self, story: Tensor) -> Tensor:
        question = self.asks(story[:, -1]).sum(1)
        keys, values = self.keys(story[:, :-1]).sum(2), self.values(story[:, :-1]).sum(2)
        for _ in range(3):
            weights = torch.softmax((keys * question.unsqueeze(1)).sum(-1), 1)
            question = self.hop(question) + (weights.unsqueeze(-1) * values).sum(1)
        told: Tensor = self.out(question)
        return told


class FeaturewiseModulation(nn.Module):
    """FiLM: the second input of an image classifier scales and shifts channels; it comes behind the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.film = nn.Linear(4, 16)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        image, given = x[:, :144].reshape(-1, 1, 12, 12), x[:, 144:]
        scale, shift = self.film(given)[..., None, None].chunk(2, 1)
        features = F.relu(self.second(F.relu(self.first(image))) * scale + shift)
        told: Tensor = self.head(features.mean((2, 3)))
        return told


class SpatialTransformer(nn.Module):
    """Learns where to look, and samples the image there."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(6 * 36, 6)
        self.locate = nn.Sequential(nn.Conv2d(1, 6, 5, 2), nn.ReLU(), nn.Flatten(), last)
        self.classify = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 4))
        nn.init.normal_(last.weight, std=0.01)
        last.bias.data.copy_(torch.tensor([0.9, 0.1, 0.05, -0.1, 0.8, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.locate(x).reshape(-1, 2, 3), list(x.shape), align_corners=False)
        seen: Tensor = self.classify(F.grid_sample(x, grid, align_corners=False))
        return seen


class StochasticDepth(nn.Module):
    """A residual block that is left out for some samples of a batch."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.keep = 1 - rate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if not self.training:
            return x + y
        kept = (self.keep + torch.rand(x.shape[0], 1, 1, 1)).floor()
        return x + y / self.keep * kept


class NoisyNet(nn.Module):
    """Noise on the activations while training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        told: Tensor = self.head(F.relu(self.second(x)))
        return told


class VideoNet(nn.Sequential):
    """Convolutions in three dimensions."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(2, 6, 3, 2, 1), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 8, 3, 1, 1), nn.ReLU(),
            nn.ConvTranspose3d(8, 4, 2, 2), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(4 * 4 * 4 * 4, 3),
        )  # fmt: skip


class PackedTagger(nn.Module):
    """Reads sentences of different lengths: the state after the last true word decides."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 12, padding_idx=0)
        self.reader = kind(12, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        last: Any = self.reader(packed)[1]
        last = last[0] if isinstance(last, tuple) else last
        told: Tensor = self.head(torch.cat([last[0], last[1]], 1))
        return told


class Spectral(nn.Module):
    """A filter in the domain of frequencies, as Fourier neural operators learn it."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(1, 6), nn.Linear(6, 1)
        self.real = nn.Parameter(torch.randn(6, 6, 5) * 0.1)
        self.imaginary = nn.Parameter(torch.randn(6, 6, 5) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        signal = self.lift(x.unsqueeze(-1)).transpose(1, 2)
        bins = torch.view_as_real(torch.fft.rfft(signal))[:, :, :5]
        real = torch.einsum("bik,iok->bok", bins[..., 0], self.real) - torch.einsum(
            "bik,iok->bok", bins[..., 1], self.imaginary
        )
        told: Tensor = self.head(F.gelu(real.transpose(1, 2)))
        return told.squeeze(-1)


class BilinearUpsampler(nn.Sequential):
    """A small segmentation network."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
            nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Upsample(size=(40, 36), mode="bicubic", align_corners=True),
            nn.Conv2d(8, 4, 1),
        )  # fmt: skip


def tcn() -> nn.Module:
    blocks = [TemporalBlock(4, 8, 1), TemporalBlock(8, 8, 2), TemporalBlock(8, 8, 4)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))


def highway() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), HighwayLayer(16), HighwayLayer(16), nn.Linear(16, 3))


def stochastic_depth() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), StochasticDepth(8, 0.2), StochasticDepth(8, 0.4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def shaped(*shape: int, **more: Any) -> dict[str, Any]:
    return {"input_shape": shape, **more}


# Name, how it is built, what it takes.
TEXTBOOK: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
    ("DCGAN's generator", generator, shaped(16, loss=REAL)),
    ("variational autoencoder", VariationalAutoencoder, shaped(20, loss=REAL)),
    ("siamese network", Siamese, shaped(2, 10)),
    ("speech net with log-probabilities", SpeechNet, shaped(8, 20, loss=REAL)),
    ("translator with attention", AttentionTranslator, {**TEXT, "loss": REAL}),
    ("highway network", highway, shaped(10)),
    ("capsules with routing", Capsules, shaped(1, 20, 20, loss=REAL)),
    ("neural ODE", NeuralOde, shaped(8)),
    ("MLP-Mixer", mixer, IMAGE),
    ("squeeze and excite", squeeze_excite, IMAGE),
    ("WaveNet", WaveNet, shaped(4, 24)),
    ("temporal convolutional network", tcn, shaped(4, 16)),
    ("convolutional LSTM", ConvLstm, shaped(3, 3, 8, 8)),
    ("GRU language model", GruLanguageModel, TEXT),
    ("deep sets", DeepSets, shaped(6, 4)),
    ("graph convolution", GraphConvolution, shaped(6, 11)),
    ("radiance field", RadianceField, shaped(3, loss=REAL)),
    ("PixelCNN", pixel_cnn, shaped(1, 10, 10)),
    ("hypernetwork", HyperNetwork, shaped(16)),
    ("memory network", MemoryNetwork, shaped(5, 4, input_dtype="int64", vocabulary=TOKENS)),
    ("FiLM", FeaturewiseModulation, shaped(148)),
    ("spatial transformer", SpatialTransformer, shaped(1, 16, 16)),
    ("stochastic depth", stochastic_depth, IMAGE),
    ("noise on activations", NoisyNet, shaped(10)),
    ("convolutions in 3-D", VideoNet, shaped(2, 8, 8, 8)),
    ("packed sequences, LSTM", lambda: PackedTagger(nn.LSTM), TEXT),
    ("packed sequences, GRU", lambda: PackedTagger(nn.GRU), TEXT),
    ("packed sequences, RNN", lambda: PackedTagger(nn.RNN), TEXT),
    ("Fourier neural operator", Spectral, shaped(16, loss=REAL)),
    ("bilinear and bicubic upsampling", BilinearUpsampler, IMAGE),
]
