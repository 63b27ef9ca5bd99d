"""A screen that is drawn again and again until Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final

import anyio
import typer

from .errors import Misuse
from .output import stdout

if TYPE_CHECKING:
    from rich.console import RenderableType

Watch = Annotated[bool, typer.Option("--watch", help="Draw the list again every two seconds until Ctrl-C.")]

REFRESH: Final = 2.0
"""Seconds between two drawings."""


def check_watch(watch: bool, json: bool) -> None:
    """Raise `Misuse` if both `--watch` and `--json` are given."""
    if watch and json:
        raise Misuse("--watch is for people and --json for programs: give one of them")


async def show_live(read: Callable[[int], Awaitable[RenderableType]], *, interval: float = REFRESH) -> None:
    """Draw what `read` returns for the width of the screen, until SIGINT or SIGTERM. Without a terminal: once."""
    from rich.live import Live

    console = stdout()
    if not console.is_terminal:
        console.print(await read(console.width))
        return

    async def draw() -> None:
        while True:
            live.update(await read(console.width), refresh=True)
            await anyio.sleep(interval)

    with (
        anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as stops,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draw)
            await anext(stops)
            tasks.cancel_scope.cancel()
