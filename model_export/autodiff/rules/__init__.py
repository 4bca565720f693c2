"""Gradients of operators, one family per file. docs/reference/operators.md shows how to add one."""
