"""Long commands that clean up also when they are interrupted."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import TypeVar

import anyio
import typer

__all__ = ["run_interruptible"]

R = TypeVar("R")


def run_interruptible(work: Callable[[], Awaitable[R]]) -> R:
    """Run it to its end. SIGINT and SIGTERM cancel it; once it has cleaned up, the process ends as the signal says."""
    signals: list[int] = []
    results: list[R] = []

    async def until_interrupted() -> None:
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()
            group.start_soon(_cancel_on_signal, scope, signals)
            with scope:
                results.append(await work())
            group.cancel_scope.cancel()

    anyio.run(until_interrupted, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    if not results:
        raise typer.Exit(128 + signals[0])
    return results[0]


async def _cancel_on_signal(scope: anyio.CancelScope, signals: list[int]) -> None:
    """Listens until the cleaning up is done, so that an impatient second Ctrl-C does not cut it short."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            signals.append(number)
            scope.cancel()
