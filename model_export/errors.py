"""What can go wrong in an export, each with a message a person can act on."""

from __future__ import annotations

from federation.errors import InputError


class ExportError(InputError):
    """The model cannot become a bundle as it is."""


class MissingRule(ExportError):
    """An operator on the gradient's path has no rule."""

    def __init__(self, op_type: str, node: str, module: str) -> None:
        super().__init__(
            f"no gradient rule for operator {op_type} (node {node!r}, module {module!r}); "
            f"add one in model_export/autodiff/rules/{op_type.lower()}.py, docs/reference/operators.md shows how"
        )
