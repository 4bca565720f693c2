"""What a large round costs the coordinator itself: devices gather, take their tasks, send heartbeats; no sockets.

    python -m bench.server.opening 1000 5000 10000

Processor seconds of one process. Requests come in batches, as the API makes them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.server.model import vectors, write_bundle
from coordinator.batching import MOST, Item
from coordinator.coordinator import Coordinator
from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.bundles import Bundles
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.repository import Repository
from coordinator.store.schema import DeviceRecord
from edge_runtime.bundle_files import file_ref
from federation.axes.cover import DeviceProfile
from federation.job import plan_from
from federation.manifest import MANIFEST_NAME
from federation.messages import TaskOffer

PARAMETERS = 1000
NOW = 1e9  # time stands still: no device counts as gone on a machine that is busy
HEADER = f"{'devices':>8} {'gather s':>9} {'tasks s':>9} {'heartbeats s':>13}"


def measure(folder: Path, devices: int) -> tuple[float, float, float]:
    """Return processor seconds: until the last device has come, until all have tasks, of one heartbeat of each."""
    blobs = DirectoryBlobs(folder)
    repository = Repository(open_database(sqlite_url(folder)))
    coordinator = Coordinator(repository, blobs, clock=lambda: NOW)
    coordinator.start()
    try:
        ids = [f"{number:032x}" for number in range(devices)]
        profile = asdict(DeviceProfile())
        with repository.begin() as session:
            for id in ids:
                repository.add_device(session, DeviceRecord(id, id, id, False, profile, 0.0, 0.0))
        write_bundle(folder / "bundles" / "new.draft", vectors(PARAMETERS)[0])
        digest = file_ref(folder / "bundles" / "new.draft", MANIFEST_NAME).sha256
        blobs.commit(blobs.draft("bundles/new"), Bundles(blobs).key(digest))
        plan = plan_from({"bundle": "bench", "participate": {"count": devices}})
        coordinator.create_job(plan, digest)
        offers: dict[str, TaskOffer] = {}

        def ask(batch: Sequence[str]) -> None:
            answers = zip(batch, coordinator.next_tasks(batch))
            offers.update({device: offer for device, offer in answers if isinstance(offer, TaskOffer)})

        gathered = _seconds(ask, ids)
        given = _seconds(ask, [id for id in ids if id not in offers])
        assert len(offers) == devices
        return gathered, given, _seconds(coordinator.heartbeats, [(id, offer.id) for id, offer in offers.items()])
    finally:
        coordinator.stop()


def _seconds(call: Callable[[Sequence[Item]], object], items: Sequence[Item]) -> float:
    began = time.process_time()
    for first in range(0, len(items), MOST):
        call(items[first : first + MOST])
    return time.process_time() - began


if __name__ == "__main__":
    print(HEADER)
    for count in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory(prefix="embrace-bench-") as made:
            print("{:>8} {:>9.2f} {:>9.2f} {:>13.2f}".format(count, *measure(Path(made), count)), flush=True)
