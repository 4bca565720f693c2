"""Train one model on a fleet of unequal devices, the weakest included.

    export, load, Bundle     a model as a bundle that stock ONNX Runtime can train from every layer boundary
    train                    fine-tune a bundle on this machine's own data, in as much memory as there is
    Job, simulate, Run       a training job, a whole fleet in this process, and what came of it
    Client, Agent            a coordinator as its administrator sees it, and a device that takes part
    algorithms, errors       the published algorithms, and everything that is raised on purpose

Names are loaded when they are first used: a device needs no PyTorch, a coordinator neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from federation import __version__

if TYPE_CHECKING:
    from edge_runtime.agent import Agent
    from embrace import errors
    from embrace.bundles import Bundle, export, load
    from embrace.client import Client
    from embrace.fine_tuning import train
    from embrace.jobs import Job, simulate
    from federation import algorithms
    from simulation.runs import Run

__all__ = [
    "Agent",
    "Bundle",
    "Client",
    "Job",
    "Run",
    "__version__",
    "algorithms",
    "errors",
    "export",
    "load",
    "simulate",
    "train",
]

_HOMES = {
    "Agent": "edge_runtime.agent",
    "Bundle": "embrace.bundles",
    "Client": "embrace.client",
    "Job": "embrace.jobs",
    "Run": "simulation.runs",
    "export": "embrace.bundles",
    "load": "embrace.bundles",
    "simulate": "embrace.jobs",
    "train": "embrace.fine_tuning",
}
_MODULES = {"algorithms": "federation.algorithms", "errors": "embrace.errors"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found: Any = import_module(_MODULES[name])
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'embrace' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
