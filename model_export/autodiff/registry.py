"""Which operator has which rule.

A *rule* gets the node and the gradients of its outputs (None for an output without a reader) and gives one gradient per
input (None where there is none). A *lowering* writes the forward node in another form, when the gradient needs
values that the plain node does not give, or when another form is faster.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onnx import NodeProto

if TYPE_CHECKING:
    from model_export.autodiff.engine import Context

Gradients = Sequence[str | None]
Rule = Callable[["Context", NodeProto, Sequence[str | None]], Gradients]
Lowering = Callable[["Context", NodeProto], None]

_rules: dict[str, Rule] = {}
_lowerings: dict[str, Lowering] = {}


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register the gradient of one or more operators."""

    def register(function: Rule) -> Rule:
        _rules.update(dict.fromkeys(op_types, function))
        return function

    return register


def lowering(*op_types: str) -> Callable[[Lowering], Lowering]:
    """Register the form in which an operator's forward node is written into a training graph."""

    def register(function: Lowering) -> Lowering:
        _lowerings.update(dict.fromkeys(op_types, function))
        return function

    return register


def find_rule(op_type: str) -> Rule | None:
    _load()
    return _rules.get(op_type)


def find_lowering(op_type: str) -> Lowering | None:
    _load()
    return _lowerings.get(op_type)


def has_rule(op_type: str) -> bool:
    return find_rule(op_type) is not None


def known_operators() -> list[str]:
    _load()
    return sorted(_rules)


@functools.cache
def _load() -> None:
    """Import every file in rules/ and layouts/, which registers what it holds."""
    for name in ("rules", "layouts"):
        package = importlib.import_module(f"model_export.autodiff.{name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
