"""`embrace bench step`: what is timed and reported; never how long it took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embrace as public
from bench.device.peers import process
from bench.device.peers.process import PACKAGES
from bench.device.step import StepReport, Timing
from bench.device.torch_step import suffix_module
from edge_runtime.bundle_files import read_manifest
from embrace.cli.bench.step import _table
from federation.errors import EmbraceError, MissingPackage
from model_export.ort_runner import training_module
from tests.stock_python import ROOT

Embrace = Callable[..., Any]


def has_ort_training() -> bool:
    try:
        training_module("api")
    except MissingPackage:
        return False
    return True


ENGINES = {"torch", "portable"} | ({"ort-training"} if has_ort_training() else set())


def test_json(embrace: Embrace) -> None:
    answer = embrace("bench", "step", "digits", "--rounds", 2, "--batch", 4, "--json")
    assert (answer.code, answer.err) == (0, "")
    facts = answer.json
    assert (facts["model"], facts["batch"], facts["threads"], facts["rounds"]) == ("digits", 4, 1, 2)
    assert {row["name"]: row["tiers"] for row in facts["boundaries"]} == {
        "conv1": ["strong"],
        "conv3": ["moderate"],
        "dense": ["weak"],
    }
    for row in facts["boundaries"]:
        images = row["name"] != "dense"
        assert set(row["milliseconds"]) == ENGINES | ({"channels-last"} if images else set())
        assert all(0 < m["minimum"] <= m["median"] for m in row["milliseconds"].values())
        assert row["ratios"].keys() == {f"{engine}/portable" for engine in set(row["milliseconds"]) - {"portable"}}


def test_several_models_and_batches_with_the_worst_ratio_first(embrace: Embrace) -> None:
    answer = embrace("bench", "step", "mnist_lr", "digits", "--rounds", 1, "--batch", 2, "--batch", 4, "--json")
    cases = [(report["model"], report["batch"]) for report in answer.json["reports"]]
    assert cases == [("mnist_lr", 2), ("mnist_lr", 4), ("digits", 2), ("digits", 4)]
    timings = [Timing("slower", [], {"portable": [2.0], "torch": [4.0]})]
    timings += [Timing("faster", [], {"portable": [2.0], "torch": [1.0], "compile": [9.0]}), Timing("alone", [])]
    report = StepReport("m", 4, 1, {}, timings, [])
    columns = _table([report], 1).columns
    assert [str(cell) for cell in columns[1].cells] == ["faster", "slower", "alone"]
    assert [column.header for column in columns[-2:]] == ["torch / portable", "compile / portable"]


def test_a_peer_that_cannot_be_had_is_left_out(
    embrace: Embrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("jax", "mnn"):
        monkeypatch.setitem(PACKAGES, name, ("./no-such-package",))
    options = ("--boundaries", "weak", "--rounds", 1, "--peers", "jax,mnn", "--json")
    answer = embrace("bench", "step", "digits", *options)
    assert (answer.code, set(answer.json["boundaries"][0]["milliseconds"])) == (0, ENGINES)
    for name in ("jax", "mnn"):
        assert any(note.startswith(f"{name}: {name} cannot be installed: ") for note in answer.json["notes"])


def test_a_peer_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that computes something else is refused: the losses are compared with those of all engines."""
    made = public.export("digits", tmp_path / "digits")
    manifest = read_manifest(made.path)
    monkeypatch.setattr(process, "environment", lambda name: Path(sys.executable))
    step = process.PeerStep("no", made.path, manifest, manifest.boundaries[0], 1)
    with pytest.raises(EmbraceError, match=r"no_step\.py"):
        step.start(np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64))
    step.close()


@pytest.mark.slow
def test_jax_has_the_same_loss(embrace: Embrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm, depthwise and strided convolutions, pooling; or pip says why it cannot be had."""
    for model in ("digits", "mobilenetv2", "femnist_cnn"):
        answer = embrace("bench", "step", model, "--batch", 4, "--rounds", 1, "--peers", "jax", "--json")
        for row in answer.json["boundaries"]:
            assert "jax" in row["milliseconds"] or any("cannot be installed" in n for n in answer.json["notes"])
    answer = embrace("bench", "step", "text_transformer", "--batch", 2, "--rounds", 1, "--peers", "jax", "--json")
    assert any("jax: it cannot draw the dropout masks" in note for note in answer.json["notes"])


@pytest.mark.slow
def test_mnn_has_the_same_loss(embrace: Embrace) -> None:
    """Batch norm, strided convolutions, pooling; or pip says why it cannot be had."""
    for model in ("resnet20", "femnist_cnn"):
        answer = embrace("bench", "step", model, "--batch", 4, "--rounds", 1, "--peers", "mnn", "--json")
        if any("cannot be installed" in note for note in answer.json["notes"]):
            pytest.skip("MNN cannot be installed here")
        assert all("mnn" in row["milliseconds"] for row in answer.json["boundaries"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_a_compiled_step_has_the_same_loss(embrace: Embrace) -> None:
    """With dropout, too: what is compared is the loss without it."""
    options = ("--boundaries", "weak", "--rounds", 1, "--batch", 2, "--peers", "compile", "--json")
    for model in ("digits", "text_transformer"):
        answer = embrace("bench", "step", model, *options)
        found = answer.json["boundaries"][0]["milliseconds"]
        assert "compile" in found or any(note.startswith("compile: ") for note in answer.json["notes"])


def test_table_and_picture(embrace: Embrace, tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    options = ("--boundaries", "classifier", "--rounds", 1, "--batch", 4, "--plot", picture)
    answer = embrace("bench", "step", "digits", *options)
    assert answer.code == 0
    assert "classifier" in answer.out and "conv1" not in answer.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_dropout_and_embedding(embrace: Embrace) -> None:
    """The losses agree with the same masks, or nothing would be timed."""
    answer = embrace(
        "bench", "step", "text_transformer", "--boundaries", "moderate", "--rounds", 1, "--batch", 2, "--json"
    )
    assert answer.code == 0
    assert {"torch", "portable"} <= set(answer.json["boundaries"][0]["milliseconds"])


def test_a_bundle_of_your_own(embrace: Embrace, models: Path, tmp_path: Path) -> None:
    """Timed as it is, trained weights included: the losses agree with the module's, or nothing would be timed."""
    made = public.export(f"{models}:good", tmp_path / "own", input_shape=(4,), tiers={"weak": 0.5})
    rng = np.random.default_rng(0)
    data = rng.random((60, 4), np.float32), rng.integers(0, 3, 60)
    trained = public.train(made, data, rounds=1, boundary="strong", out=tmp_path / "trained").bundle
    answer = embrace("bench", "step", trained.path, "--rounds", 1, "--batch", 4, "--json")
    assert (answer.code, answer.err) == (0, "")
    assert {row["name"]: row["tiers"] for row in answer.json["boundaries"]} == {"0": ["strong"], "2": ["weak"]}
    assert all({"torch", "portable"} == set(row["milliseconds"]) for row in answer.json["boundaries"])
    models.unlink()
    answer = embrace("bench", "step", trained.path, "--rounds", 1, "--batch", 4, "--boundaries", "weak", "--json")
    assert [set(row["milliseconds"]) for row in answer.json["boundaries"]] == [{"portable"}]
    assert any(note.startswith("torch: the source") for note in answer.json["notes"])
    answer = embrace("bench", "step", trained.path, "--boundaries", "conv9")
    assert answer.code == 2 and "no boundary or tier named 'conv9'; this bundle has: strong, weak, 0, 2" in answer.error


def test_narrow_boundaries_of_a_bundle(embrace: Embrace, tmp_path: Path) -> None:
    public.export("digits", tmp_path / "narrow", widths=(0.5,))
    answer = embrace("bench", "step", tmp_path / "narrow", "--rounds", 1, "--batch", 4, "--boundaries", "all", "--json")
    assert answer.json["boundaries"][-1]["name"] == "conv1@0.5"
    assert set(answer.json["boundaries"][-1]["milliseconds"]) == {"portable"}


def test_a_bundle_needs_no_pytorch(models: Path, tmp_path: Path) -> None:
    """A device has neither torch nor onnx; here both cannot be imported."""
    public.export(f"{models}:good", tmp_path / "own", input_shape=(4,))
    program = (
        "import sys\nsys.modules.update(dict.fromkeys(('torch', 'onnx', 'onnxscript')))\n"
        "from embrace.cli.main import main\nmain(sys.argv[1:])"
    )
    options = ["bench", "step", str(tmp_path / "own"), "--boundaries", "all", "--rounds", "1", "--json"]
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [set(row["milliseconds"]) for row in facts["boundaries"]] == [{"portable"}] * 2
    assert facts["versions"].keys() == {"onnxruntime"} and "torch: not installed" in " ".join(facts["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((str(ROOT / "tests"),), "is not a bundle: it has no manifest.json"),
        (("resnet21",), "no zoo model is called 'resnet21'"),
        (("digits", "--boundaries", "conv9"), "no layer starts with a module named 'conv9'"),
        (("digits", "--boundaries", ","), "expected names separated by commas"),
        (
            ("digits", "--peers", "tensorflow"),
            "--peers: expected channels-last, compile, jax, mnn or",
        ),
        (("digits", "mnist_lr", "--plot", "x.png"), "--plot: draws one model at one batch size"),
    ],
)
def test_wrong_requests(embrace: Embrace, arguments: tuple[str, ...], message: str) -> None:
    answer = embrace("bench", "step", *arguments)
    assert answer.code == 2
    assert message in answer.error


def test_the_threads_of_torch_are_put_back(embrace: Embrace) -> None:
    before = torch.get_num_threads()
    embrace("bench", "step", "mnist_lr", "--rounds", 1, "--batch", 2, "--threads", before + 1)
    assert torch.get_num_threads() == before


def test_a_ratio_compares_each_round_with_itself() -> None:
    timing = Timing("x", [], {"portable": [1.0, 20.0, 3.0], "torch": [2.0, 10.0, 6.0]})
    assert timing.ratio("portable", "torch") == 0.5
    assert timing.ratio("portable", "ort-training") is None


class Reversed(nn.Module):
    """Children run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_the_suffix_of_a_module_is_found_by_its_values() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Flatten(), nn.Linear(4, 2))
    x = np.ones((2, 3), np.float32)
    with torch.no_grad():
        activation = module[0](torch.from_numpy(x)).numpy()
    assert suffix_module(module, x, x, 0) is module
    found = suffix_module(module, x, activation, 1)
    assert found is not None and list(found.children()) == [module[2]]
    assert suffix_module(module, x, activation + 1, 1) is None


def test_dropout_goes_with_what_follows_it() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Dropout(), nn.Flatten(), nn.Linear(4, 2))
    x = np.ones((2, 3), np.float32)
    with torch.no_grad():
        activation = module[0](torch.from_numpy(x)).numpy()
    found = suffix_module(module, x, activation, 1)
    assert found is not None and list(found.children()) == list(module)[2:]


def test_children_that_do_not_run_in_order_have_no_suffix() -> None:
    module, x = Reversed(), np.ones((2, 3), np.float32)
    with torch.no_grad():
        activation = module.second(torch.from_numpy(x)).numpy()
    assert suffix_module(module, x, activation, 1) is None
