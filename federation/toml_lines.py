"""Where the keys of a TOML text stand, for errors about a value that was read from it."""

from __future__ import annotations

import re

from federation.errors import FieldPath

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[ \t]*(?:([\w-]+)|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')[ \t]*(\.?)""")
_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""+'
    r"|'''.*?'''+"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_PLAIN = re.compile(r"[^,\]}#\n]+|.", re.DOTALL)  # a number, a word, a date; never nothing


def line_of(text: str, path: FieldPath) -> int | None:
    """Find the line of a key; if it is not in the text, that of the table it would belong to. `text` is valid TOML."""
    places = _Places(text).found
    known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in places), None)
    return None if known is None else text.count("\n", 0, places[known]) + 1


class _Places:
    """Walks over a text once and notes where each key, table and item begins."""

    def __init__(self, text: str) -> None:
        self.found: dict[FieldPath, int] = {}
        self._text = text
        self._at = 0
        self._lengths: dict[FieldPath, int] = {}  # of arrays of tables
        table: FieldPath = ()
        while self._goes_on("\0"):
            start = self._at
            if self._skip("[["):
                table = self._inside(self._keys())
                self._lengths[table] = self._lengths.get(table, 0) + 1
                table = (*table, self._lengths[table] - 1)
                self._note(table, start)
                self._skip("]]")
            elif self._skip("["):
                table = self._inside(self._keys())
                self._note(table, start)
                self._skip("]")
            else:
                self._pair(table)

    def _pair(self, table: FieldPath) -> None:
        start = self._at
        path = (*table, *self._keys())
        self._note(path, start)
        self._skip("=")
        self._value(path)

    def _value(self, path: FieldPath) -> None:
        self._skip("")
        self._note(path, self._at)
        if self._skip("["):
            index = 0
            while self._goes_on("]"):
                self._value((*path, index))
                self._skip(",")
                index += 1
        elif self._skip("{"):
            while self._goes_on("}"):
                self._pair(path)
                self._skip(",")
        else:
            match = _TEXT.match(self._text, self._at) or _PLAIN.match(self._text, self._at)
            self._at = match.end() if match else len(self._text)

    def _keys(self) -> FieldPath:
        keys = []
        more = "."
        while more and (match := _KEY.match(self._text, self._at)):
            bare, quoted, literal, more = match.groups()
            keys.append(next(key for key in (bare, quoted, literal) if key is not None))
            self._at = match.end()
        return tuple(keys)

    def _inside(self, keys: FieldPath) -> FieldPath:
        """Lead a header's keys into the last item of every array of tables on the way."""
        path: FieldPath = ()
        for key in keys:
            if path in self._lengths:
                path = (*path, self._lengths[path] - 1)
            path = (*path, key)
        return path

    def _note(self, path: FieldPath, at: int) -> None:
        for end in range(1, len(path) + 1):
            self.found.setdefault(path[:end], at)

    def _goes_on(self, end: str) -> bool:
        return not self._skip(end) and self._at < len(self._text)

    def _skip(self, token: str) -> bool:
        """Go over space and comments, and over a token if it comes next; say whether there was one."""
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        there = self._text.startswith(token, self._at)
        self._at += len(token) * there
        return there
