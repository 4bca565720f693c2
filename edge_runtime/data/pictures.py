"""A folder of images, one sub-folder per class; decoded when they are needed, with Pillow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array, shape_text
from edge_runtime.data.targets import order_classes
from federation.errors import DataError, EmptyData, MissingPackage
from federation.manifest import Manifest

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
_MODES = {1: "L", 3: "RGB"}


class Pictures:
    """Image files as rows of bytes, C×H×W."""

    def __init__(self, paths: list[str], shape: tuple[int, int, int]) -> None:
        self.paths = paths
        self.shape: tuple[int, ...] = (len(paths), *shape)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.about: dict[str, Any] = {"stored": "images, decoded batch by batch", "resized": None}

    def __getitem__(self, indices: NDArray[np.int64] | slice) -> Array:
        chosen = np.arange(len(self.paths))[indices]
        rows = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        for row, number in zip(rows, chosen):
            row[:] = self._decode(self.paths[number])
        return rows

    def _decode(self, path: str) -> Array:
        try:
            from PIL import Image, ImageOps
        except ModuleNotFoundError:
            raise MissingPackage("PIL", "images") from None
        _, channels, height, width = self.shape
        try:
            with Image.open(path) as file:
                if Image.MAX_IMAGE_PIXELS is not None and file.width * file.height > Image.MAX_IMAGE_PIXELS:
                    raise ValueError(f"{file.width}×{file.height} pixels are more than {Image.MAX_IMAGE_PIXELS:,}")
                image = _plain(ImageOps.exif_transpose(file)).convert(_MODES[channels])
        except Exception as error:  # decoders raise nearly everything
            message = " ".join(str(error).split())
            raise DataError(f"{path} cannot be read as an image: {type(error).__name__}: {message}") from None
        if image.size != (width, height):
            self.about["resized"] = (
                self.about["resized"] or f"{image.height}×{image.width} → {height}×{width}, bilinear"
            )
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels: Array = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)
        return pixels


def _plain(image: Image.Image) -> Image.Image:
    """Take the upper eight of sixteen bits of grey: Pillow itself would make all but the darkest white."""
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # as Pillow asks for
    if not image.mode.startswith(("I", "F")):
        return image
    from PIL import Image

    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() >= 1 << 16:
        raise ValueError(f"pixels of mode {image.mode} are not supported")
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def read_folder(folder: Path, name: str, manifest: Manifest) -> tuple[Pictures, Array, list[str]]:
    """Find images, class numbers and names of the classes."""
    shape = _image_shape(manifest, name)
    found = folder_classes(folder)
    if manifest.class_count is None:
        raise DataError(
            f"{name}: sub-folders name classes, but a label of the model {manifest.name!r} is "
            f"{shape_text(manifest.labels.shape)} ({manifest.loss.name})"
        )
    names = order_classes(name, "sub-folders", found, manifest, "an empty sub-folder counts as a class")
    paths: list[str] = []
    counts = []
    for class_name in names:
        entries = _entries(folder / class_name) if class_name in found else []  # the bundle may know more classes
        inside = sorted(entry.path for entry in entries if entry.name.lower().endswith(ENDINGS))
        paths += inside
        counts.append(len(inside))
    if not paths:
        raise EmptyData(f"{name} has no images: its sub-folders have no files ending in {' '.join(ENDINGS)}")
    pictures = Pictures(paths, shape)
    _ = pictures[:1]  # without Pillow, say so now
    return pictures, np.repeat(np.arange(len(names)), counts), names


def folder_classes(folder: Path) -> list[str]:
    """List the classes of a folder in the order of their numbers."""
    return sorted((entry.name for entry in _entries(folder) if entry.is_dir()), key=_class_order)


def _image_shape(manifest: Manifest, name: str) -> tuple[int, int, int]:
    shape = manifest.input.shape
    shape = (1, *shape) if len(shape) == 2 else shape
    if len(shape) != 3 or shape[0] not in _MODES or not manifest.input.dtype.startswith("float"):
        raise DataError(
            f"{name} has images, the model {manifest.name!r} takes {shape_text(manifest.input.shape)} "
            f"({manifest.input.dtype}): expected 1×H×W or 3×H×W of floats"
        )
    return shape[0], shape[1], shape[2]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from None


def _class_order(name: str) -> tuple[bool, int, str]:
    """Sort numbers first, by their value: 2 before 10."""
    number = name.isascii() and name.isdigit()
    return not number, int(name) if number else 0, name
