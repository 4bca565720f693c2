"""Bundles of zoo models, exported once."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.edge_runtime import conftest as shared

images = shared.images


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory):
    """A zoo model's bundle by name, cut at its tiers."""
    made: dict[str, shared.Bundle] = {}

    def give(name: str) -> shared.Bundle:
        if name not in made:
            made[name] = shared.export(tmp_path_factory.mktemp("bundles") / name, name, engines=("portable",))
        return made[name]

    return give


@pytest.fixture(scope="session")
def narrow(tmp_path_factory):
    """The digits with boundaries of half and a quarter of the channels."""
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    directory, source = tmp_path_factory.mktemp("bundles") / "narrow", load_source("digits")
    return shared.Bundle(directory, export_bundle(source, directory, Choices(widths=(0.5, 0.25))), source)
