"""Score one version of a bundle's weights on data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_runtime.bundle_files import map_weights, own_tokenizer, read_manifest
from edge_runtime.calibrate import batches_of, calibrated
from edge_runtime.data import load_samples
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from edge_runtime.sample_file import open_samples


def score_version(bundle: Path, weights: Path, data: Path, statistics: str = "global") -> dict[str, Any]:
    """Score weights; with static `statistics` those of batch norm are computed from the data for these weights."""
    manifest = read_manifest(bundle)
    uploaded = data.suffix == ".safetensors"
    samples = (
        open_samples(data, manifest, "evaluate.data")
        if uploaded
        else load_samples(data, manifest, tokenizer=own_tokenizer(bundle, manifest))
    )
    vector = map_weights(weights, manifest.space)
    if statistics == "static":
        step = open_step(bundle, manifest, manifest.whole)
        vector = calibrated(step, manifest.space, vector, batches_of(samples))
    source = BundleSource(bundle, manifest)
    evaluator = Evaluator(bundle, source, 0, samples, settings=RuntimeSettings(), plan=ForwardPlan())
    found = evaluator.score(vector)
    return {**asdict(found), **found.describe()}
