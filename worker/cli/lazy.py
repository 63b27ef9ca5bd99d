"""Commands that are imported when they are called, so that `perdure --help` does not wait for what it does not use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["LazyCommand", "LazyGroup", "load"]


def load(target: str) -> Any:
    """The object that `module:attribute` names; a module that begins with a dot is relative to this package."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module, __package__), attribute)


class LazyCommand(TyperCommand):
    """Stands for a command where commands are listed or completed; `fetch` imports the command itself."""

    def __init__(self, name: str, target: str, help: str) -> None:
        """target: `module:attribute`, a `typer.Typer` or a function that typer can make a command of."""
        super().__init__(name, help=help)
        self.target = target

    def fetch(self) -> Any:
        found = load(self.target)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(self.name)(function)
        command = typer.main.get_command(found)
        command.name = self.name
        return command


class LazyGroup(TyperGroup):
    """A group of promises: lists them as they are, calls and completes what they stand for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.fetch() if isinstance(command, LazyCommand) else command, rest
