"""Render text that comes from outside: what a terminal would obey becomes visible, and no text is endless.

Names, messages and reports of devices, answers of a coordinator, bundles of others: all of it is shown to people, in
terminals, logs and tables. A control character, an escape sequence or a change of the reading direction in it could
clear the screen, fill the clipboard or show a text that is not there.
"""

from __future__ import annotations

MOST = 500  # characters of a text for people
MOST_LINE = 4000  # ... of a line that has such texts in it


def printable(text: object, most: int = MOST) -> str:
    """Return a text in one line, at most so long, in which everything that does not print is written as an escape.

    >>> printable("out of memory\\n\\x1b[2J\\u202e!")
    'out of memory\\\\n\\\\x1b[2J\\\\u202e!'
    >>> printable("kitchen-pi", most=8)
    'kitchen…'
    """
    whole = str(text)
    shown = whole if whole.isprintable() else "".join(map(_visible, whole[:most]))
    return shown if len(shown) <= most and len(whole) <= most else f"{shown[: most - 1]}…"


def printable_lines(text: object) -> str:
    """Render a text that may have several lines, each of them bounded."""
    return "\n".join(printable(line, MOST_LINE) for line in str(text).split("\n"))


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
