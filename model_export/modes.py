"""Training and inference mode of a module's parts: what its author keeps in inference stays there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Modes = Mapping[str, bool]  # by the path of a part: whether it is in training mode


def training_modes(module: nn.Module) -> Modes:
    """The modes in which a module is trained.

    A module in training mode keeps the parts that are in inference mode; one that is in inference mode as a whole goes
    to training. A `train` of its own decides itself.
    """
    if not module.training or any(type(part).train is not nn.Module.train for part in module.modules()):
        module.train()
    return {path: part.training for path, part in module.named_modules()}


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Put each part into its mode."""
    for path, part in module.named_modules():
        part.training = modes[path]
