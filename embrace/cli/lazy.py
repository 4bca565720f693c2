"""A group of commands that imports a command's file when the command is asked for, and not to list its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_group


@dataclass(frozen=True)
class Entry:
    """Where a command is defined, and its line in the list of commands."""

    module: str
    name: str  # of a function or a typer.Typer in that module
    help: str


class Commands(Mapping[str, Any]):
    """Build commands from entries when they are looked up."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            entry = self._entries[name]
            self._built[name] = _build(name, getattr(import_module(entry.module), entry.name))
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def lazy_group(entries: Mapping[str, Entry]) -> type[TyperGroup]:
    """Make the class of a group with these commands, for `typer.Typer(cls=...)`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**{**attributes, "commands": None})
            self.commands = cast(Any, Commands(entries))

        def list_commands(self, ctx: Any) -> list[str]:
            return list(entries)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, entry.help) for name, entry in entries.items()])

    return LazyGroup


def _build(name: str, target: typer.Typer | Callable[..., None]) -> Any:
    """Turn a function or a group into a command; without markup, so that brackets in its help stay."""
    parent = typer.Typer(rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        parent.add_typer(target, name=name)
    else:
        parent.command(name)(target)
    return get_group(parent).commands[name]
