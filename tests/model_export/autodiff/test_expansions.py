"""Operators that are written out as simpler ones, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model_export.autodiff.module_harness import check_module


class Sampled(nn.Module):
    """Pixels and places that are both learnt; some places lie outside."""

    def __init__(self, axes: int, **options: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.pixels = (nn.Conv2d, nn.Conv3d)[axes - 2](2, 3, 1)
        self.grid = nn.Parameter(torch.rand(1, *[3, 4, 2][:axes], axes) * 3 - 1.5)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        places = self.grid.expand(x.shape[0], *self.grid.shape[1:])
        return F.grid_sample(self.pixels(x), places, **self.options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "padding", "aligned"),
    [
        ("bilinear", "zeros", False),
        ("bilinear", "border", True),
        ("bilinear", "reflection", False),
        ("bilinear", "reflection", True),
        ("nearest", "zeros", False),
    ],
)
def test_pixels_at_places(mode: str, padding: str, aligned: bool) -> None:
    module = Sampled(2, mode=mode, padding_mode=padding, align_corners=aligned)
    exported = check_module(module, torch.randn(2, 2, 5, 6))
    assert "GridSample" not in {node.op_type for node in exported.train.graph.node}


class Spectrum(nn.Module):
    """Frequencies of what a layer gives, and the way back."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        signal = self.layer(x)
        if self.way == "fnet":
            return torch.fft.fft2(signal).real
        if self.way == "short":
            bins = torch.view_as_real(torch.fft.rfft(signal, n=8))
        else:
            bins = torch.view_as_real(torch.fft.rfft(signal, norm="ortho"))
        return bins.square().sum(-1)


@pytest.mark.parametrize("way", ["fnet", "short", "ortho"])
def test_fourier_transforms_are_products(way: str) -> None:
    check_module(Spectrum(way), torch.randn(2, 4, 6))


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 30)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.stft(self.layer(x), 8, 3, window=self.get_buffer("window"), center=False, return_complex=False)
        return frames.square().sum(-1)


@pytest.mark.filterwarnings("ignore:.*return_complex.*")
def test_short_transforms_are_products() -> None:
    check_module(Spectrogram(), torch.randn(2, 30))


def test_local_response_normalisation() -> None:
    net = nn.Sequential(nn.Conv2d(2, 6, 1), nn.LocalResponseNorm(5, alpha=0.5), nn.Conv2d(6, 2, 1))
    check_module(net, torch.randn(2, 2, 3, 3))
