"""Names of data: FILE.npz, FILE.csv, FILE.jsonl, FILE.txt, a folder of images or texts, or FILE.py:NAME."""

from __future__ import annotations

from pathlib import Path

JSON_LINES = ".jsonl"


def file_of(reference: str) -> Path:
    """Return the file or folder that has to exist for the data to be read.

    >>> file_of("mine.py:load").name, file_of("photos").name, file_of("reviews.jsonl:review:stars").name
    ('mine.py', 'photos', 'reviews.jsonl')
    """
    if f"{JSON_LINES}:" in reference.lower():
        return text_fields(reference)[0]
    return Path(reference.rpartition(":")[0] if ".py:" in reference else reference)


def text_fields(reference: str) -> tuple[Path, str, str]:
    """Return the file of JSON lines, and its fields with the text and the label.

    >>> text_fields("reviews.jsonl:review")[1:], text_fields("reviews.jsonl")[1:]
    (('review', 'label'), ('text', 'label'))
    """
    end = reference.lower().rindex(JSON_LINES) + len(JSON_LINES)
    text, _, label = reference[end:].removeprefix(":").partition(":")
    return Path(reference[:end]), text or "text", label or "label"
