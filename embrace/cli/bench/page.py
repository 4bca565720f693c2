"""The tables and pictures of docs/results/latency.md and browser.md, made from stored results:

    embrace bench latency resnet20 --iterations 30 --json > bench/results/latency-resnet20.json
    embrace bench browser --json > bench/results/browser.json
    python -m embrace.cli.bench.page

A result is what `--json` printed. In a page `<!-- results NAME WHAT -->` begins a block that is replaced up to
`<!-- end -->`; WHAT is the number of a table, `bars`, `notes` or `device`. docs/images/NAME.png is drawn where it is
shown.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from embrace.cli.bench.browser import report_of as browser_report
from embrace.cli.bench.latency import draw as draw_latency
from embrace.cli.bench.latency import report_of as latency_report
from embrace.cli.bench.memory import draw as draw_memory
from embrace.cli.bench.memory import report_of as memory_report
from embrace.cli.bench.report import BenchReport, bullets

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "docs" / "results" / name for name in ("latency.md", "browser.md")]
RESULTS = ROOT / "bench" / "results"
_BLOCK = re.compile(r"(<!-- results (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PICTURE = re.compile(r"\]\(\.\./images/((?:latency|memory)-[\w.-]+)\.png\)")


def filled(text: str) -> str:
    """Fill every block of a page from the stored results."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_block(_report(match[2]), match[3])}\n{match[4]}", text)


def _block(report: BenchReport, what: str) -> str:
    if what == "bars":
        return bullets(report.bars)
    if what == "notes":
        return bullets(report.notes)
    if what == "device":
        return bullets(f"{key}: {value}" for key, value in report.device.items())
    return report.tables[int(what)].markdown()


def _report(name: str) -> BenchReport:
    from bench.device.browser import BrowserReport
    from bench.device.latency import LatencyReport
    from bench.device.memory import MemoryReport

    if name.startswith("browser"):
        return browser_report(BrowserReport.from_json(_facts(name)))
    if name.startswith("latency-"):
        return latency_report(LatencyReport.from_json(_facts(name)))
    return memory_report(MemoryReport.from_json(_facts(name)))


def _facts(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _draw(name: str, file: Path) -> None:
    from bench.device.latency import LatencyReport
    from bench.device.memory import MemoryReport

    if name.startswith("latency-"):
        draw_latency(LatencyReport.from_json(_facts(name)), file)
    else:
        draw_memory(MemoryReport.from_json(_facts(name)), file)


def main() -> None:
    for page in PAGES:
        text = filled(page.read_text("utf-8"))
        page.write_text(text, "utf-8")
        for name in dict.fromkeys(_PICTURE.findall(text)):
            _draw(name, page.parent.parent / "images" / f"{name}.png")


if __name__ == "__main__":
    main()
