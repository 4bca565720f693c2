"""What was changed since tables were first run: a result of an earlier edition says which changes it lacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A change of data, models, measures or jobs, after which the figures of some tables are others."""

    tables: frozenset[str]
    what: str
    models: frozenset[str] = frozenset()  # of the zoo, whose runs begin anew


CHANGES = (
    Change(
        frozenset({"embracing-cases", "fedlama-femnist"}),
        "FEMNIST had ink 0 on paper 1, and its network PyTorch's first weights; now ink is 1, and the first weights "
        "are He's. Rows of FEMNIST are not valid any more",
        frozenset({"femnist_cnn"}),
    ),
    Change(
        frozenset({"partial-averaging"}),
        "the squared distance added each part at its own worst moment; now it is that of the whole model after every "
        "step, as in the paper's figure 2",
    ),
    Change(
        frozenset({"embracing-cases", "embracing-bn"}),
        "cohorts had a strong device swapped in where none was drawn (`balance`), which no paper does; now they are "
        "taken as drawn",
    ),
    Change(frozenset({"fedlama-femnist"}), "there was no local momentum; now it is 0.9"),
    Change(
        frozenset({"embracing-imdb"}),
        "weak devices ran the first 128 words again in every step; now they run once per round",
        frozenset({"imdb_bilstm"}),
    ),
)
EDITION = len(CHANGES)


def edition_of(model: str) -> int:
    """Count the changes after which runs of a model, of any width (`NAME@WIDTH`), begin anew."""
    return sum(model.partition("@")[0] in change.models for change in CHANGES)


def missed(table: str, edition: int) -> list[str]:
    """Name the changes of a table that came after an edition."""
    return [change.what for change in CHANGES[edition:] if table in change.tables]


def changed_models(table: str, edition: int) -> frozenset[str]:
    """Name the models of a table that were changed after an edition."""
    return frozenset().union(*(change.models for change in CHANGES[edition:] if table in change.tables))
