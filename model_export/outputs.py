"""Choose the tensor that is trained among those that a model returns."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from federation.inputs import NamedInput
from model_export.errors import ExportError
from model_export.inputs import called_with_row

USUAL = "logits"
SEPARATOR = ","  # between the names of several outputs
MOST_SHOWN = 8


def pick_output(module: nn.Module, name: str | None, inputs: Sequence[NamedInput] | None = None) -> nn.Module:
    """Let a module take one tensor, a row of several `inputs`, and return one; its parameters keep their names.

    Several outputs that are named become one row, in this order.
    """
    original = type(module).forward
    call = called_with_row(module, inputs) if inputs is not None else None

    def forward(self: nn.Module, input: Tensor) -> Tensor:  # exporters would make inputs of further arguments
        return _chosen(original(self, input) if call is None else call(input), name)

    module.forward = types.MethodType(forward, module)
    return module


def output_names(name: str | None) -> list[str]:
    """List the outputs that a row of several has; none if there is one."""
    return [each.strip() for each in name.split(SEPARATOR)] if name is not None and SEPARATOR in name else []


def named_tensors(result: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Take several outputs by name."""
    found = {name: _chosen(result, name) for name in names}
    if whole := [name for name, value in found.items() if not torch.is_floating_point(value) or not value.ndim]:
        raise ExportError(f"the output {whole[0]!r} has no numbers of samples to train")
    return found


def _chosen(result: Any, name: str | None) -> Tensor:
    if names := output_names(name):
        return torch.cat(
            [value.flatten(1) if value.ndim > 1 else value[:, None] for value in named_tensors(result, names).values()],
            1,
        )
    if isinstance(result, Tensor) and name is None:
        return result
    tensors = dict(_tensors(result))
    if name is not None and name in tensors:
        return tensors[name]
    if name is None and USUAL in tensors:
        return tensors[USUAL]
    floats = [value for value in tensors.values() if torch.is_floating_point(value)]
    if name is None and len(floats) == 1:
        return floats[0]
    known = ", ".join(f"{key} {tuple(value.shape)}" for key, value in list(tensors.items())[:MOST_SHOWN])
    asked = "say which one with --output NAME" if name is None else f"it has no output {name!r}"
    raise ExportError(f"the model returns {type(result).__name__} with: {known or 'no tensor'}; {asked}")


def _tensors(result: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a result has at its top, by key, field or position."""
    if isinstance(result, Tensor):
        return [("0", result)]
    if isinstance(result, Mapping):
        pairs = [(str(key), value) for key, value in result.items()]
    elif hasattr(result, "_asdict"):
        pairs = list(result._asdict().items())
    elif isinstance(result, (tuple, list)):
        pairs = [(str(number), value) for number, value in enumerate(result)]
    else:
        pairs = list(getattr(result, "__dict__", {}).items())
    return [(key, value) for key, value in pairs if isinstance(value, Tensor)]
