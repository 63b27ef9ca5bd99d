"""Waiting for whichever of several events comes first."""

from __future__ import annotations

import anyio

__all__ = ["first_of"]


async def first_of(*events: anyio.Event) -> None:
    """Return when one of them has happened."""
    async with anyio.create_task_group() as waiting:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            waiting.cancel_scope.cancel()

        for event in events:
            waiting.start_soon(wait, event)
