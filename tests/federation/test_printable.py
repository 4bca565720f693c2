"""Text from outside, rendered: nothing in it is obeyed, and it has an end."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from federation.printable import MOST_LINE, printable, printable_lines

ANYTHING = st.text(st.characters(exclude_categories=()), max_size=60)


@given(ANYTHING, st.integers(2, 80))
def test_no_control_or_format_character_is_left(text: str, most: int) -> None:
    shown = printable(text, most)
    assert len(shown) <= most
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert printable(shown, most) == shown
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P"]), max_size=60))
def test_what_prints_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_lines_stay_lines_and_each_has_an_end() -> None:
    assert printable_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"
    assert [len(line) for line in printable_lines("a" * 9999 + "\nb").split("\n")] == [MOST_LINE, 1]
