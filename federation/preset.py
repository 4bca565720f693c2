"""A published algorithm: the tables of a job file that it fills in. What a job says itself counts more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Choices on the axes, and the paper they come from. A table that is empty keeps the defaults."""

    name: str
    paper: str
    note: str  # one line for lists
    cover: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    weigh: Mapping[str, Any] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)

    def fill(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """A job's tables on top of this algorithm's: key by key, but a list of rules as a whole."""
        own = {axis: dict(getattr(self, axis)) for axis in ("cover", "sync", "local", "weigh", "serve")}
        tables = {axis: table for axis, table in own.items() if table}
        found: dict[str, Any] = dict(job)
        for axis, table in tables.items():
            given = job.get(axis, {})
            # Constants of another rule would not fit the one that the job asks for.
            replaced = isinstance(given, Mapping) and given.get("rule", table.get("rule")) != table.get("rule")
            found[axis] = {**({} if replaced else table), **given} if isinstance(given, Mapping) else given
        return found
