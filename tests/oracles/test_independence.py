"""An oracle that imported the product would repeat its errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ALLOWED = {"__future__", "collections", "dataclasses", "numpy", "torch", "typing"}
MODULES = [path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.name.startswith("test_")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_an_oracle_imports_numpy_and_other_oracles_only(path: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    foreign = {name for name in names if not name.startswith("tests.oracles")}
    assert {name.split(".")[0] for name in foreign} <= ALLOWED
