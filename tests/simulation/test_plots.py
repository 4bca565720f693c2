"""Pictures of runs and of partitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from federation.errors import DataError, InputError
from simulation.plots import plot_curves, plot_layers, plot_partition, save
from simulation.runs import RunGroup, read_run
from tests.simulation.written_runs import LAYERS, three, write


def test_pictures(tmp_path: Path):
    group = three(tmp_path / "runs")
    layered = read_run(write(tmp_path / "layered", LAYERS))
    many = [RunGroup(f"method {number}", group.runs) for number in range(10)]
    save(plot_curves([group], "rounds", "accuracy", target=0.5), tmp_path / "one.png")
    save(plot_curves(many, "bytes", "accuracy"), tmp_path / "many.png")
    save(plot_curves([RunGroup("l", [layered])], "rounds", "discrepancy"), tmp_path / "point.png")
    for y in ("discrepancy", "svcca", "interval"):
        layered.plot(y, file=tmp_path / f"{y}.png")
    for picture in tmp_path.glob("*.png"):
        with Image.open(picture) as image:
            assert len(image.convert("RGB").getcolors(1 << 22)) > 20  # something is drawn
    assert isinstance(group.runs[0].plot(file=tmp_path / "single.png"), Figure) and (tmp_path / "single.png").is_file()
    with Image.open(tmp_path / "one.png") as image:
        assert (0x00, 0x72, 0xB2) in {colour for _, colour in image.convert("RGB").getcolors(1 << 22)}


def test_what_cannot_be_drawn(tmp_path: Path):
    run = read_run(write(tmp_path, [{"round": 0, "accuracy": None, "per_layer": {"svcca": {"in": None}}}]))
    with pytest.raises(DataError, match="no run has values of accuracy to draw"):
        plot_curves([RunGroup("x", [run])], "rounds", "accuracy")
    with pytest.raises(DataError, match=r"no line has per_layer\.interval to draw; 'embrace simulate --layers-every"):
        plot_layers(run, "interval", "rounds")
    with pytest.raises(DataError, match="no finite values"):
        plot_layers(run, "svcca", "rounds")
    with pytest.raises(DataError, match="no line has steps, expected it for --x steps"):
        run.progress("steps")
    with pytest.raises(InputError, match="y luck: expected one of accuracy, loss"):
        run.plot("luck")


def test_many_devices_and_many_classes_are_drawn_too(tmp_path: Path):
    counts = np.random.default_rng(0).integers(0, 5, (150, 62))
    save(plot_partition("many", counts), tmp_path / "many.png")
    save(plot_partition("one", counts[:1, :15]), tmp_path / "one.png")
    with Image.open(tmp_path / "many.png") as many, Image.open(tmp_path / "one.png") as one:
        assert many.width > one.width
