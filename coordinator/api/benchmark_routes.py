"""Routes of benchmarks: a device tells what training costs on it, the administrator compares devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from coordinator.api.auth import Admin, Device, Known, Service
from coordinator.api.documents import BenchmarkDocument, OwnName
from coordinator.api.openapi import problems
from federation.benchmark import Benchmark

router = APIRouter(prefix="/v1")
MOST_LISTED = 1000


@router.put("/devices/me/benchmark", tags=["device"], summary="Tell what training costs here", responses=problems(400))
def set_benchmark(benchmark: Benchmark, device: Device, service: Service, known: Known) -> OwnName:
    """Replaces what this device measured before with the same bundle, batch, threads and runtime.

    Of each device the newest 32 are kept.
    """
    service.benchmarks.record(device, benchmark)
    return OwnName(device=device, name=known.name_of(device))


@router.get("/benchmarks", tags=["admin"], summary="What training costs on the devices", dependencies=[Admin])
def benchmarks(
    service: Service,
    bundle: Annotated[
        str | None, Query(pattern="^[0-9a-f]{64}$", description="Only of this bundle: sha256 of its manifest.")
    ] = None,
    device: Annotated[
        str | None, Query(min_length=1, max_length=32, description="Only of this device: its id.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 200,
) -> list[BenchmarkDocument]:
    """The newest first."""
    return [BenchmarkDocument(**row) for row in service.benchmarks.newest(bundle, device, limit)]
