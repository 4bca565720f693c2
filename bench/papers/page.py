"""The tables of docs/results/reproduce.md, and the pages beside stored results, made from these results:

    embrace bench reproduce domo --scale short --data-dir data
    python -m bench.papers.page

In the page `<!-- results TABLE SCALE -->` begins a block that is replaced up to `<!-- end -->`, and so does
`<!-- headlines -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.papers import TABLES
from bench.papers.headlines import headline_table
from bench.papers.report import body, judged, markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "reproduce.md"
RESULTS = ROOT / "bench" / "results"
_BLOCK = re.compile(r"(<!-- results (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADLINES = re.compile(r"(<!-- headlines -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Fill every block of the page from the stored results."""
    text = _HEADLINES.sub(lambda match: f"{match[1]}{headline_table(_stored)}{match[2]}", text)
    return _BLOCK.sub(lambda match: f"{match[1]}{_block(match[2], match[3])}{match[4]}", text)


def _stored(table: str, scale: str) -> dict[str, Any] | None:
    """Read a report, with the table's claims as they are stated now."""
    path = RESULTS / f"reproduce-{table}-{scale}.json"
    return judged(json.loads(path.read_text("utf-8")), TABLES[table]) if path.is_file() else None


def _block(table: str, scale: str) -> str:
    data = _stored(table, scale)
    assert data is not None, f"no result of {table}, {scale}"
    return body(data, TABLES[table].columns)


def write_pages() -> None:
    """Write the page of every stored result again: what was changed since it was run stands on it."""
    for file in RESULTS.glob("reproduce-*.json"):
        name, scale = file.stem.removeprefix("reproduce-").rsplit("-", 1)
        data = _stored(name, scale)
        assert data is not None
        file.with_suffix(".md").write_text(markdown(data, TABLES[name].columns), "utf-8")


if __name__ == "__main__":
    write_pages()
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
