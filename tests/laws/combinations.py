"""Random combinations of all axes, as the tables of a job."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.laws.world import TIERS, Fleet

ROUNDS = 5


def combinations(count: int) -> settings:
    """The same examples every time: a law that fails must fail for everybody."""
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def _table(**choices: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {key: value if isinstance(value, st.SearchStrategy) else st.just(value) for key, value in choices.items()}
    )


SYNC = st.one_of(
    st.just({"rule": "all"}),
    _table(
        rule="rotating",
        parts=st.integers(1, 4),
        by=st.sampled_from(["layer", "channel"]),
        redistribute=st.sampled_from(["local", "averaged"]),
    ),
    _table(rule="fedlama", factor=st.integers(1, 3), accelerate=st.booleans()),
    _table(rule="one_part", part=st.sampled_from(["first_half", "second_half", "half_of_channels", "none"])),
)
RULES = (
    _table(rule="weight_decay", factor=0.01),
    _table(rule="proximal", mu=0.3),
    _table(rule="control_variate", origin=st.sampled_from(["exchanged", "own"])),
    _table(rule="momentum", factor=0.5, nesterov=st.booleans(), between=st.sampled_from(["reset", "keep", "average"])),
    _table(rule="server_momentum", beta=0.4, when=st.sampled_from(["before", "every_step"])),
)
SERVE = st.one_of(
    _table(rule="average", rate=st.sampled_from([1.0, 0.7])),
    _table(rule="momentum", factor=0.6, rate=st.sampled_from([1.0, 0.7])),
    _table(rule=st.sampled_from(["adam", "yogi", "adagrad"]), rate=0.02, tau=0.01),
)
COMBINING = st.one_of(
    st.just({}), st.just({}), st.just({"clip_norm": 0.5}), st.just({"devices": 4}), st.just({"combine": "median"})
)
PARTICIPATE = st.one_of(
    st.just({}),
    _table(count=st.integers(1, 4), balance=st.booleans()),
    _table(fraction_train=0.5),
    _table(count=st.integers(2, 5), replacement=True),
    _table(count=2, window=st.integers(1, 3)),
    _table(count=3, replacement=True, window=2),
)
LENGTH = st.one_of(_table(steps=st.integers(1, 3)), st.just({"epochs": 1}))
TIER = st.sampled_from(["strong", "strong", "moderate", "weak"])
FLEETS = st.fixed_dictionaries({number: TIER for number in range(4)})
COVERS = ("output_side", "everything", "width", "ordered_dropout", "input_side")


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly such as can run; the order of rules is sometimes one that cannot."""
    rules = [draw(rule) for rule in RULES if draw(st.integers(0, 2)) == 0]
    if draw(st.integers(0, 9)) == 0:
        rules = rules[::-1]
    return {
        "num_rounds": ROUNDS,
        "seed": draw(st.integers(0, 999)),
        "participate": draw(PARTICIPATE),
        "cover": {"rule": draw(st.sampled_from(COVERS)), "tiers": TIERS},
        "sync": draw(SYNC),
        "local": {
            "batch": 4,
            "rate": draw(st.sampled_from(["0.1", "0.1/2@2", "0.1 warmup 3"])),
            "rules": rules,
            **draw(LENGTH),
        },
        "weigh": {"by": draw(st.sampled_from(["uniform", "samples"])), "normalise": draw(st.booleans())},
        "serve": {**draw(SERVE), **draw(COMBINING)},
    }


@contextmanager
def fleet_of(job: Mapping[str, Any], tiers: Mapping[int, str]) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        yield Fleet(job, Path(folder), tiers, statistics=True)
