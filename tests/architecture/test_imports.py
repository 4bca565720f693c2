"""Who may import whom. The arrows of the design, read from the source of every file.

Reading the syntax tree sees imports inside functions too, which watching `sys.modules` does not, and can
check a list of what is allowed, where import-linter knows only what is forbidden. That `embrace` starts
without anything heavy is checked by starting it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset({"bench", "coordinator", "edge_runtime", "embrace", "federation", "model_export", "simulation"})
HEAVY = frozenset(
    {"fastapi", "httpx", "matplotlib", "onnx", "onnxruntime", "pydantic", "sklearn", "sqlalchemy", "torch"}
)
# What of the device the coordinator may use, too.
PUBLIC_EDGE_RUNTIME = ("bundle_files", "data_reference", "evaluate_version", "files", "sample_file", "system")


@dataclass(frozen=True)
class Rule:
    """What one package may import: of ours, of others'; a name covers what is below it."""

    ours: frozenset[str]
    outside: frozenset[str] | None = None  # None: anything that is not forbidden
    never: frozenset[str] = frozenset()

    def allows(self, target: str) -> bool:
        top = target.partition(".")[0]
        if top in OURS:
            return any(target == name or target.startswith(f"{name}.") for name in self.ours)
        if top in sys.stdlib_module_names:
            return True
        return top not in self.never and (self.outside is None or top in self.outside)


RULES = {
    "federation": Rule(ours=frozenset({"federation"}), outside=frozenset({"numpy", "tomli"})),
    "edge_runtime": Rule(
        ours=frozenset({"edge_runtime", "federation"}),
        outside=frozenset({"PIL", "httpx", "numpy", "onnxruntime", "tokenizers"}),
    ),
    "coordinator": Rule(
        ours=frozenset({"coordinator", "federation", *(f"edge_runtime.{name}" for name in PUBLIC_EDGE_RUNTIME)}),
        never=frozenset({"torch"}),
    ),
    "model_export": Rule(ours=frozenset({"edge_runtime", "federation", "model_export"})),
    "simulation": Rule(ours=frozenset({"edge_runtime", "federation", "model_export", "simulation"})),
    "bench": Rule(ours=OURS),
    "embrace": Rule(ours=OURS, never=frozenset({"torch"})),
}


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of everything the source of a module in `package` imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                prefix = ".".join([*above, *([module] if module else [])])
                yield from (f"{prefix}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield f"{package}{name}" if name.startswith(".") else name


def violations(top: str, source: str, package: str) -> list[str]:
    return [target for target in imported(source, package) if not RULES[top].allows(target)]


@pytest.mark.parametrize("top", RULES)
def test_every_import_follows_the_arrows(top: str) -> None:
    wrong = {
        str(file.relative_to(ROOT)): found
        for file in sorted((ROOT / top).rglob("*.py"))
        if (found := violations(top, file.read_text(), ".".join(file.relative_to(ROOT).parent.parts)))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("top", "source"),
    [
        ("federation", "import torch"),
        ("federation", "from edge_runtime import timing"),
        ("federation", "def f():\n    import onnxruntime as ort"),
        ("edge_runtime", "import torch.nn"),
        ("edge_runtime", "from pydantic import BaseModel"),
        ("edge_runtime", "from model_export import capture"),
        ("edge_runtime", "import importlib\nimportlib.import_module('torch')"),
        ("coordinator", "from torch import nn"),
        ("coordinator", "from edge_runtime import client"),
        ("coordinator", "import edge_runtime.trainer"),
        ("coordinator", "from edge_runtime.engine import Engine"),
        ("coordinator", "from edge_runtime.state_file import load_state"),
        ("model_export", "from coordinator import service"),
        ("model_export", "from embrace import cli"),
        ("embrace", "def f():\n    import torch"),
    ],
)
def test_a_wrong_import_is_found(top: str, source: str) -> None:
    assert violations(top, source, top)


@pytest.mark.parametrize(
    ("top", "source"),
    [
        ("federation", "import json, numpy as np\nfrom . import space"),
        ("edge_runtime", "import onnxruntime.training\nfrom federation import errors\nfrom .. import x"),
        ("coordinator", "def f():\n    from edge_runtime.evaluate_version import score_version"),
        ("coordinator", "from edge_runtime.bundle_files import read_manifest\nfrom edge_runtime import files"),
        ("coordinator", "import fastapi, sqlalchemy.orm"),
        ("model_export", "import torch\nfrom federation import errors"),
        ("bench", "import torch\nimport model_export"),
        ("embrace", "def f():\n    from model_export import bundle"),
    ],
)
def test_a_right_import_passes(top: str, source: str) -> None:
    assert violations(top, source, f"{top}.part") == []


# federation never sees a path, a clock, a thread, a socket or a source of chance. Of `io` it needs nothing either: an
# open body is whatever can seek and read.
IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "contextvars",
        "datetime",
        "fcntl",
        "glob",
        "httpx",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib.request",
    }
)


def impurities(source: str) -> list[str]:
    """What of a module's source reaches outside of its arguments: imports, and calls of `open`."""
    found = [
        target
        for target in imported(source, "federation")
        if any(target == name or target.startswith(f"{name}.") for name in IMPURE)
    ]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="open" | "input" | "print" | "exec" | "eval" as name)):
                found.append(f"{name}()")
            case ast.Call(func=ast.Attribute(attr="fromfile" | "tofile" | "memmap" | "genfromtxt" as name)):
                found.append(f"{name}()")
            case ast.Global(names=names):
                found += [f"global {name}" for name in names]
    return found


def test_federation_is_pure() -> None:
    files = {str(file.relative_to(ROOT)): file for file in sorted((ROOT / "federation").rglob("*.py"))}
    impure = {name: found for name, file in files.items() if (found := impurities(file.read_text()))}
    assert not impure


@pytest.mark.parametrize(
    "source",
    [
        "from pathlib import Path",
        "import os.path",
        "def f():\n    import threading",
        "from time import monotonic",
        "from io import BytesIO",
        "import urllib.request",
        "def f(path):\n    return open(path)",
        "import numpy as np\nx = np.fromfile('x')",
        "def f():\n    global x\n    x = 1",
    ],
)
def test_what_is_impure_is_found(source: str) -> None:
    assert impurities(source)


def test_what_is_pure_passes() -> None:
    assert impurities("import math, json\nfrom urllib.parse import urlsplit\nrunner.open(1)") == []


def loaded_by(program: str) -> set[str]:
    """The modules that a fresh interpreter has after a program."""
    shown = f"import sys\n{program}\nprint('loaded:', *sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", shown], cwd=ROOT, text=True)
    return set(output.rpartition("loaded: ")[2].split())


def test_every_command_is_light_until_it_is_called() -> None:
    files = sorted((ROOT / "embrace" / "cli").rglob("*.py"))
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert HEAVY & loaded_by(f"import {', '.join(modules)}") == set()


def test_help_loads_no_command() -> None:
    """Half of the time of `embrace --help` was numpy, a quarter the commands that were not asked for."""
    program = (
        "import contextlib\nfrom embrace.cli.main import main\nwith contextlib.suppress(SystemExit): main(['--help'])"
    )
    loaded = loaded_by(program)
    assert HEAVY & loaded == set()
    assert {"numpy", "rich", "safetensors"} & loaded == set()
    assert {name for name in loaded if name.startswith("embrace.cli.")} == {"embrace.cli.lazy", "embrace.cli.main"}
