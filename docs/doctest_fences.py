"""Show the examples of docstrings as code: an extension of griffe, which reads the docstrings for the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^[ ]*>>> .*\n?)(?:^[ ]*\S.*\n?)*", re.MULTILINE)


def fence(text: str) -> str:
    """Put every example, up to the next empty line, between fences."""
    return _EXAMPLE.sub(lambda match: f"\n```pycon\n{match[0].rstrip()}\n```\n", text)


class DoctestFences(griffe.Extension):
    """Change every docstring when it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
