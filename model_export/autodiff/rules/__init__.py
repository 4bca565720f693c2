"""Gradients of operators, one family per file. docs/operators.md shows how to add one."""
