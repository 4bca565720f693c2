"""The README is short, and its quickstart works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from tests.stock_python import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 15
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["run"].accuracy > 0.85
    assert len(names["run"].rounds) == 20
    assert matplotlib.image.imread("accuracy.png").size


def test_the_site_includes_parts_of_it() -> None:
    parts = re.findall(r'--8<-- "README.md:(\w+)"', (ROOT / "docs" / "index.md").read_text("utf-8"))
    assert parts == ["quickstart", "flower"]
    for part in parts:
        inside = README.split(f"[start:{part}]", 1)[1].split(f"[end:{part}]", 1)[0]
        assert "](" not in inside  # a link would lead elsewhere from docs/
