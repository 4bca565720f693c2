"""The line of a key, wherever TOML lets it stand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.toml_lines import line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = '''\
# bundle = "not here"
bundle = "b"                     # 2
serve.trim = 0.7                 # 3
note = """
[local]
rate = 1 \\"""
"""                              # 7
"quoted key" = 'x = [1'          # 8

[local]                          # 10
rate = "0.1"
  steps=3                        # 12
rules = [                        # 13
  { rule = "proximal", mu = 1 }, # 14
  # a comment, ] and }
  { rule = "momentum", factor = { deep = [1, 2], "last" = 3 } }, # 16
]

[ cover . tiers ]                # 19
weak = 0.2

[[lists.of.tables]]              # 22
a = 1
[[lists.of.tables]]              # 24
a = 1979-05-27 07:32:00
  [lists.of.tables.inner]        # 26
  b = [[1, 2],
       [3, 4]]                   # 28
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("bundle",), 2),
        (("serve",), 3),
        (("serve", "trim"), 3),
        (("serve", "rate"), 3),
        (("note",), 4),
        (("quoted key",), 8),
        (("local",), 10),
        (("local", "rate"), 11),
        (("local", "steps"), 12),
        (("local", "batch"), 10),
        (("local", "rules"), 13),
        (("local", "rules", 0), 14),
        (("local", "rules", 0, "mu"), 14),
        (("local", "rules", 1, "factor", "deep", 1), 16),
        (("local", "rules", 1, "factor", "last"), 16),
        (("local", "rules", 1, "nu"), 16),
        (("cover", "tiers"), 19),
        (("cover", "rule"), 19),
        (("cover", "tiers", "weak"), 20),
        (("lists", "of", "tables", 0, "a"), 23),
        (("lists", "of", "tables", 1), 24),
        (("lists", "of", "tables", 1, "a"), 25),
        (("lists", "of", "tables", 1, "inner", "b", 0, 1), 27),
        (("lists", "of", "tables", 1, "inner", "b", 1, 0), 28),
        (("participate", "count"), None),
        ((), None),
    ],
)
def test_where_a_key_stands(path: tuple[str | int, ...], line: int | None) -> None:
    assert tomllib.loads(TEXT)["local"]["rules"][1]["rule"] == "momentum"
    assert line_of(TEXT, path) == line
    assert line_of(TEXT.replace("\n", "\r\n"), path) == line


KEYS = st.sampled_from(["a", "b-c", "d_1", "7"])
PLAIN = st.integers() | st.booleans() | st.sampled_from(["0.5", '"]x"', "'{'", '"""\n#"""', "1e5"])
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def written(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"  {written(item)}, # ]\n" for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {written(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in paths(item, (*path, key)))]


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_key_of_any_text_has_a_line_with_its_own_name(table: dict[str, Any]) -> None:
    text = "".join(f"\n[t.{key}]\nx.y = {written(item)}\n" for key, item in table.items())
    for path in paths(tomllib.loads(text))[1:]:
        line = line_of(text, path)
        assert line is not None
        if isinstance(path[-1], str):
            assert path[-1] in text.split("\n")[line - 1]


@given(st.text(alphabet="[]{}=.,#a1\"' \n\\", max_size=30))
def test_no_text_takes_for_ever(text: str) -> None:
    line_of(text, ("a",))
