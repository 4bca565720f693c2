"""The real command, run in this process: what it prints, where, and its exit code."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from embrace.cli.main import main


@dataclass(frozen=True)
class Answer:
    """What the command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that an error is allowed."""
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.removeprefix("error: ").rstrip("\n")


Embrace = Callable[..., Answer]


def run(*arguments: object) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert isinstance(stopped.value.code, int)
    return Answer(stopped.value.code, out.getvalue(), err.getvalue())


def heed_interruptions() -> None:
    """For a child: a shell's background job, and so every child of it, ignores SIGINT unless told otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def embrace(monkeypatch: pytest.MonkeyPatch) -> Embrace:
    monkeypatch.delenv("EMBRACE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to look at; tests that change it take `copied`."""
    directory = tmp_path_factory.mktemp("bundles") / "digits"
    assert run("export", "digits", "--out", directory).code == 0
    return directory


@pytest.fixture
def copied(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "digits"))


MODELS = """
import torch
from torch import nn


def good():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def other():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def fails():
    raise RuntimeError("no weights today")


def number():
    return 7


def lonely():
    return nn.Linear(4, 2)


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        left, right = self.a(x), self.b(x)
        return self.c(left) * self.d(right)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.middle(torch.relu(self.first(x)))) @ self.first.weight.t()


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Arc())

    def forward(self, x):
        return self.inner(x)


class Arc(nn.Module):
    def forward(self, x):
        return torch.atan(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(x), x


class Nothing(nn.Module):
    def forward(self, x):
        return x + 1


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.words(x).mean(1))
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A user's file with good and bad models."""
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path
