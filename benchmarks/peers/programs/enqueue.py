"""Timed enqueueing: one by one from several coroutines, or in one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .client import AsyncClient, BlockingClient

__all__ = ["Enqueued", "enqueue_all", "enqueue_all_blocking"]

_PRODUCERS = 32
"""Coroutines that each await one call at a time."""


@dataclass(frozen=True)
class Enqueued:
    """The project's handles by task number, and the seconds of all calls."""

    handles: Sequence[Any]
    seconds: float
    bulk: bool


async def enqueue_all(
    client: AsyncClient, task: str, arguments: Sequence[Sequence[Any]], *, bulk: bool, within: float
) -> Enqueued:
    """Enqueue a task for each tuple of arguments. within: seconds after which no more calls are made one by one."""
    began = time.monotonic()
    if bulk:
        many = await client.enqueue_many(task, arguments)
        return Enqueued(many, time.monotonic() - began, bulk)
    handles: list[Any] = []
    left = iter(enumerate(arguments))

    async def produce() -> None:
        for number, its in left:
            handles.append(None)
            handles[number] = await client.enqueue(task, *its)
            if time.monotonic() - began > within:
                return

    await asyncio.gather(*(produce() for _ in range(_PRODUCERS)))
    return Enqueued(handles, time.monotonic() - began, bulk)


def enqueue_all_blocking(
    client: BlockingClient, task: str, arguments: Sequence[Sequence[Any]], *, bulk: bool, within: float
) -> Enqueued:
    """Enqueue with a blocking client."""
    began = time.monotonic()
    if bulk:
        many = client.enqueue_many(task, arguments)
        return Enqueued(many, time.monotonic() - began, bulk)
    # In sequence: with these clients, several threads enqueue no more than one.
    handles = []
    for its in arguments:
        handles.append(client.enqueue(task, *its))
        if time.monotonic() - began > within:
            break
    return Enqueued(handles, time.monotonic() - began, bulk)
