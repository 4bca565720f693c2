"""What training costs on the devices of a fleet, as each of them measured it."""

from __future__ import annotations

import json
from typing import Any

from coordinator.jobs import Units
from coordinator.store.bundles import Bundles
from coordinator.store.schema import BenchmarkRecord
from federation.benchmark import Benchmark
from federation.decode import encode
from federation.errors import InputError

MOST_KEPT = 32  # of one device
MOST_BYTES = 64 << 10  # of one benchmark as JSON


class Benchmarks:
    """Benchmarks by device, bundle, batch, threads and runtime."""

    def __init__(self, units: Units, bundles: Bundles) -> None:
        self._units = units
        self._repository = units.repository
        self._bundles = bundles

    def record(self, device: str, found: Benchmark) -> None:
        """Keep what a device measured in place of what it measured before under the same conditions."""
        if self._bundles.directory(found.bundle).is_dir():  # a device may also measure a bundle of its own
            found.check_bundle(self._bundles.manifest(found.bundle))
        body = encode(found)
        if (size := len(json.dumps(body))) > MOST_BYTES:
            raise InputError(f"the benchmark has {size} bytes as JSON; expected at most {MOST_BYTES}: fewer boundaries")
        with self._units.begin() as work:
            key = (device, found.bundle, found.batch, found.threads, found.runtime)
            self._repository.write_benchmark(work.session, BenchmarkRecord(*key, body, work.now), MOST_KEPT)

    def forget(self, device: str) -> None:
        """Remove what a device measured."""
        with self._units.begin() as work:
            self._repository.delete_benchmarks(work.session, device)

    def newest(self, bundle: str | None, device: str | None, count: int) -> list[dict[str, Any]]:
        """List benchmarks with their devices, the newest first."""
        with self._repository.reading() as session:
            found = self._repository.benchmarks(session, bundle, device, count)
        return [
            {"device": record.device, "name": name, "at": record.at, "benchmark": record.body} for record, name in found
        ]
