"""Data in every form that a user may have it in, and models that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from edge_runtime.data import Samples
from federation.manifest import Loss, LossName, Manifest, Source, TensorSpec
from tests import tiny_bundle

ROOT = Path(__file__).resolve().parents[2]


def model(
    shape: tuple[int, ...] = (1, 8, 8),
    classes: int = 10,
    *,
    name: str = "digits",
    dtype: str = "float32",
    loss: LossName = "cross_entropy",
    output: tuple[int, ...] | None = None,
    vocabulary: int | None = None,
    ignore_index: int | None = None,
) -> Manifest:
    output = (classes,) if output is None else output
    labels = TensorSpec("int64", output[1:]) if loss == "cross_entropy" else TensorSpec("float32", output)
    given, made = TensorSpec(dtype, shape), TensorSpec("float32", output)
    return tiny_bundle.manifest(
        [tiny_bundle.layer("all", input=given, output=made)],
        name=name,
        source=Source("zoo", name),
        loss=Loss(loss, ignore_index=ignore_index),
        labels=labels,
        vocabulary=vocabulary,
        batch=32,
    )


def write_npz(x: Any, y: Any, **more: Any) -> str:
    np.savez("data.npz", x=x, y=y, **more)
    return "data.npz"


def write_text(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def write_images(classes: dict[str, list[Image.Image]], ending: str = "png") -> str:
    for name, images in classes.items():
        (Path("photos") / name).mkdir(parents=True)
        for number, image in enumerate(images):
            image.save(Path("photos") / name / f"{number}.{ending}")
    return "photos"


def grey(value: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("L", size, value)


def everything(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    return samples.batch(np.arange(len(samples)))
