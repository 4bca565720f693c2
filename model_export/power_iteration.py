"""Spectral norm: a weight divided by its largest singular value, which a power iteration follows from step to step.

The graph is captured with the vectors u and v standing still, as in inference: that is what frozen layers compute, and
what is differentiated (PyTorch takes no gradient through the iteration). A training graph first moves u and v and gives
them back as new statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from model_export.autodiff.engine import Context
from model_export.errors import ExportError

BEFORE = ".before"  # a vector as the step finds it; its own name is the moved one


@dataclass(frozen=True)
class PowerIteration:
    """One spectral norm of a module."""

    weight: str
    u: str
    v: str
    dim: int  # of the weight: the rows of its matrix
    steps: int
    epsilon: float
    u_first: bool


@contextlib.contextmanager
def standing_still(module: nn.Module) -> Iterator[list[PowerIteration]]:
    """Inside, no power iteration moves its vectors; gives those that would have, filled as the module runs."""
    paths = {id(part): path for path, part in module.named_modules()}
    found: list[PowerIteration] = []
    compute = SpectralNorm.compute_weight

    def of_hook(self: SpectralNorm, owner: nn.Module, do_power_iteration: bool) -> Any:
        if do_power_iteration:
            start = _join(paths[id(owner)], self.name)
            names = f"{start}_orig", f"{start}_u", f"{start}_v"
            found.append(PowerIteration(*names, self.dim, self.n_power_iterations, self.eps, u_first=False))
        return compute(self, owner, False)

    def of_parametrization(self: Any, matrix: Any, steps: int) -> None:
        path = paths[id(self)]
        owner, _, number = path.rpartition(".")
        parts = module.get_submodule(owner)
        if number != "0" or not isinstance(parts, parametrize.ParametrizationList) or not hasattr(parts, "original"):
            raise ExportError(f"module {path!r}: spectral norm of a weight that is itself computed is not supported")
        names = f"{owner}.original", f"{path}._u", f"{path}._v"
        found.append(PowerIteration(*names, self.dim, steps, self.eps, u_first=True))

    with (
        mock.patch.object(SpectralNorm, "compute_weight", of_hook),
        mock.patch.object(parametrizations._SpectralNorm, "_power_method", of_parametrization),
    ):
        yield found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def refuse_repeated(found: Iterable[PowerIteration]) -> None:
    """A layer that is called twice moves its vectors twice and has two weights; a graph has one."""
    seen = set()
    for item in found:
        if item.u in seen:
            raise ExportError(
                f"the spectral norm of {item.weight!r} is computed more than once in a forward pass; call that layer "
                "once, or wrap the forward pass in torch.nn.utils.parametrize.cached()"
            )
        seen.add(item.u)


def write_power_iterations(context: Context, found: Iterable[PowerIteration]) -> dict[str, str]:
    """Move the vectors; gives the names under which the moves read them -> the names of the inputs."""
    inputs: dict[str, str] = {}
    for item in found:
        with context.emitter.scope("forward/spectral_norm"):
            _write(context, item)
        inputs |= {f"{name}{BEFORE}": name for name in (item.u, item.v)}
        context.new_statistics |= {name: name for name in (item.u, item.v)}
    return inputs


def _write(context: Context, item: PowerIteration) -> None:
    rank, matrix = context.rank(item.weight), item.weight
    if item.dim % rank:
        others = [axis for axis in range(rank) if axis != item.dim % rank]
        matrix = context.op("Transpose", matrix, perm=[item.dim % rank, *others])
    matrix = context.op("Flatten", matrix, axis=1)
    turned = context.op("Transpose", matrix, perm=[1, 0])
    order = [(item.u, matrix, item.v), (item.v, turned, item.u)]
    moves = (order if item.u_first else order[::-1]) * item.steps
    now = {name: f"{name}{BEFORE}" for name in (item.u, item.v)}
    for number, (target, product, source) in enumerate(moves):
        long = context.op("MatMul", product, now[source])
        length = context.op("Max", context.op("ReduceL2", long, [0], keepdims=1), item.epsilon)
        outputs = [target] if number >= len(moves) - 2 else 1  # the last ones have the vectors' own names
        now[target] = context.ops("Div", outputs, long, length)[0]
