"""The published numbers of parameters, activations and capacity, exactly."""

from __future__ import annotations

import pytest

from federation.capacity import capacity
from model_export.bundle import Choices, export_bundle
from model_export.source import load_source

# model, batch, tier -> (parameters, activations, capacity rounded to two digits)
PUBLISHED = {
    "resnet20": (
        32,
        {
            "strong": (272_762, 6_947_136, "1.00"),
            "moderate": (257_994, 2_752_832, "0.42"),
            "weak": (206_346, 917_824, "0.16"),
        },
    ),
    "femnist_cnn": (
        1,
        {
            "strong": (6_603_710, 39_742, "1.00"),
            "moderate": (6_551_614, 2_110, "0.99"),
            "weak": (127_038, 62, "0.02"),
        },
    ),
    "imdb_bilstm": (
        1,
        {
            "strong": (3_611_137, 1_310_720, "1.00"),
            "moderate": (1_051_137, 1_310_720, "0.48"),
            "weak": (1_051_137, 655_360, "0.35"),
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_of_the_paper_has_the_published_numbers(name, tmp_path):
    batch, tiers = PUBLISHED[name]
    manifest = export_bundle(load_source(name), tmp_path / name, Choices(memory_plan="fast"))  # plans change none
    assert manifest.batch == batch
    found = {}
    for tier in tiers:
        boundary = manifest.boundary(tier)
        share = f"{capacity(manifest, boundary):.2f}"
        found[tier] = (manifest.weights_from(boundary.layer), boundary.activations * batch, share)
    assert found == tiers


def test_tiers_by_capacity_pick_the_papers_boundaries(tmp_path):
    choices = Choices(tiers={"weak": 0.16, "moderate": 0.42}, memory_plan="fast")
    manifest = export_bundle(load_source("resnet20"), tmp_path / "r", choices)
    assert manifest.tiers == {"strong": "stem", "weak": "layer3.0", "moderate": "layer2.0"}
    assert [b.name for b in manifest.boundaries] == ["stem", "layer2.0", "layer3.0"]
