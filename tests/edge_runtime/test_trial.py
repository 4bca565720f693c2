"""Trial steps in a copy of the process: what they find, how they end, and that nothing of them stays."""

from __future__ import annotations

import json
import sys
from typing import Any

import onnx
import pytest

from edge_runtime.budget import AT_WORK
from edge_runtime.engine.session import _IDENTITY
from edge_runtime.measure import Case, measure
from tests.edge_runtime.conftest import Bundle, answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")

# Every test has a process that has run no graph yet, as an agent and `embrace train` have.
PROGRAM = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
from edge_runtime import trial
from edge_runtime.bundle_files import read_manifest
from edge_runtime.engine.session import give_back_memory, is_untouched
from edge_runtime.memory import current_memory
from edge_runtime.trial import Conditions, attempt
from federation.errors import EmbraceError
folder = Path(sys.argv[1])
give_back_memory()
idle, manifest = current_memory(), read_manifest(folder)
told = Conditions(folder, manifest, 32, limit=idle.anonymous + int(sys.argv[2]), idle=idle)
boundary = manifest.boundary(sys.argv[3])
found = {"untouched": is_untouched()}
"""
END = """
found["grown"] = current_memory().anonymous - idle.anonymous
found["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
print(json.dumps(found))
"""
TRY = """
try:
    found["trial"] = attempt(told, boundary, "portable").__dict__
except EmbraceError as error:
    found["error"] = [type(error).__name__, str(error)]
"""

# As a task does it with little memory: frozen layers first, then the step, as both do not fit at once.
AFTER_FROZEN_LAYERS = """
from edge_runtime.engine.portable import LayerForward
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.measure import random_inputs
value = random_inputs(manifest.input, 96, None)
for layer in manifest.frozen(boundary):
    value = LayerForward(folder / layer.forward.name, RuntimeSettings(profile="low_memory"))(value)
del value
found["frozen"] = current_memory().anonymous - idle.anonymous
give_back_memory()
found["stays"] = current_memory().anonymous - idle.anonymous
trial._steps(told, boundary, "portable", idle, lambda told: found.update(step=told["anonymous"]))
"""

# A block as large as a region of the arena comes and goes, then smaller ones.
LARGE_BLOCKS = """
import numpy as np
from edge_runtime.budget import open_budget
open_budget("8GB")
idle = current_memory()
region = np.ones(16 << 20, np.uint8)
del region
blocks = [np.ones(1 << 20, np.uint8) for _ in range(16)]
found["taken"] = current_memory().anonymous - idle.anonymous
del blocks
"""


def run(program: str, bundle: Bundle, room: int, boundary: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(PROGRAM + program + END, bundle.directory, room, boundary))
    return found


def test_a_copy_finds_what_a_fresh_process_finds_and_leaves_nothing(resnet8: Bundle) -> None:
    found = run(TRY, resnet8, 300_000_000, "strong")
    case = Case(str(resnet8.directory), "strong", batch=32, warm_up=0, iterations=2, divide=False)
    expected = measure(case).memory["anonymous"]
    assert abs(found["trial"]["anonymous"] - expected) < 0.25 * expected
    assert 0 < found["trial"]["forward_share"] < 1 and found["trial"]["step_seconds"] > 0
    assert found["untouched"] and found["grown"] < 6_000_000 and found["children"] == ""


def test_vectors_that_a_task_has_beside_are_counted(dense: Bundle, resnet8: Bundle) -> None:
    plain, more = (
        run(f"told = replace(told, vectors={count})\n{TRY}", resnet8, 300_000_000, "strong")["trial"]["anonymous"]
        for count in (0, 20)
    )
    size = 4 * resnet8.manifest.weights_of(resnet8.manifest.boundary("strong"))
    assert abs(more - plain - 20 * size) < 5 * size


def test_a_step_after_frozen_layers_takes_what_its_trial_found(resnet8: Bundle) -> None:
    found = run(TRY + AFTER_FROZEN_LAYERS, resnet8, 300_000_000, "layer3")
    assert found["frozen"] > 4 * AT_WORK, "or nothing is shown"
    assert found["stays"] < AT_WORK
    assert found["step"] < found["trial"]["anonymous"] + AT_WORK


def test_within_a_budget_large_blocks_go_back_to_the_system_at_once(digits: Bundle) -> None:
    found = run(LARGE_BLOCKS, digits, 300_000_000, "weak")
    assert found["taken"] > 5 * AT_WORK and found["grown"] < AT_WORK


def test_a_copy_ends_when_it_passes_the_limit(resnet8: Bundle) -> None:
    found = run(TRY, resnet8, 8_000_000, "strong")
    assert found["error"][0] == "OutOfMemory" and "a trial step from 'stem' took more" in found["error"][1]
    assert found["grown"] < 6_000_000 and found["children"] == ""


def test_a_copy_that_fails_says_why(resnet8: Bundle) -> None:
    broken = "told = replace(told, directory=Path('nowhere'))\n"
    found = run(broken + TRY, resnet8, 300_000_000, "strong")
    assert found["error"][0] == "EmbraceError" and "a trial step from 'stem' failed: " in found["error"][1]


def test_a_copy_that_does_nothing_is_given_up_and_a_fresh_process_measures(digits: Bundle) -> None:
    stuck = "trial.SILENCE = 0.5\ntrial._steps = lambda *told: time.sleep(600)\n"
    found = run(stuck + TRY, digits, 300_000_000, "weak")
    assert found["trial"]["anonymous"] > 0 and found["children"] == ""


def test_the_graph_that_gets_the_runtime_ready_is_what_it_says() -> None:
    graph = onnx.load_from_string(_IDENTITY).graph
    assert [(node.op_type, list(node.input), list(node.output)) for node in graph.node] == [("Identity", ["x"], ["y"])]
