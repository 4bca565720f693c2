"""The tables of docs/results/reproduce.md, and the pages beside stored results, made from these results:

    embrace bench reproduce domo --scale short --data-dir data
    python -m bench.papers.page

In the page `<!-- results TABLE SCALE -->` begins a block that is replaced up to `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.papers import TABLES
from bench.papers.report import body, judged, markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "reproduce.md"
RESULTS = ROOT / "bench" / "results"
_BLOCK = re.compile(r"(<!-- results (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Fill every block of the page from the stored results."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_block(match[2], match[3])}{match[4]}", text)


def _block(table: str, scale: str) -> str:
    data = json.loads((RESULTS / f"reproduce-{table}-{scale}.json").read_text("utf-8"))
    return body(judged(data, TABLES[table]), TABLES[table].columns)


def write_pages() -> None:
    """Write the page of every stored result again: what was changed since it was run stands on it."""
    for file in RESULTS.glob("reproduce-*.json"):
        data = json.loads(file.read_text("utf-8"))
        table = TABLES[data["table"]]
        file.with_suffix(".md").write_text(markdown(judged(data, table), table.columns), "utf-8")


if __name__ == "__main__":
    write_pages()
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
