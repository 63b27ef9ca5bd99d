"""Following one task on a screen: its events as they come, where it stands, and its outcome."""

from __future__ import annotations

from typing import Any, Final

import anyio
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ...queues import Record, State, TaskHandle
from .describing import describe_event
from .output import clean, print_text, state_text, stdout

__all__ = ["watch_on_screen"]

_REFRESH: Final = 1.0
"""Seconds between looks at the record: that a worker took the task is no event."""


async def watch_on_screen(handle: TaskHandle[Any]) -> Record:
    """Show the task until it has its outcome; returns its record then."""
    console = stdout()
    if console.is_terminal:
        await _live(handle)
    else:
        async for event in handle.events():
            print_text(describe_event(event))
    record = await handle.record()
    console.print(_outcome(record))
    return record


async def _live(handle: TaskHandle[Any]) -> None:
    console = stdout()
    with Live(_standing(await handle.record()), console=console, transient=True, redirect_stdout=False) as live:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refresh, handle, live)
            async for event in handle.events():
                console.print(clean(describe_event(event)))
                live.update(_standing(await handle.record()))
            tasks.cancel_scope.cancel()


async def _refresh(handle: TaskHandle[Any], live: Live) -> None:
    while True:
        await anyio.sleep(_REFRESH)
        live.update(_standing(await handle.record()))


def _standing(record: Record) -> Spinner:
    where = f" in step {record.step}" if record.step else ""
    if record.worker and record.state is State.RUNNING:
        where += f" on {record.worker}"
    return Spinner("dots", Text.assemble(clean(f"{record.task} {record.id} "), state_text(record.state), clean(where)))


def _outcome(record: Record) -> Text:
    said = f" after {record.attempts} attempts and {record.crashes} crashes"
    if record.reason:
        said += f", {record.reason}"
    if record.error and record.state is State.DEAD:
        said += f": {record.error.get('error')}: {record.error.get('message')}"
    return Text.assemble(state_text(record.state), clean(said))
