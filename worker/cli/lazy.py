"""Commands that are imported when they are called, so that `perdure --help` stays fast."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def load(target: str) -> Any:
    """Import the object that `module:attribute` names. A leading dot makes the module relative to this package.

    Modules are not garbage, so the collector pauses: it would search all of them again and again.
    """
    module, _, attribute = target.partition(":")
    paused = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(module, __package__), attribute)
    finally:
        if paused:
            gc.enable()


class LazyCommand(TyperCommand):
    """Placeholder for a command in lists and completions; `fetch` imports the command.

    Args:
        target: `module:attribute` of a `typer.Typer`, or of a function that typer can turn into a command.
    """

    def __init__(self, name: str, target: str, help: str) -> None:
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
    """Group of lazy commands. Fetches a command when it is called or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.fetch() if isinstance(command, LazyCommand) else command, rest
