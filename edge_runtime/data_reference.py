"""Names of data: FILE.npz, FILE.csv, a folder of images, or FILE.py:NAME."""

from __future__ import annotations

from pathlib import Path


def file_of(reference: str) -> Path:
    """Return the file or folder that has to exist for the data to be read.

    >>> file_of("mine.py:load").name, file_of("photos").name
    ('mine.py', 'photos')
    """
    return Path(reference.rpartition(":")[0] if ".py:" in reference else reference)
