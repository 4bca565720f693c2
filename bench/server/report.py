"""What was measured about servers, and the promises that it is held against."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Name = Literal["baseline", "embrace", "flower"]
SLOWER, MODELS, FLOWER_CPU, FLOWER_TIME = 3.0, 4, 0.1, 0.05  # the bars


@dataclass(frozen=True)
class ServerRow:
    """One server under one load; lists have an entry per round."""

    server: Name
    devices: int
    parameters: int
    seconds: list[float]
    cpu: list[float]  # seconds of the server's processes
    idle: int | None  # bytes, with all devices known and the job created
    peak: int | None  # bytes

    @property
    def round_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(self.cpu)

    @property
    def rate(self) -> float:
        """Updates per second."""
        return self.devices / self.round_seconds

    @property
    def bytes_per_second(self) -> float:
        """Weights and updates, both ways."""
        return 8 * self.parameters * self.rate

    @property
    def growth(self) -> int | None:
        """Bytes on top of the idle process."""
        return None if self.peak is None or self.idle is None else self.peak - self.idle

    @property
    def models(self) -> float | None:
        """The same in models."""
        return None if self.growth is None else self.growth / (4 * self.parameters)


@dataclass(frozen=True)
class ServerBar:
    """A promise and what was measured."""

    what: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


@dataclass
class ServerReport:
    """What was measured, how, on what, and what could not be."""

    at_once: int
    device: dict[str, str]
    rows: list[ServerRow]
    notes: list[str]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> ServerReport:
        """Read what `--json` printed."""
        rows = [ServerRow(**{key.name: case[key.name] for key in fields(ServerRow)}) for case in facts["cases"]]
        return cls(facts["at_once"], facts["device"], rows, facts["notes"])

    def row(self, server: Name, devices: int, parameters: int) -> ServerRow | None:
        wanted = (server, devices, parameters)
        return next((row for row in self.rows if (row.server, row.devices, row.parameters) == wanted), None)

    def ratio(self, row: ServerRow, what: Literal["round_seconds", "cpu_seconds"], other: Name) -> float | None:
        """A server relative to another one under the same load."""
        base = self.row(other, row.devices, row.parameters)
        return float(getattr(row, what) / getattr(base, what)) if base and getattr(base, what) else None

    def bars(self) -> list[ServerBar]:
        """The project's promises about the coordinator."""
        found = []
        for row in self.rows:
            if row.server != "embrace":
                continue
            load = f"{row.devices} devices, {row.parameters:,} parameters"
            candidates = (
                ("round / baseline", SLOWER, self.ratio(row, "round_seconds", "baseline")),
                ("peak memory above idle, in models", MODELS, row.models),
                ("server CPU / Flower", FLOWER_CPU, self.ratio(row, "cpu_seconds", "flower")),
                ("round / Flower", FLOWER_TIME, self.ratio(row, "round_seconds", "flower")),
            )
            found += [
                ServerBar(f"{load}: {what}", limit, value) for what, limit, value in candidates if value is not None
            ]
        return found
